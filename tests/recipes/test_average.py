"""The teacher of a task distillation, and the mean of the weights of checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from recipes.albert_small_en import average, finetune_teacher, sentences
from tests.training.distillation.teachers import make_bert
from tests.training.support import randomize
from training.commands import finetune
from training.model.checkpoint import load_checkpoint, read_config, save_checkpoint
from training.model.hf_names import parameters
from training.model.provenance import read_stages, record_stage


@pytest.fixture
def two(pretrained: Path, tmp_path: Path) -> list[Path]:
    """A checkpoint, and one of other weights with its heads."""
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(pretrained / "checkpoint", first)
    shutil.copytree(first, second)
    model = load_checkpoint(second)
    randomize(model, seed=1)
    extra = {key: read_config(first)[key] for key in ("albert_sentence_task",)}
    save_checkpoint(model, second, extra_config=extra)
    return [first, second]


def run(folders: list[Path], output: Path, *options: str) -> int:
    return average.main([*map(str, folders), *options, "--output", str(output)])


@pytest.mark.parametrize(
    ("options", "share"),
    [((), 0.5), (("--weights", "3", "1"), 0.25), (("--weights", "2", "2"), 0.5)],
)
def test_every_weight_is_the_mean(
    two: list[Path], tmp_path: Path, options: tuple[str, ...], share: float
) -> None:
    record_stage(two[1], "albert-serve finetune", {"steps": 2}, earlier=read_stages(two[1]))
    assert run(two, tmp_path / "mean", *options) == 0
    first, second, mean = (
        parameters(load_checkpoint(folder)) for folder in (*two, tmp_path / "mean")
    )
    assert first.keys() == mean.keys()
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, torch.lerp(first[name], second[name], share))
    assert read_config(tmp_path / "mean") == read_config(two[0])
    assert (tmp_path / "mean" / "tokenizer.json").read_bytes() == (
        two[0] / "tokenizer.json"
    ).read_bytes()
    *earlier, last = read_stages(tmp_path / "mean")
    assert earlier == read_stages(two[0])
    assert last["program"] == "recipes.albert_small_en.average"
    assert last["averaged"] == [{"stages": read_stages(two[1])[-1:]}]


def test_a_head_that_others_lack_is_the_mean_of_those_that_have_it(
    two: list[Path], tmp_path: Path
) -> None:
    model = load_checkpoint(two[0], {**load_checkpoint(two[0]).tasks, "question-answering": 2})
    randomize(model, seed=2)
    save_checkpoint(model, two[0])
    assert run(two, tmp_path / "mean", "--weights", "1", "3") == 0
    mean, second = load_checkpoint(tmp_path / "mean"), load_checkpoint(two[1])
    assert mean.tasks == model.tasks
    for name, tensor in parameters(mean).items():
        own, other = parameters(model)[name], parameters(second)
        expected = torch.lerp(own, other[name], 0.75) if name in other else own
        torch.testing.assert_close(tensor, expected)


Capture = pytest.CaptureFixture[str]


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """Texts whose label is a word of theirs."""
    lines = ["sentence\tlabel"]
    lines += [f"The {place} is in the {where}.\t{label}"
              for place in ("school", "river", "music", "king")
              for where in ("city", "games", "school", "people")
              for label, place in ((0, place), (1, f"{place} named"))]  # fmt: skip
    file = tmp_path / "labelled.tsv"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_finetuned_teacher_labels_texts_for_a_student(
    pretrained: Path, named: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "teacher"
    words = [str(make_bert(tmp_path / "bert")), "--train", str(named), "--dev", str(named)]
    words += ["--labels", "plain", "named", "--epochs", "30", "--batch-size", "8", "--lr", "3e-3"]
    assert finetune_teacher.main([*words, "--output", str(folder)]) == 0
    assert "100.0% of 32 held-out texts" in capsys.readouterr().out

    texts = tmp_path / "texts.txt"
    texts.write_text("The river named is in the city.\nThe school is in the games.\n" * 4)
    words = [
        *("--initialize-from", str(pretrained / "checkpoint"), "--teacher", str(folder)),
        *("--text-classification", str(texts), "--steps", "2", "--batch-size", "4"),
        *("--length", "32", "--device", "cpu"),
    ]
    assert finetune.main([*words, "--output", str(tmp_path / "student")]) == 0
    config = json.loads((tmp_path / "student/checkpoint/config.json").read_text())
    assert set(config["id2label"].values()) == {"plain", "named"}


def test_sentences_of_reviews(tmp_path: Path, capsys: Capture) -> None:
    reviews = tmp_path / "reviews.jsonl"
    texts = ["It was a long film.<br /><br />I liked all of it. No.", "It was a long film. Bye!"]
    reviews.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    written = tmp_path / "new/sentences.txt"
    assert sentences.main([str(reviews), "--output", str(written)]) == 0
    assert written.read_text() == "It was a long film.\nI liked all of it.\n"
    assert "2 sentences" in capsys.readouterr().out
