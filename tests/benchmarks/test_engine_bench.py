"""That all contestants are given the same, answer the same, and are counted as they should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from albert_serve.config import AlbertConfig
from benchmarks import engine
from benchmarks.engines import hf, measurement, ours
from benchmarks.engines import report as figures
from benchmarks.engines.contest import Child, Contest, CpuWatch, Result
from benchmarks.engines.hf_questions import HfAnswerer
from benchmarks.engines.inputs import (
    Batch,
    Floats,
    Inputs,
    Selection,
    Tokens,
    choose,
    group,
    in_order,
    pad,
    plain_encoder,
    probabilities,
)
from benchmarks.engines.jobs import (
    CONTESTANTS,
    KINDS,
    Job,
    Peak,
    Request,
    Shape,
    TaskName,
    Turn,
    Variant,
)
from benchmarks.engines.measurement import merged
from benchmarks.engines.models import FORMS, Plan, make_checkpoint
from benchmarks.engines.report import Report
from benchmarks.engines.tables import markdown
from benchmarks.engines.turns import Player, Referee, ShapePlayer, read_memory
from benchmarks.harness.errors import BenchmarkError
from export.write import export_bundle
from tests.training.support import REPOSITORY, SQUAD, WIKI
from training.data.questions import read_squad

TOKENIZER = REPOSITORY / "models" / "albert-small-en" / "tokenizer.json"
MAX_TOKENS = 64
TINY = AlbertConfig(
    vocab_size=12000,
    embedding_size=16,
    hidden_size=32,
    num_layers=3,
    num_heads=2,
    ffn_size=64,
    max_positions=MAX_TOKENS,
    initializer_range=0.2,
)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    selection = Selection(
        texts=[WIKI], questions=[SQUAD], num_texts=12, num_questions=8, max_tokens=MAX_TOKENS
    )
    return choose(selection, Tokenizer.from_file(str(TOKENIZER)))


@pytest.fixture(scope="module")
def folder(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of both tasks, their bundles, and the inputs."""
    folder = tmp_path_factory.mktemp("engines")
    inputs.write(folder / "inputs.json")
    classes: dict[TaskName, Any] = {
        "text-classification": transformers.AlbertForSequenceClassification,
        "question-answering": transformers.AlbertForQuestionAnswering,
    }
    for task, kind in classes.items():
        torch.manual_seed(0)
        kind(transformers.AlbertConfig.from_dict(TINY.to_hf())).save_pretrained(folder / "source")
        plan = make_plan(folder, task, "checkpoint", folder / "source")
        make_checkpoint(plan)
        export_bundle(plan.target, folder / "models" / task / "bundle-fp32")
    return folder


def make_plan(folder: Path, task: TaskName, form: str, source: Path | None) -> Plan:
    return Plan(
        form=form,
        task=task,
        source=source,
        preset="small",
        tokenizer=TOKENIZER,
        inputs=folder / "inputs.json",
        target=folder / "models" / task / form,
        max_tokens=MAX_TOKENS,
        num_threads=1,
    )


def make_job(folder: Path, key: str, task: TaskName = "text-classification", way: int = 0) -> Job:
    variant = CONTESTANTS[key].variants[way]
    models = folder / "models" / task
    return Job(
        contestant=CONTESTANTS[key].name,
        variant=variant,
        task=task,
        model=models / variant.form,
        tokenizer=models / "checkpoint" / "tokenizer.json",
        inputs=folder / "inputs.json",
        num_threads=1,
        max_tokens=MAX_TOKENS,
    )


OPENERS: dict[str, Callable[[Job], Player]] = {
    "transformers-fp32": hf.open_player,
    "pipeline-8": hf.open_player,
    "ours-fp32": ours.open_player,
}


@pytest.mark.parametrize("key", ["pipeline-8", "ours-fp32"])
def test_contestants_answer_alike_and_read_the_same_tokens(
    key: str, folder: Path, inputs: Inputs
) -> None:
    right = OPENERS["transformers-fp32"](make_job(folder, "transformers-fp32")).process(
        inputs.texts, 4
    )
    result = OPENERS[key](make_job(folder, key)).process(inputs.texts, 4)
    np.testing.assert_allclose(result.outputs, right.outputs, atol=1e-5)
    assert np.std(np.array(right.outputs)[:, 0]) > 1e-3  # they depend on the text
    assert result.count().num_real == right.count().num_real == sum(inputs.text_lengths)
    assert result.count().num_computed >= result.count().num_real


def test_fixed_shapes_are_answered_alike(folder: Path, inputs: Inputs) -> None:
    batch = inputs.batch(Shape(num_rows=3, length=20))
    results = []
    for key in ("transformers-fp32", "ours-fp32"):
        player = OPENERS[key](make_job(folder, key))
        assert isinstance(player, ShapePlayer)
        results.append(player.logits(batch))
    assert results[0].shape == (3, 2)
    np.testing.assert_allclose(results[0], results[1], atol=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "autocast"])
def test_bf16_is_near_and_not_the_same(dtype: str, folder: Path, inputs: Inputs) -> None:
    right = hf.open_player(make_job(folder, "transformers-fp32")).process(inputs.texts, 4)
    job = make_job(folder, "transformers-bf16", way=["bf16", "autocast"].index(dtype))
    assert job.variant.settings["dtype"] == dtype
    difference = figures.difference(
        hf.open_player(job).process(inputs.texts, 4).outputs, right.outputs
    )
    assert 0 < difference.relative < 0.5


# Several windows are read as one document by ours, each for itself by theirs.
@pytest.mark.parametrize(("num_characters", "least"), [(80, 0.9), (10_000, 0.5)])
def test_answers_are_those_of_transformers(
    num_characters: int, least: float, folder: Path, tmp_path: Path
) -> None:
    """With a head so sure of itself that few spans are nearly as good as the best."""
    task: TaskName = "question-answering"
    sure = tmp_path / "models" / task / "checkpoint"
    sure.mkdir(parents=True)
    source = folder / "models" / task / "checkpoint"
    for name in ("config.json", "tokenizer.json"):
        (sure / name).write_bytes((source / name).read_bytes())
    weights = load_file(source / "model.safetensors")
    weights["qa_outputs.weight"] *= 20
    save_file(weights, sure / "model.safetensors", metadata={"format": "pt"})
    export_bundle(sure, sure.parent / "bundle-fp32")
    items = [
        {"question": one.question, "context": one.context[:num_characters]}
        for one in read_squad([SQUAD])
    ]
    theirs = hf.open_player(make_job(tmp_path, "transformers-fp32", task)).process(items, 4)
    example = hf.open_player(make_job(tmp_path, "example-qa", task)).process(items, 4)
    result = ours.open_player(make_job(tmp_path, "ours-fp32", task)).process(items, 0)
    assert figures.same_answers(example.outputs, theirs.outputs) >= least
    assert figures.same_answers(result.outputs, theirs.outputs) >= least
    assert theirs.count().num_real == example.count().num_real
    assert example.count().num_computed % MAX_TOKENS == 0
    assert example.count().num_computed > theirs.count().num_computed


@given(place=st.integers(0, 200), num_words=st.integers(201, 300), pads_fully=st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_example_finds_an_answer_in_whichever_window_it_is(
    place: int, num_words: int, pads_fully: bool
) -> None:
    tokenizer = transformers.AlbertTokenizer.from_pretrained(TOKENIZER.parent)
    sought = tokenizer.convert_tokens_to_ids("▁london")
    assert sought != tokenizer.unk_token_id

    def spans(batch: Batch) -> tuple[Floats, Floats]:
        is_sought = (batch.ids == sought).astype(np.float32)
        return is_sought, is_sought

    words = ["water"] * num_words
    words[place] = "London"
    player = HfAnswerer(
        tokenizer=tokenizer, spans=spans, max_tokens=MAX_TOKENS, pads_fully=pads_fully
    )
    item = {"question": "Is london here?", "context": " ".join(words)}
    assert player.process([item], 4).outputs == ["London"]


@given(LENGTHS, st.integers(1, 17))
def test_batches_hold_everything_once(lengths: list[int], size: int) -> None:
    for groups in (group(lengths, size), in_order(len(lengths), size)):
        assert sorted(index for members in groups for index in members) == [*range(len(lengths))]
        assert all(len(members) == size for members in groups[:-1])
        tokens = Tokens.of(lengths, groups)
        padded = [pad([[5] * lengths[i] for i in members]) for members in groups]
        assert tokens.num_real == sum(int(batch.mask.sum()) for batch in padded) == sum(lengths)
        assert tokens.num_computed == sum(batch.ids.size for batch in padded)


@pytest.mark.parametrize("shape", ["1x8", "4x16"])
def test_operations_are_those_that_torch_counts(shape: str) -> None:
    config = transformers.AlbertConfig.from_dict(TINY.to_hf())
    config.num_labels = 5
    config._attn_implementation = "eager"  # the counter passes over the fused kernel
    model: Any = transformers.AlbertForSequenceClassification(config)
    model.eval()
    parsed = Shape.parse(shape)
    ids = torch.ones(parsed.num_rows, parsed.length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids)
    assert figures.forward_flops(TINY, parsed, 5) == counter.get_total_flops()


def make_turn(seconds: float, outputs: Sequence[Any] = (), num_items: int = 4) -> Turn:
    return Turn(
        seconds=seconds,
        cpu_seconds=seconds,
        num_items=num_items,
        num_tokens=30,
        num_computed=40,
        outputs=list(outputs),
    )


def make_peak(fp32: float) -> Peak:
    return Peak(fp32=fp32, bf16=2 * fp32, fp32_by="torch, 64 wide", bf16_by="torch, 64 wide")


def test_ratios_are_medians_of_each_round() -> None:
    slow = [make_turn(seconds) for seconds in (2.0, 20.0, 4.0)]
    fast = [make_turn(seconds) for seconds in (1.0, 4.0, 1.0)]
    assert figures.speed_ratio(fast, slow) == 4
    assert figures.speed_ratio(slow, fast) == 1 / 4
    assert figures.median_seconds(slow) == 4
    assert figures.median_rate(fast) == 4
    peaks = [make_peak(fp32) for fp32 in (100.0, 50.0, 400.0)]
    assert figures.part_of_peak(fast, peaks, 20.0) == 0.1  # of 0.2, 0.1 and 0.05
    assert make_turn(1.0).padding == 0.25


def test_a_stream_done_in_part_is_compared_by_its_rate() -> None:
    assert (
        figures.speed_ratio([make_turn(1.0, num_items=2)], [make_turn(1.0, num_items=6)]) == 1 / 3
    )


def test_differences_are_relative_to_an_answer_without_the_text() -> None:
    reference = [[0.2, 0.8], [0.6, 0.4], [0.4, 0.6]]
    same = figures.difference(reference, reference)
    assert (same.largest, same.relative, same.same_label, same.num_items) == (0, 0, 1, 3)
    mean = np.mean(reference, axis=0).tolist()
    blind = figures.difference([mean] * 3, reference)
    assert blind.relative == pytest.approx(1)
    assert blind.largest == pytest.approx(0.2)
    assert blind.same_label == pytest.approx(2 / 3)


@given(st.lists(st.lists(st.floats(-50, 50), min_size=3, max_size=3), min_size=1, max_size=5))
def test_probabilities_are_those_of_torch(logits: list[list[float]]) -> None:
    given_BK = np.array(logits, np.float32)
    right = torch.from_numpy(given_BK).double().softmax(-1).numpy()
    np.testing.assert_allclose(probabilities(given_BK), right, atol=1e-12)
    single_B1 = given_BK[:, :1]
    right = torch.from_numpy(single_B1).double().sigmoid().numpy()
    np.testing.assert_allclose(probabilities(single_B1), right, atol=1e-12)


def test_texts_have_the_requested_lengths(inputs: Inputs) -> None:
    encode = plain_encoder(TOKENIZER, 10_000)
    assert [len(ids) for ids in encode(inputs.texts)] == inputs.text_lengths
    assert len(inputs.texts) == 12
    assert all(8 <= length <= MAX_TOKENS for length in inputs.text_lengths)
    assert not set(inputs.texts) & set(inputs.calibration)
    assert len(inputs.questions) == 8


@pytest.mark.parametrize("num_items", [1, 5, 16, 40, 96])
def test_parts_spread_over_all_lengths(num_items: int, inputs: Inputs) -> None:
    lengths = np.random.default_rng(0).permutation(num_items).tolist()
    many = replace(inputs, texts=["text"] * num_items, text_lengths=lengths)
    assert many.indices("texts", "all") == [*range(num_items)]
    for part in ("few", "third"):
        indices = many.indices("texts", part)
        assert indices == sorted(set(indices))
        chosen = [lengths[index] for index in indices]
        assert abs(np.mean(chosen) - np.mean(lengths)) <= max(1, num_items / 16)
    assert len(many.indices("texts", "few")) >= min(num_items, 16)


def test_no_text_of_a_fitting_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    selection = Selection(
        texts=[tmp_path], questions=[], num_texts=2, num_questions=0, max_tokens=MAX_TOKENS
    )
    with pytest.raises(BenchmarkError, match=r"no text of 8 to 64 tokens .*--texts"):
        choose(selection, Tokenizer.from_file(str(TOKENIZER)))


def test_everything_travels_as_json(folder: Path, inputs: Inputs) -> None:
    job = make_job(folder, "transformers-fp32-compiled")
    assert Job.from_json(job.to_json()) == job
    assert job.environment["TORCHINDUCTOR_FREEZING"] == "1"
    assert job.environment["OMP_NUM_THREADS"] == "1"
    for source in (None, folder):
        plan = make_plan(folder, "text-classification", "onnx", source)
        assert Plan.from_json(plan.to_json()) == plan
    assert Inputs.read(folder / "inputs.json") == inputs


@pytest.mark.parametrize("text", ["", "4", "4x", "x8", "0x8", "4x1", "4x8x2", "-1x8", "axb"])
def test_an_invalid_shape_is_refused(text: str) -> None:
    with pytest.raises(BenchmarkError, match=r"4x128|at least 2 tokens"):
        Shape.parse(text)


def test_the_referee_times_and_counts(folder: Path, inputs: Inputs) -> None:
    referee = Referee(ours.open_player(make_job(folder, "ours-fp32")), inputs)
    stream = Turn(**referee.answer(Request(case="texts", part="third")))
    assert stream.num_items == len(stream.outputs) == 4
    assert 0 <= stream.padding < 1
    call = Turn(**referee.answer(Request(case="2x9")))
    assert (call.num_items, call.num_tokens, call.padding) == (2, 18, 0)
    assert 0 < call.seconds < 60
    memory = referee.answer(Request(case="memory"))
    assert memory["rss_bytes"] >= memory["anonymous_bytes"] > 1 << 20
    assert read_memory().pss_bytes > 1 << 20


def test_every_contestant_has_a_program_and_a_form() -> None:
    programs = REPOSITORY / "benchmarks" / "engines"
    for contestant in CONTESTANTS.values():
        for variant in contestant.variants:
            assert variant.form in FORMS
            assert set(variant.kinds) <= set(KINDS)
            assert (programs / f"{variant.program}.py").is_file()
            assert Variant.from_mapping(json.loads(json.dumps(vars_of(variant)))) == variant
    for kind in KINDS:
        for key in ("transformers-fp32", "ours-fp32", "ours-int8"):
            assert CONTESTANTS[key].takes_part(kind)


def vars_of(variant: Variant) -> dict[str, Any]:
    return {name: getattr(variant, name) for name in Variant.__slots__}


def test_a_missing_package_leaves_its_contestant_out_with_advice() -> None:
    absent = replace(CONTESTANTS["openvino-int8"], modules=("no_such_module",))
    here = CONTESTANTS["ours-fp32"]
    note, there = measurement.present([absent, here])
    assert there is here
    assert isinstance(note, str)
    assert "pip install openvino nncf" in note


def test_a_process_that_dies_says_of_what(folder: Path, tmp_path: Path) -> None:
    job = replace(make_job(folder, "ours-fp32"), model=tmp_path / "nowhere")
    with (
        pytest.raises(BenchmarkError, match=r"ours fp32 ended with status 1: .*nowhere.* is not"),
        Child(job, tmp_path / "log"),
    ):
        pass


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="the system does not tell")
def test_the_cpu_watch_measures_other_processes() -> None:
    witness = CpuWatch()
    assert witness.others is None
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        for _ in range(50):
            witness.watch(os.getpid(), lambda: time.sleep(0.1))
            if (witness.others or 0) > 0.1:
                break
        other.kill()
    assert witness.others is not None
    assert witness.others > 0.1


def make_result(key: str, seconds: float, outputs: Sequence[Sequence[float]]) -> Result:
    contestant = CONTESTANTS[key]
    return Result(
        contestant=contestant,
        turns={
            "1x8": [make_turn(seconds, outputs[:1], num_items=1)],
            "texts": [make_turn(seconds, outputs, num_items=len(outputs))],
        },
        ways={"1x8": contestant.variants[0].name, "texts": contestant.variants[0].name},
        batch_sizes={"texts": contestant.batch_sizes[0]},
        processes=[],
        failures=["it stumbled"] if key == "ours-fp32" else [],
    )


def test_tables_show_speeds_and_differences(inputs: Inputs) -> None:
    right = [[0.25, 0.75], [0.75, 0.25]] * 6
    wrong = [[0.75, 0.25], [0.25, 0.75]] * 6
    report = Report(
        machine=["a machine"],
        num_threads=2,
        config=TINY,
        num_labels=2,
        inputs=inputs,
        results=[
            make_result("transformers-fp32", 0.004, right),
            make_result("ours-fp32", 0.001, wrong),
        ],
        peaks={"1x8": [make_peak(1e9)], "texts": [make_peak(1e9)]},
        others=0.5,
        disk={},
        guesses=True,
        notes=["somebody is left out"],
    )
    text = markdown(report)
    flops = figures.forward_flops(TINY, Shape(num_rows=1, length=8), 2)
    for expected in (
        "| transformers fp32 | 4.0 |",
        "| **ours fp32** | 4.00 |",
        f"({flops / 0.001 / 1e9:.0%})",
        "| **ours fp32** | 12000.00 | 4.00 | 1.00 | own | 25.0% | 5.0e-01 | 200.0% | 0% |",
        "- ours fp32: it stumbled",
        "- somebody is left out",
        "- other programs used 0.50 CPUs during turns",
        "**the machine was busy with something else**",
        "- ours fp32 used 1.0 CPUs or more at 1x8, texts",
        "spread: standard deviation of its probabilities over the texts, 0.250",
    ):
        assert expected in text
    content = report.to_dict()
    assert content["contestants"][1]["differences"]["texts"]["largest"] == 0.5
    assert content["flops"] == {"1x8": flops}
    json.dumps(content)


def test_results_of_both_tasks_become_one() -> None:
    one = make_result("ours-fp32", 0.001, [[0.5, 0.5]])
    other = replace(one, turns={"questions": one.turns["texts"]}, ways={"questions": ""})
    (both,) = merged([one, other])
    assert set(both.turns) == {"1x8", "texts", "questions"}
    assert both.failures == ["it stumbled"] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "4by128"], "no shape"),
        (["--checkpoint", "nowhere"], "nowhere has neither tokenizer.json nor spiece.model"),
        (["--tokenizer", "nowhere.json"], "nowhere.json cannot be read"),
        (["--contestants", "pipeline-1", "--cases", "questions"], "none of the contestants"),
    ],
)
def test_impossible_options_are_reported_in_a_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert engine.main([*options, "--output", str(tmp_path)]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.slow
def test_contestants_are_measured_in_turns(folder: Path, inputs: Inputs, tmp_path: Path) -> None:
    field = [
        (CONTESTANTS[key], [make_job(folder, key)]) for key in ("transformers-fp32", "ours-fp32")
    ]
    broken = replace(make_job(folder, "ours-int8"), model=tmp_path / "nowhere")
    bar: tqdm[Any]
    with tqdm(disable=True) as bar:
        contest = Contest(cases=["1x8", "texts"], rounds=2, shape_s=0.01, logs=tmp_path, bar=bar)
        measured = contest.run(
            [*field, (CONTESTANTS["ours-int8"], [broken])], make_peak_job(folder)
        )
    theirs, our, absent = measured.results
    assert measured.others is None or measured.others >= 0
    for result in (theirs, our):
        assert not result.failures
        assert {case: len(turns) for case, turns in result.turns.items()} == {"1x8": 2, "texts": 2}
        assert [process.job.contestant for process in result.processes] == [result.contestant.name]
    assert theirs.batch_sizes["texts"] in CONTESTANTS["transformers-fp32"].batch_sizes
    assert our.batch_sizes == {"texts": 0}
    for case in ("1x8", "texts"):
        one, other = (result.turns[case][0] for result in (theirs, our))
        assert one.num_tokens == other.num_tokens
        assert figures.difference(one.outputs, other.outputs).largest < 1e-5
        assert all(peak.fp32 > 1e9 for peak in measured.peaks[case])
    assert len(absent.failures) == 1
    assert not absent.turns


def make_peak_job(folder: Path) -> Job:
    variant = Variant(name="", program="peak", form="", kinds=())
    return replace(make_job(folder, "ours-fp32"), contestant="the machine", variant=variant)


def test_a_contestant_that_dies_in_its_turn_says_of_what(folder: Path, tmp_path: Path) -> None:
    with Child(make_job(folder, "ours-fp32"), tmp_path / "log") as child:
        assert child.turn(Request(case="1x64")).num_tokens == 64
        with pytest.raises(BenchmarkError, match="65 tokens; the model takes 1 to 64"):
            child.turn(Request(case="1x65"))
        with pytest.raises(BenchmarkError, match="ended with status 1"):
            child.memory()


@pytest.mark.slow
def test_the_command_writes_tables_and_results(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--checkpoint", str(folder / "models" / "text-classification" / "checkpoint")]
    amounts = ["--num-texts", "6", "--rounds", "2", "--turn", "0.01s", "--threads", "1"]
    who = ["--contestants", "transformers-fp32", "ours-fp32", "--cases", "shapes", "texts"]
    where = ["--shapes", "1x8", "--output", str(tmp_path)]
    assert engine.main([*options, *amounts, *who, *where]) == 0
    content = json.loads((tmp_path / "results.json").read_text())
    theirs, our = content["contestants"]
    for result in (theirs, our):
        assert not result["failures"]
        assert [len(turns) for turns in result["turns"].values()] == [2, 2]
    assert our["differences"]["texts"]["largest"] < 1e-5
    assert our["turns"]["texts"][0]["num_tokens"] == theirs["turns"]["texts"][0]["num_tokens"]
    assert content["disk_bytes"]["text-classification/bundle-fp32"] > 12000 * 16 * 4
    assert "**ours fp32**" in (tmp_path / "tables.md").read_text()
    assert "**ours fp32**" in capsys.readouterr().out


@pytest.mark.slow
def test_all_contestants_take_part_and_agree(tmp_path: Path) -> None:
    amounts = ["--num-texts", "6", "--num-questions", "3", "--rounds", "1", "--turn", "0.01s"]
    where = ["--preset", "small", "--shapes", "1x8", "--threads", "1", "--output", str(tmp_path)]
    assert engine.main([*amounts, *where]) == 0
    content = json.loads((tmp_path / "results.json").read_text())
    present = {
        one.name for one in measurement.present([*CONTESTANTS.values()]) if not isinstance(one, str)
    }
    assert {one["name"] for one in content["contestants"]} == present
    for result in content["contestants"]:
        assert not result["failures"]
        for difference in result["differences"].values():
            assert difference["largest"] < (1e-5 if "fp32" in result["name"] else 0.1)
