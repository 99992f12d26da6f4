"""Question answering: equality with an exhaustive search of spans; properties of windows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import accumulate
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
from albert_serve.tasks.question_answering import spans
from albert_serve.tasks.question_answering.spans import NUM_BEST, align, find_spans
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
def hf_logits(checkpoint_dir: Path) -> tuple[Logits, list[Any]]:
    """The logits of no answer and of the context's tokens in transformers, and their offsets."""
    model = transformers.AlbertForQuestionAnswering.from_pretrained(checkpoint_dir)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(checkpoint_dir)
    options = {"return_offsets_mapping": True, "return_token_type_ids": True}
    encoded = tokenizer(QUESTION, CONTEXT, return_tensors="pt", **options)
    offsets = encoded.pop("offset_mapping")[0].tolist()
    with torch.inference_mode():
        outputs = model(**encoded)
    tokens = [i for i, segment in enumerate(encoded.sequence_ids(0)) if segment == 1]
    logits = torch.stack([outputs.start_logits[0], outputs.end_logits[0]], dim=1)
    return logits[[0, *tokens]].numpy(), [offsets[i] for i in tokens]


Weights = dict[tuple[int, int], float]


def search(logits: Logits, offsets: list[Any], max_answer_len: int) -> Weights:
    """Return the weight of each range of characters: the sum of the exponentials of its logits.

    A lone "▁" has the characters of the next token, so several spans may have the same range.
    """
    weights: Weights = defaultdict(float)
    for first, (start, first_end) in enumerate(offsets):
        for last in range(first, min(first + max_answer_len, len(offsets))):
            last_start, end = offsets[last]
            if first_end > start and end > last_start and end > start:
                total = float(logits[1 + first, 0]) + float(logits[1 + last, 1])
                weights[start, end] += np.exp(total)
    return weights


def widen_to_words(ranges: Weights, text: str) -> Weights:
    """Extend ranges to complete words, and add the weights of ranges that become equal."""
    words: Weights = defaultdict(float)
    for (start, end), weight in ranges.items():
        while start > 0 and text[start - 1 : start + 1].isalnum():
            start -= 1
        while end < len(text) and text[end - 1 : end + 1].isalnum():
            end += 1
        words[start, end] += weight
    return words


@pytest.mark.parametrize(("max_len", "align"), [(1, False), (7, False), (15, False), (15, True)])
def test_scores_of_one_window_equal_an_exhaustive_search_of_the_logits_of_transformers(
    max_len: int, align: bool, task: QuestionAnswering, answer: Answerer, hf_logits: Any
) -> None:
    """Scores are normalised over the 20 best ranges and no answer."""
    options: dict[str, Any] = {"align_to_words": align, "max_answer_len": max_len, "top_k": 1000}
    parameters = QuestionAnsweringParameters(handle_impossible_answer=True, **options)
    item = QuestionContext(question=QUESTION, context=CONTEXT)
    result = answer(task.prepare(item, parameters))
    logits, offsets = hf_logits
    ranges, no_answer = search(logits, offsets, max_len), float(np.exp(logits[0].sum()))
    weights = widen_to_words(ranges, CONTEXT) if align else ranges
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


@given(
    lengths=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    max_answer_len=st.integers(1, 8),
    max_candidates=st.sampled_from([1, 5, 40, 1 << 20]),
    top_k=st.sampled_from([1, NUM_BEST, 60]),
    seed=st.integers(0, 1000),
)
def test_spans_are_those_of_an_exhaustive_search_in_blocks_of_any_size(
    lengths: list[int], max_answer_len: int, max_candidates: int, top_k: int, seed: int
) -> None:
    """Every third token covers the same characters as the token before it."""
    ends = list(accumulate(lengths))
    offsets = [(end - size, end) for size, end in zip(lengths, ends, strict=True)]
    offsets = [offsets[index - index % 3 % 2] for index in range(len(offsets))]
    logits = np.random.default_rng(seed).normal(size=(1 + len(offsets), 2)).astype(np.float32)
    weights = search(logits, offsets, max_answer_len)
    expected = sorted(weights, key=lambda span: (-weights[span], span))[: max(top_k, NUM_BEST)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "_MAX_CANDIDATES", max_candidates)
        found = find_spans(logits, offsets, max_answer_len=max_answer_len, top_k=top_k)
    assert [(span.start, span.end) for span in found.best] == expected
    logits_of_best = [float(np.log(weights[span])) for span in expected]
    assert [span.logit for span in found.best] == pytest.approx(logits_of_best)
    assert found.no_answer == pytest.approx(float(logits[0].sum()))


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
    """A token in several windows counts once. The window with the lowest no answer decides."""
    windows = make_windows(num_tokens, room, data.draw(st.integers(0, room - 1)), num_before=1)
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    logits: Logits = generator.normal(size=(num_tokens, 2)).astype(np.float32)
    no_answers = generator.integers(-9, 9, (len(windows.ranges), 2)).astype(np.float32)
    parts = [
        np.concatenate([no_answers[[index]], logits[start:end]])
        for index, (start, end) in enumerate(windows.ranges)
    ]
    merged = merge_windows(windows, parts)
    np.testing.assert_array_equal(merged[1:], logits)
    assert merged[0].tolist() == min(no_answers.tolist(), key=sum)


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


def test_spans_are_extended_to_words() -> None:
    """A word has no punctuation. In scripts without spaces, it is a letter with its marks."""
    for text, span, word in (
        ("in Berkeley, now", (6, 8), "Berkeley"),
        ("e\u0301te\u0301 la", (0, 1), "e\u0301te\u0301"),
        ("我们去北京学校。", (3, 5), "北京"),
        ("用Python3写", (2, 3), "Python3"),
    ):
        [(start, end)] = align([span], text)
        assert text[start:end] == word
