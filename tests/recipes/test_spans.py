"""Spans that recur in a passage become questions, which finetuning reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from recipes.albert_small_en.recurring import (
    MARKER,
    STOP_WORDS,
    Occurrence,
    recurring_spans,
    span_questions,
)
from recipes.albert_small_en.spans import main
from tests.training.support import WIKI, read_metrics
from training.commands import finetune
from training.data.questions import Question, locate_answers, read_squad

SENTENCES = [
    "The Royal Navy of Norway built ships in Bergen.",
    "Its ships were old, the royal navy of Norway said.",
    "In the city the Royal Navy, Norway and the others met.",
    "It rained in the city.",
]


def texts(sentences: list[str], spans: list[list[Occurrence]]) -> list[list[str]]:
    return [[sentences[at][begin:end] for at, begin, end in span] for span in spans]


def questions(sentences: list[str], seed: int = 0) -> list[Question]:
    return list(span_questions(sentences, np.random.default_rng(seed), "p"))


def test_the_longest_spans_of_each_place_are_found() -> None:
    """Not "Royal Navy" within the longer one, nor spans of stop words or over a comma."""
    found = texts(SENTENCES, recurring_spans(SENTENCES))
    assert found == [["Royal Navy of Norway", "royal navy of Norway"]]
    others = texts(SENTENCES, recurring_spans(SENTENCES, {*STOP_WORDS, "norway"}))
    assert others == [["Royal Navy", "royal navy", "Royal Navy"]]


def test_the_other_sentences_are_the_context_with_one_answer() -> None:
    sentences = [
        "The old harbour was built by monks.",
        "Near the old harbour and the old harbour wall stands a church.",
        "Ships left the old harbour in spring.",
    ]
    for seed in range(20):
        (question,) = questions(sentences, seed=seed)
        assert question.answers == ("old harbour",)
        assert question.start is not None
        stop = question.start + len("old harbour")
        assert question.context[question.start : stop] == "old harbour"
        assert question.context.count("old harbour") == 1
        assert "old harbour" not in question.question
        assert MARKER in question.question
        whole = f"{question.question} {question.context}"
        assert whole.count(MARKER) == 3
        restored = whole.replace(MARKER, "old harbour")
        assert sorted(restored) == sorted(" ".join(sentences))


def test_questions_are_bounded() -> None:
    """Two of three spans of a passage; sentences of too few or too many words ask nothing."""
    sentences = [f"Blue lake {n} and green hill {n} met red rock {n} here." for n in range(4)]
    assert len(recurring_spans(sentences)) == 3
    assert len(questions(sentences)) == 2
    assert not questions(["Blue lake here.", "We saw blue lake."])
    assert not questions([f"{'word ' * 40} blue lake.", f"{'other ' * 40} blue lake."])


Capture = pytest.CaptureFixture[str]


def test_the_file_is_squad_s(tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "new" / "spans.json"
    assert main([str(WIKI), str(output)]) == 0
    questions = read_squad([output])
    assert f"{len(questions):,} questions" in capsys.readouterr().out
    assert len(questions) > 30
    assert locate_answers(questions)[1] == 0
    content = json.loads(output.read_text())
    assert {"version", "data"} == content.keys()
    assert len({question.id for question in questions}) == len(questions)
    assert not list(output.parent.glob("*.partial"))


@pytest.mark.parametrize("suffix", [".json", ".json.xz"])
def test_the_same_command_writes_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    files = [tmp_path / f"{name}{suffix}" for name in ("one", "other", "third")]
    for file, seed in zip(files, ("3", "3", "4"), strict=True):
        assert main([str(WIKI), str(file), "--seed", seed]) == 0
    one, other, third = (file.read_bytes() for file in files)
    assert one == other != third
    assert read_squad(files[:1]) != read_squad(files[2:])


def test_finetuning_learns_from_it(pretrained: Path, tmp_path: Path) -> None:
    file = tmp_path / "spans.json.xz"
    assert main([str(WIKI), str(file), "--passage-words", "40"]) == 0
    options = ["--initialize-from", str(pretrained / "checkpoint"), "--length", "64"]
    options += ["--question-answering", str(file), "--batch-size", "8", "--steps", "4"]
    options += ["--report-every", "1", "--device", "cpu", "--output", str(tmp_path / "run")]
    assert finetune.main(options) == 0
    assert all("question-answering/loss" in line for line in read_metrics(tmp_path / "run"))
