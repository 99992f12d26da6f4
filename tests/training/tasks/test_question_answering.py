"""Questions of SQuAD are read, located, divided into windows, and scored like official scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import SQUAD, SQUAD_V2, write
from training.data.corpus import CorpusError
from training.tasks.question_answering.files import (
    Question,
    locate_answers,
    read_squad,
    span_examples,
)
from training.tasks.question_answering.metrics import (
    Outcome,
    find_best_threshold,
    mean_score,
    score_answer,
)


def test_questions_without_an_answer_are_impossible_and_empty_texts_omitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plausible = [{"text": "A", "answer_start": 0}]
    impossible = {"id": "x", "question": "Why?", "answers": plausible, "is_impossible": True}
    entries = [impossible, {"id": "y", "question": "Why?"}, {"id": "z", "question": " "}]
    content = {"data": [{"paragraphs": [{"context": "A b.", "qas": entries}]}]}
    questions = read_squad([write(tmp_path / "a.json", json.dumps(content))])
    assert [(q.id, q.answers, q.start) for q in questions] == [("x", (), None), ("y", (), None)]
    assert "Omitted 1 of 3 questions" in capsys.readouterr().out
    rows = [("a", "Who?", "Ann."), ("c", "Who?", " "), ("d", None, "Ann.")]
    lines = (json.dumps({"id": i, "question": q, "context": c, "answers": []}) for i, q, c in rows)
    questions = read_squad([write(tmp_path / "a.jsonl", "\n".join(lines))])
    assert [question.id for question in questions] == ["a"]
    assert "Omitted 2 of 3 questions" in capsys.readouterr().out


CONTEXT = "🚢🚢 The ferry costs four euros."
ROW = {
    "id": 7,
    "title": "Ferry",
    "context": CONTEXT,
    "question": "How much?",
    "answers": {"text": ["four euros", "euros"], "answer_start": [19, 24]},
}


def test_rows_of_the_hub_are_read(tmp_path: Path) -> None:
    """Flat rows are JSON lines, an array, `data` of a file, or Parquet in a folder."""
    impossible = {**ROW, "id": 8, "answers": {"text": [], "answer_start": []}}
    lines = f"{json.dumps(ROW)}\n{json.dumps(impossible)}\n"
    files = [
        write(tmp_path / "rows.jsonl", lines),
        write(tmp_path / "lines.json", lines),
        write(tmp_path / "array.json", json.dumps([ROW, impossible])),
        write(tmp_path / "rows.json", json.dumps({"data": [ROW, impossible]})),
        tmp_path / "folder",
    ]
    files[-1].mkdir()
    pq.write_table(pa.Table.from_pylist([ROW, impossible]), files[-1] / "part.parquet")
    for file in files:
        questions = read_squad([file])
        assert [(q.id, q.answers, q.start, q.context) for q in questions] == [
            ("7", ("four euros", "euros"), 19, CONTEXT),
            ("8", (), None, CONTEXT),
        ], file


def question_on(context: str, answer: str, start: int) -> Question:
    return Question(
        id="q", question="?", context=context, answers=(answer, "b"), start=start, location="f, q"
    )


@pytest.mark.parametrize(
    ("context", "answer", "start", "expected"),
    [
        pytest.param("cat sat", "cat", 0, 0, id="correct offset"),
        pytest.param("a cat sat", "cat", 0, 2, id="only occurrence"),
        pytest.param("a cat", "t", -1, 4, id="negative offset"),
        pytest.param("a cat sat", " cat\n", 0, 2, id="white space around the answer"),
        pytest.param("a cat or a cat or a cat", "cat", 13, 11, id="only overlapping occurrence"),
        pytest.param("😀😀😀😀 a cat, a cat", "cat", 18, 14, id="offset in UTF-16"),
    ],
)
def test_an_offset_is_corrected_if_one_occurrence_fits(
    context: str, answer: str, start: int, expected: int
) -> None:
    question = question_on(context, answer, start)
    [located], num_repaired = locate_answers([question])
    assert (located.start, located.answers) == (expected, (answer.strip(), "b"))
    assert num_repaired == (located != question)


@pytest.mark.parametrize(
    ("context", "answer", "start", "message"),
    [
        ("a cat", "dog", 0, "has 'a c' at character 0, not 'dog', .* 0 times"),
        ("a cat or a cat", "cat", 8, "not 'cat', which occurs 2 times. Correct"),
        ("a cat", " ", 1, "The answer is empty. Mark the question is_impossible"),
    ],
)
def test_answers_without_a_unique_occurrence_are_rejected(
    context: str, answer: str, start: int, message: str
) -> None:
    with pytest.raises(CorpusError, match=f"^f, q: .*{message}"):
        locate_answers([question_on(context, answer, start)])


QUESTIONS = [*read_squad([SQUAD]), question_on("The school is old.", "The school", 0)]
LONG = Question(
    id="long",
    question="Who was in the school? " * 20,
    context="the school " * 300 + "Erdős " + "of the tor " * 50,
    answers=("Erdős",),
    start=11 * 300,
)


def normalise(text: str) -> str:
    """Remove white space, and case and accents, which the vocabulary does not contain."""
    return "".join(text.lower().split()).replace("ł", "<unk>").replace("é", "e")


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.id)
@pytest.mark.parametrize("length", [128, 512])
def test_the_span_decodes_to_the_answer(
    question: Question, tokenizer: AlbertTokenizer, length: int
) -> None:
    """The span has no superfluous token; its first and last token may be longer than the answer."""
    num_answers = 0
    for window in span_examples(question, tokenizer, length=length):
        assert len(window.ids) <= length
        start, end = window.target
        if start:
            num_answers += 1
            ids = window.ids[start : end + 1]
            text = normalise(tokenizer.decode(ids, keep_special=True))
            answer = normalise(question.answers[0])
            assert answer in text
            # A first token that is only "▁" belongs to the word that follows.
            inner = ids[2:] if tokenizer.token(ids[0]) == "▁" else ids[1:]
            for part in (inner, ids[:-1]):
                assert answer not in normalise(tokenizer.decode(part, keep_special=True))
    assert num_answers >= 1


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([*QUESTIONS, LONG]), st.integers(12, 600), st.none() | st.integers(1, 200))
@example(question=LONG, length=512, stride=None)
def test_windows_cover_the_context_without_gaps(
    tokenizer: AlbertTokenizer, question: Question, length: int, stride: int | None
) -> None:
    """By default, they start 128 tokens apart."""
    options = {} if stride is None else {"stride": stride}
    context = tokenizer.encode_plain(question.context).ids
    question_ids = tokenizer.encode_plain(question.question).ids[: min(64, (length - 3) // 2)]
    room = length - len(question_ids) - 3
    step = min(stride or 128, room - room // 4)
    windows = span_examples(question, tokenizer, length=length, **options)
    for number, window in enumerate(windows):
        part = context[number * step : number * step + room]
        assert window.ids == [2, *question_ids, 3, *part, 3]
        assert window.types == [0] * (len(question_ids) + 2) + [1] * (len(part) + 1)
        start, end = window.target
        assert (start == 0) == (end == 0)
        if start:
            assert len(question_ids) + 2 <= start <= end < len(window.ids) - 1
    assert number * step + room >= len(context)
    assert number == 0 or (number - 1) * step + room < len(context)


DATA = SQUAD_V2.parent
OFFICIAL = json.loads((DATA / "figures.json").read_text())


def read_json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / name).read_text(encoding="utf-8"))
    return content


def test_metrics_are_those_of_the_official_script_of_v1_1() -> None:
    questions = read_squad([DATA / "dev-v1.1.json"])
    predictions = read_json("predictions-v1.1.json")
    score = mean_score([score_answer(q, predictions[q.id], "1.1") for q in questions])
    expected = OFFICIAL["1.1"]
    assert len(questions) == expected["total"]
    assert score == pytest.approx((expected["exact_match"], expected["f1"]))


def test_metrics_and_thresholds_are_those_of_the_official_script_of_v2_0() -> None:
    predictions, null_scores = read_json("predictions-v2.0.json"), read_json("na_prob-v2.0.json")
    expected, questions = OFFICIAL["2.0"], read_squad([SQUAD_V2])
    scores = {q.id: score_answer(q, predictions[q.id], "2.0") for q in questions}
    answerable = [q for q in questions if q.answers]
    impossible = [q for q in questions if not q.answers]
    for prefix, part in (("", questions), ("HasAns_", answerable), ("NoAns_", impossible)):
        assert len(part) == expected[f"{prefix}total"]
        score = mean_score([scores[q.id] for q in part])
        assert score == pytest.approx((expected[f"{prefix}exact"], expected[f"{prefix}f1"]))
    for index, name in enumerate(("exact", "f1")):
        outcomes = [
            Outcome(
                score=scores[question.id][index],
                is_empty=not predictions[question.id],
                null_score=null_scores[question.id],
                has_answer=bool(question.answers),
            )
            for question in questions
        ]
        best, threshold = find_best_threshold(outcomes)
        assert best == pytest.approx(expected[f"best_{name}"])
        assert threshold == expected[f"best_{name}_thresh"]


OUTCOMES = st.builds(
    Outcome,
    score=st.sampled_from([0.0, 0.5, 1.0]),
    is_empty=st.booleans(),
    null_score=st.integers(-3, 3).map(float),
    has_answer=st.booleans(),
)


@given(st.lists(OUTCOMES, min_size=1, max_size=12))
@settings(deadline=None)
def test_no_threshold_is_better_than_the_best(outcomes: list[Outcome]) -> None:
    def mean_at(threshold: float) -> float:
        """Return the mean score if null scores above the threshold mean no answer."""
        scores = [
            float(not outcome.has_answer)
            if outcome.null_score > threshold
            else (outcome.score if outcome.has_answer else float(outcome.is_empty))
            for outcome in outcomes
        ]
        return 100 * sum(scores) / len(scores)

    best, threshold = find_best_threshold(outcomes)
    assert mean_at(threshold) == pytest.approx(best)
    assert max(mean_at(half / 2) for half in range(-9, 9)) == pytest.approx(best)
