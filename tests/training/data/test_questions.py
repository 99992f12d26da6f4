"""Questions of SQuAD files stand in their contexts, and bad files are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.support import SQUAD
from training.data.corpus import CorpusError
from training.data.questions import read_squad


def write(file: Path, content: str) -> Path:
    file.write_text(content)
    return file


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="No such file"):
        read_squad([tmp_path / "none.json"])


def test_squad_questions_stand_in_their_contexts() -> None:
    questions = read_squad([SQUAD])
    assert len(questions) == 33
    assert len({question.id for question in questions}) == 33
    for question in questions:
        assert question.start is not None
        assert question.context[question.start :].startswith(question.answers[0])


def squad(*entry: dict[str, Any]) -> str:
    return json.dumps({"data": [{"paragraphs": [{"context": "A b.", "qas": list(entry)}]}]})


def test_a_question_without_an_answer(tmp_path: Path) -> None:
    entry = {"id": "x", "question": " Why? ", "answers": [], "is_impossible": True}
    (question,) = read_squad([write(tmp_path / "a.json", squad(entry))])
    assert (question.question, question.answers, question.start) == ("Why?", (), None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON: .*is it complete"),
        ("{}", "not in SQuAD's format: KeyError\\('data'\\)"),
        ("[]", "not in SQuAD's format"),
        ('{"data": [{"paragraphs": [1]}]}', "not in SQuAD's format"),
        (squad({"id": "x", "question": "Why?"}), "KeyError\\('answers'\\)"),
        (squad({"id": "x", "question": 5, "answers": []}), "not in SQuAD's format"),
        ('{"data": []}', "no questions in"),
    ],
)
def test_files_that_are_not_squad_s(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        read_squad([write(tmp_path / "a.json", content)])
