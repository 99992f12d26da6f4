"""The teacher of a task distillation, and the sentences that it labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.albert_small_en import finetune_teacher, sentences
from training.commands import finetune

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
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
    teacher_dir: Path, pretrained: Path, labelled: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "teacher"
    words = [str(teacher_dir), "--train", str(labelled), "--dev", str(labelled)]
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


def test_some_of_the_sentences_are_drawn_at_random(tmp_path: Path) -> None:
    reviews = tmp_path / "reviews.txt"
    texts = [f"This is the film number {number}." for number in range(40)]
    reviews.write_text("\n\n".join(texts))

    def draw(*options: str) -> list[str]:
        output = tmp_path / "sentences.txt"
        assert sentences.main([str(reviews), *options, "--output", str(output)]) == 0
        return output.read_text().splitlines()

    some = draw("--max-sentences", "9")
    assert len(set(some)) == 9
    assert set(some) < set(texts)
    assert some == draw("--max-sentences", "9")
    assert some != draw("--max-sentences", "9", "--seed", "1")
    assert draw("--max-sentences", "41") == texts
