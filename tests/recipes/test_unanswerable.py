"""Questions are made that their context does not answer, the same ones each time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.albert_small_en.unanswerable import main
from tests.training.support import SQUAD
from training.data.questions import Question, read_squad

Capture = pytest.CaptureFixture[str]
KINDS = ("same-article", "exchanged", "off-topic")


def made(output: Path, *options: str, files: tuple[Path, ...] = (SQUAD,)) -> list[Question]:
    assert main([*map(str, files), str(output), *options]) == 0
    return read_squad([output])


def test_no_question_has_its_answer(tmp_path: Path, capsys: Capture) -> None:
    questions = made(tmp_path / "new" / "all.json", "--max-questions", "60")
    assert f"{len(questions)} questions of 33: 27 same-article (of 27" in capsys.readouterr().out
    assert {question.kind for question in questions} == {*KINDS}
    assert len({question.id for question in questions}) == len(questions)
    originals = {question.id: question for question in read_squad([SQUAD])}
    articles = {each.context: each.article for each in originals.values()}
    for question in questions:
        original = originals[question.id.removesuffix(f"-{question.kind}")]
        assert question.answers == ()
        if question.kind == "exchanged":
            assert question.context == original.context
            old, new = question_difference(original.question, question.question)
            assert old.lower() in question.context.lower()
            assert new not in question.context
        else:
            assert question.question == original.question
            assert not any(answer in question.context for answer in original.answers)
        if question.kind == "off-topic":
            assert articles[question.context] != original.article


def question_difference(one: str, other: str) -> tuple[str, str]:
    """Return what the two do not share at their beginnings and ends, to whole words."""
    words, others = one.rstrip("?").split(), other.rstrip("?").split()
    while words and others and words[0] == others[0]:
        words, others = words[1:], others[1:]
    while words and others and words[-1] == others[-1]:
        words, others = words[:-1], others[:-1]
    return " ".join(words).removesuffix("'s"), " ".join(others).removesuffix("'s")


def test_the_nearest_paragraph_without_the_answer_is_taken(tmp_path: Path) -> None:
    texts = [f"Paragraph {number} is of other things." for number in range(10)]
    texts += ["The bridge of Lund was built.", "The bridge of Lund was built in 1901 by a firm."]
    texts += ["A bridge of Lund was built in 1902 by a firm."]
    question = {"id": "q", "question": "When was the bridge of Lund built by a firm?"}
    answered = {**question, "answers": [{"text": "1902", "answer_start": 30}]}
    asked = [*({"id": str(number), "question": "Why?"} for number in range(12)), answered]
    paragraphs = [
        {"context": text, "qas": [entry]} for text, entry in zip(texts, asked, strict=True)
    ]
    other = [{"context": texts[-1].replace("1902", "1903"), "qas": [{**question, "id": "r"}]}]
    articles = [{"title": "Lund", "paragraphs": paragraphs}, {"title": "x", "paragraphs": other}]
    file = tmp_path / "articles.json"
    file.write_text(json.dumps({"data": articles}))
    (near,) = made(tmp_path / "a.json", "--exchanged", "0", "--off-topic", "0", files=(file,))
    assert (near.id, near.context) == ("q-same-article", texts[-2])
