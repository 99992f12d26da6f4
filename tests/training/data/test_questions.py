"""Questions of SQuAD files stand in their contexts or are repaired, and bad files are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import SQUAD, write
from training.data.batch import TokenisedExample
from training.data.corpus import CorpusError
from training.tasks.question_answering.files import (
    Question,
    locate_answers,
    read_squad,
    span_examples,
)


def squad(*entry: dict[str, Any]) -> str:
    return json.dumps({"data": [{"paragraphs": [{"context": "A b.", "qas": list(entry)}]}]})


def test_an_impossible_question_has_no_answer_whatever_is_plausible(tmp_path: Path) -> None:
    plausible = [{"text": "A", "answer_start": 0}]
    entry = {"id": "x", "question": "Why?", "answers": plausible, "is_impossible": True}
    without = {"id": "y", "question": "Why?"}
    for question in read_squad([write(tmp_path / "a.json", squad(entry, without))]):
        assert (question.answers, question.start) == ((), None)


CONTEXT = "🚢🚢 The ferry costs four euros."
ROW = {
    "id": 7,
    "title": "Ferry",
    "context": CONTEXT,
    "question": "How much?",
    "answers": {"text": ["four euros", "euros"], "answer_start": [19, 24]},
}

BAD_ROW = json.dumps({**ROW, "answers": {"text": ["four euros", "euros"], "answer_start": [17]}})


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "lines.json", "array.json", "rows.parquet", "folder", "rows.json"]
)
def test_rows_of_the_hub_are_read(tmp_path: Path, name: str) -> None:
    """The flat form: JSON lines, an array, Parquet, a folder of these, and `data` of a file."""
    none = {**ROW, "id": 8, "answers": {"text": [], "answer_start": []}}
    file = tmp_path / ("folder/part.parquet" if name == "folder" else name)
    file.parent.mkdir(exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([ROW, none]), file)
    elif name == "array.json":
        file.write_text(json.dumps([ROW, none]))
    elif name.endswith(("jsonl", "lines.json")):
        file.write_text(f"{json.dumps(ROW)}\n{json.dumps(none)}\n")
    else:
        file.write_text(json.dumps({"data": [ROW, none]}))
    questions = read_squad([tmp_path / name])
    assert [(each.id, each.answers, each.start, each.context) for each in questions] == [
        ("7", ("four euros", "euros"), 19, CONTEXT),
        ("8", (), None, CONTEXT),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        {"answers": {"text": "four euros", "answer_start": 19}},
        {"answer": "four euros", "answer_start": 19},
    ],
)
def test_a_row_may_have_its_only_answer_without_a_list(
    tmp_path: Path, answer: dict[str, object]
) -> None:
    row = {"id": 7, "context": CONTEXT, "question": "How much?", **answer}
    [question] = read_squad([write(tmp_path / "a.jsonl", json.dumps(row))])
    assert (question.answers, question.start) == (("four euros",), 19)


def asked(context: str, answer: str, start: int) -> Question:
    return Question(
        id="q", question="?", context=context, answers=(answer, "b"), start=start, place="f, q"
    )


@pytest.mark.parametrize(
    ("context", "answer", "start", "expected"),
    [
        pytest.param("cat sat", "cat", 0, 0, id="right, at the beginning"),
        pytest.param("a cat sat", "cat", 2, 2, id="right"),
        pytest.param("a cat sat", "cat", 0, 2, id="the only place"),
        pytest.param("a cat sat", "cat", -5, 2, id="before the text"),
        pytest.param("a cat sat", "cat", 99, 2, id="behind the text"),
        pytest.param("a cat sat", " cat\n", 0, 2, id="white space around it"),
        pytest.param("a cat or a cat or a cat", "cat", 12, 11, id="the only place that overlaps"),
        pytest.param("😀😀😀😀 a cat, a cat", "cat", 18, 14, id="offset in UTF-16"),
        pytest.param("aaa", "aa", 1, 1, id="right, of two that overlap"),
    ],
)
def test_offsets_are_repaired_where_one_place_fits(
    context: str, answer: str, start: int, expected: int
) -> None:
    question = asked(context, answer, start)
    [located], num_repaired = locate_answers([question])
    assert (located.start, located.answers) == (expected, (answer.strip(), "b"))
    assert num_repaired == (located != question)


@pytest.mark.parametrize(
    ("context", "answer", "start", "message"),
    [
        ("a cat", "dog", 2, "has 'cat' at character 2, not 'dog', .* 0 times"),
        ("a cat or a cat", "cat", 7, "not 'cat', which occurs 2 times. Correct"),
        ("cat cat", "cat", -9, "has '' at character -9, .* 2 times"),
        ("a cat", " ", 1, "the answer is empty; mark the question is_impossible"),
    ],
)
def test_answers_without_a_place_are_refused(
    context: str, answer: str, start: int, message: str
) -> None:
    with pytest.raises(CorpusError, match=f"^f, q: .*{message}"):
        locate_answers([asked(context, answer, start)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "a.json is not in SQuAD's format: the file: Invalid JSON: EOF"),
        ("{}", "data: Field required"),
        ('{"data": [{"paragraphs": [1]}]}', r"data\.0\.paragraphs\.0: Input should be"),
        (squad({"id": "x", "question": [], "answers": []}), "question: Input should be"),
        (squad({"id": "x", "question": "Why?", "answers": [{"text": "A"}]}), "answer_start: Fie"),
        ('{"data": []}', "no questions in"),
        (f"{json.dumps(ROW)}\n{BAD_ROW}", r"line 2 is not in SQuAD's format.*answer_start: Field"),
    ],
)
def test_files_that_are_not_squad_s(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        read_squad([write(tmp_path / "a.json", content)])


QUESTIONS = read_squad([SQUAD])
LONG = Question(
    id="long",
    question="Who?",
    context="the school " * 300 + "Erdős " + "of the tor " * 50,
    answers=("Erdős",),
    start=11 * 300,
)


def windows(
    question: Question, tokenizer: AlbertTokenizer, length: int, stride: int = 128
) -> list[TokenisedExample]:
    return list(span_examples(question, tokenizer, length=length, stride=stride))


def squeezed(text: str) -> str:
    """As the vocabulary has it: without case, accents and white space."""
    return "".join(text.lower().split()).replace("ł", "<unk>").replace("é", "e")


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.id)
@pytest.mark.parametrize("length", [128, 256, 512])
def test_the_span_decodes_to_the_answer(
    question: Question, tokenizer: AlbertTokenizer, length: int
) -> None:
    """Tokens are whole, so that a span may have a little more at its ends than the answer."""
    num_answers = 0
    for window in windows(question, tokenizer, length):
        assert len(window.ids) <= length
        start, end = window.target
        if start:
            num_answers += 1
            ids = window.ids[start : end + 1]
            text = squeezed(tokenizer.decode(ids, keep_special=True))
            answer = squeezed(question.answers[0])
            assert answer in text
            # A word that begins with a lone "▁" begins with it in both texts.
            inner = ids[2:] if tokenizer.token(ids[0]) == "▁" else ids[1:]
            for part in (inner, ids[:-1]):
                assert answer not in squeezed(tokenizer.decode(part, keep_special=True))
    assert num_answers >= 1


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([*QUESTIONS, LONG]), st.integers(12, 600), st.integers(1, 200))
def test_windows_cover_the_context_without_a_gap(
    tokenizer: AlbertTokenizer, question: Question, length: int, stride: int
) -> None:
    context = tokenizer.encode_plain(question.context).ids
    question_ids = tokenizer.encode_plain(question.question).ids[: min(64, (length - 3) // 2)]
    room = length - len(question_ids) - 3
    step = min(stride, room - room // 4)
    for number, window in enumerate(windows(question, tokenizer, length, stride)):
        part = context[number * step : number * step + room]
        assert window.ids == [2, *question_ids, 3, *part, 3]
        assert window.types == [0] * (len(question_ids) + 2) + [1] * (len(part) + 1)
        start, end = window.target
        assert (start == 0) == (end == 0)
        if start:
            assert len(question_ids) + 2 <= start <= end < len(window.ids) - 1
    assert number * step + room >= len(context)
    assert number == 0 or (number - 1) * step + room < len(context)


def test_empty_questions_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("a", "Who?", "Ann."), ("b", " ", "Ann."), ("c", "Who?", ""), ("d", None, "Ann.")]
    file = tmp_path / "a.jsonl"
    lines = (json.dumps({"id": i, "question": q, "context": c, "answers": []}) for i, q, c in rows)
    file.write_text("\n".join(lines))
    assert [question.id for question in read_squad([file])] == ["a"]
    assert "3 of 4 questions are left out" in capsys.readouterr().out
