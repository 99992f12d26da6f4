"""A bundle's answers are compared with torch's: by labels, or by the probabilities without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from albert_serve.bundle.manifest import Bundle, HeadEntry, ProblemType, Quality
from albert_serve.runtime.engine import Engine
from albert_serve.settings import shipped_bundle
from albert_serve.tasks.base import EncoderInput, Logits
from albert_serve.tokenizer import AlbertTokenizer
from export.__main__ import main
from export.config import ExportError
from export.job import ExportConfig
from export.labelled import read_labelled_data
from export.precision import quantize
from export.quality import Comparison, MeasuredQuality, check_quality, compare
from export.source import Source, read_source
from tests.export.conftest import WIKI
from tests.export.exporting import export_bundle
from tests.training.support import read_labelled
from training.model.checkpoint import load_checkpoint
from training.tasks.classification.files import labelled_examples
from training.tasks.classification.metrics import classify
from training.tasks.engine import TorchEngine
from training.tasks.question_answering.files import read_squad
from training.tasks.question_answering.metrics import answer_questions, question_figures

pytestmark = pytest.mark.process

TEXTS: Final = "text-classification"
SQUAD = WIKI.with_name("squad.json")
Capture = pytest.CaptureFixture[str]


class Chosen:
    """Runs nothing: the logits of each input are chosen."""

    max_batch_tokens = 100

    def __init__(self, choose: Callable[[EncoderInput], Logits]) -> None:
        self.choose = choose

    def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        return [self.choose(item) for item in inputs]


@pytest.fixture(scope="module")
def source(real_checkpoint: Path) -> Source:
    return read_source(real_checkpoint)


@pytest.fixture(scope="module")
def tokenizer(real_checkpoint: Path) -> AlbertTokenizer:
    return AlbertTokenizer.from_file(real_checkpoint / "tokenizer.json")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 texts, of which one is longer than the model's 64 positions."""
    file = tmp_path_factory.mktemp("labelled") / "dev.tsv"
    texts = [f"{thing} {n} was good" for thing in ("the game", "a city") for n in range(20)]
    texts[7] *= 30
    rows = [f"{text}\t{number % 3 % 2}" for number, text in enumerate(texts)]
    file.write_text("\n".join(["text\tlabel", *rows]))
    return file


def test_in_fp32_all_labelled_data_has_the_metrics_of_evaluate(
    real_checkpoint: Path,
    source: Source,
    tokenizer: AlbertTokenizer,
    labelled: Path,
    tmp_path: Path,
) -> None:
    config = ExportConfig(
        checkpoint=real_checkpoint,
        bundle=tmp_path / "bundle",
        text_classification=(labelled,),
        question_answering=(SQUAD,),
    )
    bundle = export_bundle(real_checkpoint, tmp_path / "bundle").bundle
    model = load_checkpoint(source.folder)

    data = read_labelled_data(config, source)
    compared = compare(source, tokenizer, TorchEngine(model), Engine.open(bundle), data)

    assert compared.quality.keys() == {TEXTS, "question-answering"}
    assert all(quality.cost == pytest.approx(0) for quality in compared.quality.values())
    check_quality(compared, 0.0)
    texts, _ = read_labelled([labelled], source.heads[TEXTS].labels)
    predicted = classify(TorchEngine(model), tokenizer, texts, ["a", "b"], length=64).figures()
    of_texts = compared.quality[TEXTS]
    assert of_texts.torch == pytest.approx(100 * predicted["text_classification_accuracy"])
    assert (of_texts.count, of_texts.data) == (40, ["dev.tsv"])
    figures = question_figures(answer_questions(model, tokenizer, read_squad([SQUAD])), 0.0)
    f1 = compared.quality["question-answering"].torch
    assert f1 == pytest.approx(figures["question_answering_f1"])
    assert f1 > 0


def test_each_wrong_answer_costs_its_share(
    source: Source, tokenizer: AlbertTokenizer, labelled: Path
) -> None:
    config = ExportConfig(checkpoint="", bundle="", text_classification=(labelled,))
    data = read_labelled_data(config, source)
    texts, _ = read_labelled([labelled], source.heads[TEXTS].labels)
    examples, _ = labelled_examples(texts, tokenizer, length=64, truncation=True)
    ids = [example.ids for example in examples]

    def answer(encoded: EncoderInput, num_wrong: int) -> Logits:
        place = ids.index(encoded.ids)
        return np.eye(2, dtype=np.float32)[[(place % 3 % 2 + (place < num_wrong)) % 2]]

    alone = replace(source, heads={TEXTS: source.heads[TEXTS]})
    knowing, wrong = Chosen(partial(answer, num_wrong=0)), Chosen(partial(answer, num_wrong=7))
    result = compare(alone, tokenizer, knowing, wrong, data).measured[TEXTS]
    assert result.quality.torch == 100
    assert result.quality.cost == pytest.approx(100 * 7 / 40)
    assert (result.num_worse, result.num_better) == (7, 0)


@pytest.mark.parametrize(
    ("problem", "ours", "theirs", "difference"),
    [
        ("single_label_classification", [2, 2, -30], [2, 2, -30], 0),
        ("single_label_classification", [30, 0, 0], [0, 30, 0], 1),
        ("single_label_classification", [0, 0, 0, 0], [30, 0, 0, 0], 0.75),
        ("multi_label_classification", [0, 30, 0], [0, 0, 0], 0.5),
        pytest.param("regression", [4], [3], 0.25, id="share-of-the-score"),
        pytest.param("regression", [0.5], [0.25], 0.25, id="share-of-1"),
    ],
)
def test_a_difference_is_one_of_probabilities(
    source: Source,
    tokenizer: AlbertTokenizer,
    tmp_path: Path,
    problem: ProblemType,
    ours: list[float],
    theirs: list[float],
    difference: float,
) -> None:
    entry = HeadEntry(graph="a.onnx", num_outputs=len(ours), problem_type=problem)
    alone = replace(source, heads={TEXTS: entry})
    file = tmp_path / "mine.txt"
    file.write_text("It rained.\nWe stayed in.\n\nThe sun came out.")
    reference = Chosen(lambda _: np.array([ours], np.float32))
    engine = Chosen(lambda _: np.array([theirs], np.float32))
    compared = compare(alone, tokenizer, reference, engine, {}, [file])
    assert compared.differences == {TEXTS: pytest.approx(difference, abs=1e-6)}
    assert compared.texts == ["mine.txt"]
    assert compared.quality == {}
    file.write_text(" \n")
    with pytest.raises(ExportError, match=r"no text in .*mine\.txt"):
        compare(alone, tokenizer, reference, engine, {}, [file])


def divide_by_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break int8: what multiplies by the scales divides by them."""

    def broken(weight_OI: Any) -> Any:
        int8_IO, scale_O = quantize(weight_OI)
        return int8_IO, (1 / np.where(scale_O > 0, scale_O, 1)).astype(np.float32)

    monkeypatch.setattr("export.precision.quantize", broken)


def test_int8_without_labels_is_rejected_only_if_it_is_broken(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a classifier that finds the built-in texts unlike those of its training."""
    target = tmp_path / "bundle"
    options = [str(shipped_bundle()), str(target), "--precision", "int8"]
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert "mean difference of probabilities from torch, on texts.jsonl" in printed
    assert "text-classification" in printed.partition("mean difference")[2]
    assert Bundle.open(target).manifest.heads["text-classification"].quality is None
    divide_by_scales(monkeypatch)
    broken = [*options, "--overwrite", "--cuda-precision", "fp32"]
    assert main(broken) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "text-classification is broken: its probabilities differ from torch's by 0." in error
    assert "(texts.jsonl); at most 0.2 is allowed" in error
    assert main([*broken, "--force"]) == 0


def measured(metric: str, torch: float, worse: int, better: int) -> MeasuredQuality:
    lost = 100 * (worse - better) / 200
    quality = Quality(metric=metric, torch=torch, bundle=torch - lost, count=200)
    return MeasuredQuality(quality=quality, num_worse=worse, num_better=better)


@pytest.mark.parametrize(
    ("task", "result", "max_cost", "message"),
    [
        pytest.param(TEXTS, measured("accuracy", 90, 1, 0), 0.1, "", id="one"),
        # Six of six that change by chance do so in the same way once in 64, seven once in 128.
        (TEXTS, measured("accuracy", 90, 6, 0), 1.0, ""),
        (
            TEXTS,
            measured("accuracy", 90, 7, 0),
            1.0,
            "makes 7 of 200 answers worse and 0 better: accuracy falls from 90.00 to 86.50",
        ),
        (TEXTS, measured("accuracy", 90, 7, 0), 4.0, ""),
        pytest.param("fill-mask", measured("accuracy", 51, 40, 30), 1.0, "", id="both-ways"),
        ("question-answering", measured("F1", 51, 60, 30), 1.0, "makes 60 of 200 answers worse"),
    ],
)
def test_a_certain_loss_is_rejected_with_what_can_be_done(
    task: str, result: MeasuredQuality, max_cost: float, message: str
) -> None:
    results = {task: result, "right": measured("accuracy", 80.0, 0, 0)}
    compared = Comparison(measured=results, differences={"other": 0.19})
    if not message:
        check_quality(compared, max_cost)
        return
    with pytest.raises(ExportError) as caught:
        check_quality(compared, max_cost)
    error = str(caught.value)
    assert message in error
    assert "right:" not in error
    assert "\n" not in error
    for option in ("--tasks", "--keep-fp32", "--max-cost", "--force"):
        assert option in error


@pytest.mark.parametrize("difference", [0.21, float("nan")])
def test_a_large_difference_of_probabilities_is_rejected(difference: float) -> None:
    compared = Comparison(differences={"fill-mask": difference}, texts=["mine.txt"])
    with pytest.raises(ExportError, match=r"fill-mask is broken: .* \(mine\.txt\); at most 0\.2"):
        check_quality(compared, 100.0)
