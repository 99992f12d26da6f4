"""A finetuned teacher's logits take the place of labels."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from albert_serve.bundle.manifest import ProblemType
from tests.training.distillation.teachers import TEXTS, make_classifier
from tests.training.support import read_metrics, validations
from training.commands import finetune
from training.distillation.pseudo_labels import (
    TaskTeacher,
    agreement,
    distillation_loss,
    pseudo_label,
)
from training.loop.distributed import World
from training.model.checkpoint import load_checkpoint, read_config

Capture = pytest.CaptureFixture[str]
ALONE = World()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS * 4) + "\n")
    return file


@pytest.fixture
def options(pretrained: Path, classifier: Path, texts: Path) -> list[str]:
    """A run of 60 steps on pseudo-labels; its folder is left to be named."""
    return [
        *("--initialize-from", str(pretrained / "checkpoint"), "--teacher", str(classifier)),
        *("--text-classification", str(texts), "--steps", "60", "--length", "32"),
        *("--batch-size", "12", "--optimizer", "adamw", "--lr", "1e-2"),
        *("--report-every", "5", "--device", "cpu"),
    ]


@pytest.fixture(scope="module")
def teacher(classifier: Path) -> TaskTeacher:
    return TaskTeacher.load(str(classifier), ALONE.device)


def test_logits_are_those_of_transformers(
    classifier: Path, teacher: TaskTeacher, tmp_path: Path, capsys: Capture
) -> None:
    """Of texts, of a pair, and of one that is longer than the teacher's positions."""
    texts = [*((text, None) for text in TEXTS), (TEXTS[0], TEXTS[1]), (" ".join(TEXTS * 4), None)]
    logits_NK = pseudo_label(texts, teacher, ALONE, tmp_path / "logits", "fp32")
    assert (
        f"1 of 8 texts were truncated to the positions of {classifier}" in capsys.readouterr().out
    )
    assert teacher.names == ("school", "king", "river")
    assert teacher.problem == "single_label_classification"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(classifier)
    length = model.config.max_position_embeddings
    for (text, pair), logits in zip(texts, logits_NK, strict=True):
        inputs = tokenizer(text, pair, truncation=True, max_length=length, return_tensors="pt")
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            expected = model(**inputs).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert logits.argmax() == expected.argmax()


def test_logits_are_kept_and_made_anew_for_other_texts(
    teacher: TaskTeacher, tmp_path: Path
) -> None:
    texts = [(text, None) for text in TEXTS]
    file = tmp_path / "logits"
    first = pseudo_label(texts, teacher, ALONE, file)
    made = file.stat().st_mtime_ns
    again = pseudo_label(texts, teacher, ALONE, file)
    assert torch.equal(first, again)
    assert file.stat().st_mtime_ns == made
    fewer = pseudo_label(texts[:2], teacher, ALONE, file)
    assert len(fewer) == 2
    file.write_bytes(file.read_bytes()[:50])  # cut short
    assert torch.equal(pseudo_label(texts, teacher, ALONE, file), first)


def test_the_student_learns_its_teachers_labels(
    options: list[str], texts: Path, tmp_path: Path
) -> None:
    """Held-out texts have the numbers of the teacher's labels, and choose the best checkpoint."""
    label_of = {"Two rivers.": 0, "The king.": 1, "A school in May.": 2}
    texts.write_text("".join(f"{text}\n" for text in label_of) * 8)
    dev = tmp_path / "dev.tsv"
    rows = [f"{text}\t{label}\n" for text, label in label_of.items()]
    dev.write_text("".join(["sentence\tlabel\n", *rows]))
    folder, held_out = tmp_path / "run", ["--validation", str(dev), "--validate-every", "30"]
    assert finetune.main([*options, *held_out, "--output", str(folder)]) == 0
    metrics = [line for line in read_metrics(folder) if "text-classification/loss" in line]
    assert metrics[-1]["text-classification/loss"] < 0.3 * metrics[0]["text-classification/loss"]
    assert metrics[-1]["text-classification/accuracy"] > 0.9
    config = read_config(folder / "checkpoint")
    assert config["id2label"] == {"0": "school", "1": "king", "2": "river"}
    assert config["problem_type"] == "single_label_classification"
    assert load_checkpoint(folder / "checkpoint").tasks["text-classification"] == 3
    stage = json.loads((folder / "checkpoint" / "training.json").read_text())["stages"][-1]
    assert stage["settings"]["teacher"] == ["classifier0"]
    assert stage["settings"]["text_classification"] == ["texts.txt"]
    assert max(validations(folder, "text-classification", "accuracy").values()) == 1
    assert (folder / "best" / "model.safetensors").is_file()
    assert (folder / "teacher-logits.safetensors").is_file()


LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 1.0, -3.0]])


@pytest.mark.parametrize("problem", typing.get_args(ProblemType))
@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_the_loss_is_least_for_the_teachers_own_logits(
    problem: ProblemType, temperature: float
) -> None:
    logits = LOGITS.clone().requires_grad_()
    least = distillation_loss(logits, LOGITS, problem, temperature)
    (gradient,) = torch.autograd.grad(least, logits)
    assert gradient.abs().max() < 1e-5
    assert distillation_loss(LOGITS + torch.eye(3)[:2], LOGITS, problem, temperature) > least
    assert agreement(LOGITS, LOGITS, problem) == len(LOGITS)


def test_the_loss_of_one_label_is_the_divergence_at_the_temperature() -> None:
    other = LOGITS.flip(0)

    def probabilities(logits: Tensor) -> Tensor:
        return (logits / 3.0).softmax(-1)

    targets = probabilities(LOGITS)
    expected = 9.0 * (targets * (targets / probabilities(other)).log()).sum()
    torch.testing.assert_close(
        distillation_loss(other, LOGITS, "single_label_classification", 3.0), expected
    )
