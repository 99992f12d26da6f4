"""Question answering: equality with a brute force over all spans, and properties of windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from albert_serve.api.schemas import Answer, QuestionAnsweringParameters, QuestionContext
from albert_serve.errors import InvalidInputError
from albert_serve.tasks import Logits, QuestionAnswering, TaskSetup
from albert_serve.tasks.question_answering.spans import align
from albert_serve.tasks.question_answering.task import merge_windows
from albert_serve.tasks.windows import make_windows
from tests.albert_serve.support import Answerer

CONTEXT = (
    "Marcel Proust was a French novelist, born in Auteuil on 10 July 1871. His father, "
    "Adrien Proust, was a doctor; he studied cholera (in Europe and in Asia)."
)
QUESTION = "Who was Marcel Proust's father?"
ODD_TEXT = st.text(
    st.sampled_from("ab -.,'\"(\n\t½ﬁé\u0301\u0300ßİ€–東京😀👩‍🚀\u200b\u00a0\u0bcd\u0e33[MASK]")
    | st.characters(exclude_categories=["Cs"]),
    max_size=60,
)


@pytest.fixture(scope="module")
def task(task_setup: TaskSetup) -> QuestionAnswering:
    return QuestionAnswering(tokenizer=task_setup.tokenizer, max_positions=task_setup.max_positions)


@pytest.fixture(scope="module")
def hf_model(checkpoint_dir: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of transformers."""
    model = transformers.AlbertForQuestionAnswering.from_pretrained(checkpoint_dir)
    return model, transformers.AutoTokenizer.from_pretrained(checkpoint_dir)


def brute_force(
    hf_model: tuple[Any, Any], question: str, context: str, max_answer_len: int
) -> tuple[dict[tuple[int, int], float], float]:
    """Return the weight of each range of characters, and of no answer: exponentials of logits.

    A lone "▁" has the characters of the next token, so several spans may have the same range.
    """
    model, tokenizer = hf_model
    options = {"return_offsets_mapping": True, "return_token_type_ids": True}
    encoded = tokenizer(question, context, return_tensors="pt", **options)
    offsets = encoded.pop("offset_mapping")[0].tolist()
    with torch.inference_mode():
        logits = model(**encoded)
    context_tokens = [i for i, segment in enumerate(encoded.sequence_ids(0)) if segment == 1]
    start = torch.exp(logits.start_logits[0].double())
    end = torch.exp(logits.end_logits[0].double())
    ranges: dict[tuple[int, int], float] = {}
    for i in context_tokens:
        for j in context_tokens:
            if i <= j < i + max_answer_len:
                span = (offsets[i][0], offsets[j][1])
                ranges[span] = ranges.get(span, 0.0) + float(start[i] * end[j])
    return ranges, float(start[0] * end[0])


def widen_to_words(ranges: dict[tuple[int, int], float], text: str) -> dict[tuple[int, int], float]:
    """Extend ranges to complete words, and add the weights of ranges that become equal."""
    words: dict[tuple[int, int], float] = {}
    for (start, end), weight in ranges.items():
        while start > 0 and text[start - 1 : start + 1].isalnum():
            start -= 1
        while end < len(text) and text[end - 1 : end + 1].isalnum():
            end += 1
        words[start, end] = words.get((start, end), 0.0) + weight
    return words


@pytest.mark.parametrize(
    ("max_answer_len", "align_to_words"), [(1, False), (7, False), (15, False), (15, True)]
)
def test_scores_of_one_window_equal_a_brute_force(
    max_answer_len: int,
    align_to_words: bool,
    task: QuestionAnswering,
    answer: Answerer,
    hf_model: tuple[Any, Any],
) -> None:
    """Scores are normalised over the 20 best ranges and no answer."""
    parameters = QuestionAnsweringParameters(
        align_to_words=align_to_words,
        top_k=1000,
        max_answer_len=max_answer_len,
        handle_impossible_answer=True,
    )
    item = QuestionContext(question=QUESTION, context=CONTEXT)
    result = answer(task.prepare(item, parameters))
    ranges, no_answer = brute_force(hf_model, QUESTION, CONTEXT, max_answer_len)
    weights = widen_to_words(ranges, CONTEXT) if align_to_words else ranges
    total = sum(sorted(weights.values(), reverse=True)[:20]) + no_answer
    expected = {span: weight / total for span, weight in {**weights, (0, 0): no_answer}.items()}
    scores = {(item.start, item.end): item.score for item in result}
    assert scores == {span: pytest.approx(score, abs=1e-6) for span, score in expected.items()}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)


@given(context=ODD_TEXT, question=ODD_TEXT, align_to_words=st.booleans())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_an_answer_is_always_a_part_of_the_context(
    context: str, question: str, align_to_words: bool, task: QuestionAnswering, answer: Answerer
) -> None:
    parameters = QuestionAnsweringParameters(
        top_k=1000,
        align_to_words=align_to_words,
        handle_impossible_answer=True,
        max_seq_len=64,
        doc_stride=4,
        max_question_len=20,
    )
    try:
        prepared = task.prepare(QuestionContext(question=question, context=context), parameters)
    except InvalidInputError:
        assert "" in (context.strip(), question.strip()) or not (
            task.tokenizer.encode_plain(context).ids and task.tokenizer.encode_plain(question).ids
        )
        return
    result = answer(prepared)
    for item in result:
        assert context[item.start : item.end] == item.answer == item.answer.strip()
        assert 0.0 <= item.score <= 1.0
    best_20 = [item.score for item in result if item.answer][:20]
    assert sum(best_20) + sum(item.score for item in result if not item.answer) == pytest.approx(1)
    assert len({(item.start, item.end) for item in result}) == len(result)
    assert sorted(result, key=lambda item: -item.score) == result


@given(num_tokens=st.integers(1, 300), room=st.integers(1, 60), data=st.data())
@settings(deadline=None)
def test_windows_cover_all_tokens_and_a_token_belongs_to_its_most_central_window(
    num_tokens: int, room: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, room - 1))
    windows = make_windows(num_tokens, room, overlap, num_before=2)
    assert windows.ranges[0][0] == 0
    assert windows.ranges[-1][1] == num_tokens
    for (_, end), (start, _) in zip(windows.ranges, windows.ranges[1:], strict=False):
        assert end - start == overlap
    assert all(0 < end - start <= room for start, end in windows.ranges)
    for token, owner in enumerate(windows.window_per_token()):
        distances_to_edge = [
            min(token - start, end - 1 - token) if start <= token < end else -1
            for start, end in windows.ranges
        ]
        assert owner == distances_to_edge.index(max(distances_to_edge))  # ties: the first


@given(data=st.data(), num_tokens=st.integers(1, 80), room=st.integers(2, 20))
@settings(deadline=None)
def test_merging_windows_restores_the_logits_of_the_document(
    data: st.DataObject, num_tokens: int, room: int
) -> None:
    """A token in several windows counts once."""
    windows = make_windows(num_tokens, room, data.draw(st.integers(0, room - 1)), num_before=1)
    seed = data.draw(st.integers(0, 1000))
    logits: Logits = np.random.default_rng(seed).normal(size=(1 + num_tokens, 2)).astype(np.float32)
    parts = [np.concatenate([logits[:1], logits[1 + s : 1 + e]]) for s, e in windows.ranges]
    np.testing.assert_array_equal(merge_windows(windows, parts), logits)


def test_the_window_with_the_lowest_score_of_no_answer_decides() -> None:
    windows = make_windows(4, window_size=2, overlap=0, num_before=1)
    high: Logits = np.array([[9, 9], [0, 0], [0, 0]], np.float32)
    low: Logits = np.array([[1, -1], [5, 0], [0, 5]], np.float32)
    assert merge_windows(windows, [high, low])[0].tolist() == [1, -1]


def answer_of(
    task: QuestionAnswering, parameters: dict[str, Any], no_answer: float, **own_threshold: Any
) -> Any:
    """Answer from two tokens "a b". The logits of span "a" add up to 4, of others to less."""
    item = QuestionContext(question="c", context="a b")
    task = replace(task, **own_threshold)
    prepared = task.prepare(item, QuestionAnsweringParameters(**parameters))
    [encoded] = prepared.inputs
    logits = np.full((len(encoded.ids), 2), -50, np.float32)
    start = encoded.types.index(1)
    logits[[0, start, start + 1]] = [(no_answer / 2, no_answer / 2), (2, 2), (-8, -8)]
    return prepared.finish([logits])


@pytest.mark.parametrize(
    ("no_answer", "threshold", "is_empty"),
    [(4, 0.0, False), (5, 0.0, True), (5, 2.0, False), (3, -2.0, True), (4.5, 0.5, False)],
)
def test_no_answer_wins_if_its_logit_exceeds_the_best_by_more_than_the_threshold(
    no_answer: float, threshold: float, is_empty: bool, task: QuestionAnswering
) -> None:
    """The threshold is the model's or the request's. Scores, with no answer, add up to 1."""
    own = {"null_score_diff_threshold": threshold}
    allowed: dict[str, Any] = {"handle_impossible_answer": True, "top_k": 5}
    for result in (
        answer_of(task, {"top_k": 5}, no_answer, **own),
        answer_of(task, allowed, no_answer, **own),
        answer_of(task, {**allowed, **own}, no_answer),
    ):
        assert (result[0].answer == "") is is_empty
        assert sum(item.score for item in result) == pytest.approx(1)


@pytest.mark.parametrize(
    ("threshold", "allowed", "expected"),
    [(0.5, None, ""), (None, None, "a"), (None, True, ""), (0.5, False, "a")],
)
def test_a_threshold_of_the_model_allows_no_answer_unless_the_request_forbids_it(
    threshold: float | None, allowed: bool | None, expected: str, task: QuestionAnswering
) -> None:
    options = {"handle_impossible_answer": allowed}
    result = answer_of(task, options, 5, null_score_diff_threshold=threshold)
    assert (result.answer, result.start, result.end) == (expected, 0, len(expected))


def test_an_answer_in_a_late_window_of_a_long_context_is_found(task: QuestionAnswering) -> None:
    context = "so it went on and on, " * 100 + "until € came" + " and on" * 30
    item = QuestionContext(question=QUESTION, context=context)
    prepared = task.prepare(item, QuestionAnsweringParameters())
    assert len(prepared.inputs) > 5
    token_id = task.tokenizer.token_id("€")
    logits = [
        np.array([[10.0 * (id_ == token_id)] * 2 for id_ in window.ids], np.float32)
        for window in prepared.inputs
    ]
    result = prepared.finish(logits)
    assert isinstance(result, Answer)
    assert (result.answer, result.start) == ("€", context.index("€"))
    assert result.score > 0.9


@pytest.mark.parametrize(
    ("text", "start", "end", "expected"),
    [
        pytest.param("in Berkeley, now", 6, 8, "Berkeley", id="without-punctuation"),
        pytest.param("e\u0301te\u0301 la", 0, 1, "e\u0301te\u0301", id="with-accents"),
        pytest.param("我们去北京学校。", 3, 5, "北京", id="script-without-spaces"),
        pytest.param("用Python3写", 2, 3, "Python3", id="latin-between"),
    ],
)
def test_spans_are_extended_to_words(text: str, start: int, end: int, expected: str) -> None:
    [(word_start, word_end)] = align([(start, end)], text)
    assert text[word_start:word_end] == expected
