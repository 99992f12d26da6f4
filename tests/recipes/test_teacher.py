"""The teacher of a task distillation, and the sentences that it labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.albert_small_en import finetune_teacher, sentences
from tests.training.distillation.teachers import make_bert
from training.commands import finetune

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
    words += ["--labels", "plain", "named", "--epochs", "30", "--batch-size", "8", "--lr", "1e-2"]
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
