"""Fill-mask, text classification, sentence order and embeddings against `transformers`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from albert_serve.api.embeddings import TruncationDirection
from albert_serve.api.schemas import ScoreFunction
from albert_serve.bundle.sentence_vectors import SentenceVectors
from albert_serve.tasks import TASKS, Prepared, TaskSetup, open_task
from albert_serve.tasks.base import Logits, best, sigmoid, softmax
from albert_serve.tokenizer import AlbertTokenizer
from tests.albert_serve.support import Answerer

Ask = Callable[..., Any]
ODD_TEXTS = [
    *("[MASK]", "Café über [MASK].", "  spaces   before [MASK]  and after ", "😀 東京 [MASK]"),
    *("a<pad> [MASK] b", "[CLS] odd [SEP] [MASK]"),  # special tokens in the text
]
LONG = "The run was scored in the first inning. " * 20


def prepare(setup: TaskSetup, task: str, item: Any, **parameters: Any) -> Prepared[Any]:
    body = {"inputs": item, "parameters": parameters}
    request = TASKS[task].request.model_validate(body)
    return open_task(task, setup).prepare(request.inputs, request.parameters)


@pytest.fixture(scope="module")
def ask(task_setup: TaskSetup, answer: Answerer) -> Ask:
    return lambda *request, **parameters: answer(prepare(task_setup, *request, **parameters))


@pytest.fixture(scope="module")
def hf_fill_mask(checkpoint_dir: Path) -> Any:
    return transformers.pipeline("fill-mask", model=str(checkpoint_dir), device="cpu")


def assert_same_predictions(result: list[Any], expected: list[dict[str, Any]]) -> None:
    assert [item.model_dump(exclude={"score"}) for item in result] == [
        {name: value for name, value in item.items() if name != "score"} for item in expected
    ]
    scores = [item.score for item in result]
    np.testing.assert_allclose(scores, [item["score"] for item in expected], atol=1e-5)


def test_predictions_for_one_mask_equal_the_pipeline(
    ask: Ask, hf_fill_mask: Any, sentences: list[str]
) -> None:
    splits = [sentence.split() for sentence in sentences]
    texts = [" ".join([*words[:3], "[MASK]", *words[4:]]) for words in splits]
    for text in (*texts, *ODD_TEXTS):
        assert_same_predictions(ask("fill-mask", text), hf_fill_mask(text))


def test_predictions_are_tokens_of_the_vocabulary_sorted_by_score_then_id(
    task_setup: TaskSetup, tokenizer: AlbertTokenizer
) -> None:
    """The embedding matrix may have more rows than the vocabulary has tokens."""
    size = tokenizer.vocab_size
    logits = np.zeros((1, size + 8), np.float32)
    logits[0, [9, 7, size - 1, size, size + 7]] = [5, 5, 6, 9, 9]
    answer = prepare(task_setup, "fill-mask", "a [MASK] b", top_k=3).finish([logits])
    assert [filled.token for filled in answer] == [size - 1, 7, 9]
    scores = np.array([1.0, 2.0, 1.0, 1.0, 2.0, 1.0])
    assert best(scores, np.array([5, 4, 3, 2, 1, 0]), top_k=3) == [1, 4, 0]
    assert best(scores, np.array([5, 3, 2]), top_k=3) == [2, 3, 5]


@pytest.mark.parametrize(
    "targets",
    [
        *("▁the", ["▁of", "▁the", "▁of"], ["e", "supervolcanoes"]),
        *(["☃", "▁the", "", "東京", "Café"], ["[MASK]", "▁", "<unk>"]),
    ],
)
def test_predictions_for_targets_equal_the_pipeline(
    targets: str | list[str], ask: Ask, hf_fill_mask: Any
) -> None:
    text = "One [MASK] and no more."
    assert_same_predictions(
        ask("fill-mask", text, targets=targets), hf_fill_mask(text, targets=targets)
    )


def test_a_target_that_is_not_in_the_vocabulary_gives_a_warning(
    task_setup: TaskSetup, tokenizer: AlbertTokenizer
) -> None:
    first = tokenizer.token(tokenizer.encode_plain("supervolcanoes").ids[0])
    targets = ["▁the", "supervolcanoes", "☃", " "]
    several, unknown, empty = prepare(task_setup, "fill-mask", "[MASK]", targets=targets).warnings
    assert "'supervolcanoes' is not in the vocabulary" in several
    assert several.endswith(f"Its first piece {first!r} was scored.")
    assert unknown.endswith("which says nothing about the target.")
    assert empty.startswith("The target ' ' is not in the vocabulary. It has no token")
    many = [f"supervolcano {number}" for number in range(22)]
    for count, last in ((20, "was scored."), (22, "The same applies to 2 more targets.")):
        *_, warning = prepare(task_setup, "fill-mask", "[MASK]", targets=many[:count]).warnings
        assert warning.endswith(last)


@pytest.mark.parametrize("text", ["a [MASK]", "The [MASK] of the [MASK] was [MASK]."])
def test_scores_of_all_tokens_equal_the_pipeline(text: str, ask: Ask, hf_fill_mask: Any) -> None:
    """The answer to a text with several masks has a list per mask."""
    result, expected = ask("fill-mask", text, top_k=1000), hf_fill_mask(text, top_k=1000)
    if text.count("[MASK]") == 1:
        result, expected = [result], [expected]
    for tokens, expected_tokens in zip(result, expected, strict=True):
        # The order of tokens whose scores differ by rounding only is undefined.
        assert_same_predictions(
            sorted(tokens, key=lambda filled: filled.token),
            sorted(expected_tokens, key=lambda filled: filled["token"]),
        )
        assert sum(filled.score for filled in tokens) == pytest.approx(1.0)


@pytest.fixture(scope="module")
def hf_classifier(checkpoint_dir: Path) -> Any:
    """The pipeline of transformers, with the token types of pairs."""
    classifier: Any = transformers.pipeline(
        "text-classification", model=str(checkpoint_dir), device="cpu"
    )
    # transformers 5 omits the types of a pair by default; ALBERT was trained with them.
    classifier.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return classifier


@pytest.mark.parametrize(
    "parameters",
    [{}, *({"function_to_apply": name} for name in get_args(ScoreFunction)), {"top_k": 1}],
)
def test_labels_and_scores_equal_the_pipeline(
    parameters: dict[str, Any], ask: Ask, hf_classifier: Any, sentences: list[str]
) -> None:
    for item in [*sentences[:4], {"text": "A dog runs.", "text_pair": "An animal moves."}]:
        expected = hf_classifier(item, **{"top_k": None, **parameters})
        assert_same_predictions(ask("text-classification", item, **parameters), expected)


@pytest.mark.parametrize(
    ("problem_type", "labels", "expected"),
    [
        ("regression", ["score"], [-2.5]),
        (None, ["score"], [0.0758582]),
        ("multi_label_classification", ["b", "a"], [0.0758582] * 2),
        ("single_label_classification", ["b", "a"], [0.5] * 2),
        (None, ["b", "a"], [0.5] * 2),
    ],
)
def test_the_problem_type_selects_the_score_function(
    problem_type: Any, labels: list[str], expected: list[float], task_setup: TaskSetup
) -> None:
    """Labels with equal scores keep their order. The temperature divides the logits."""
    changes = {"problem_type": problem_type, "labels": labels, "temperature": 2.0}
    head = task_setup.head.model_copy(update={**changes, "num_outputs": len(labels)})
    setup = replace(task_setup, heads={"text-classification": head})
    logits = np.array([[-5.0] * len(labels)], np.float32)
    result = prepare(setup, "text-classification", "a").finish([logits])
    assert [item.score for item in result] == pytest.approx(expected, abs=1e-6)
    assert [item.label for item in result] == labels
    with_function = prepare(setup, "text-classification", "a", function_to_apply="none")
    assert with_function.finish([logits])[0].score == -5.0


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_softmax_adds_up_to_1_and_sigmoid_is_monotonic(values: list[float]) -> None:
    logits: Logits = np.array(values, np.float32)
    assert softmax(logits).sum() == pytest.approx(1.0)
    scores = sigmoid(logits)
    assert ((scores >= 0) & (scores <= 1)).all()
    assert (np.diff(scores[np.argsort(logits)]) >= 0).all()


@pytest.mark.parametrize(
    ("num_first", "num_second"),
    [(127, None), (200, 3), (3, 200), (100, 101), (101, 100), (100, 100), (63, 90), (62, 64)],
)
def test_truncation_equals_transformers(
    num_first: int, num_second: int | None, task_setup: TaskSetup, hf_classifier: Any
) -> None:
    first, second = "a " * num_first, num_second and "a " * num_second
    item = {"text": first, "text_pair": second}
    prepared = prepare(task_setup, "text-classification", item, truncation=True)
    expected = hf_classifier.tokenizer(first, second, truncation=True, max_length=128)
    assert prepared.inputs[0].ids == expected["input_ids"]
    assert prepared.inputs[0].types == expected["token_type_ids"]
    untruncated = hf_classifier.tokenizer(first, second)
    assert prepared.num_truncated == len(untruncated["input_ids"]) - 128


def test_the_probability_of_an_order_equals_label_0_in_transformers(
    ask: Ask, checkpoint_dir: Path, hf_classifier: Any, sentences: list[str]
) -> None:
    """The coherence of sentences is the geometric mean of neighbouring pairs."""
    model = transformers.AlbertForPreTraining.from_pretrained(checkpoint_dir)
    texts, expected = [sentence[:50] for sentence in sentences[:5]], []
    for first, second in pairwise(texts):
        with torch.inference_mode():
            encoded = hf_classifier.tokenizer(first, second, return_tensors="pt")
            expected.append(model(**encoded).sop_logits[0].softmax(-1)[0].item())
        answer = ask("sentence-order", {"text": first, "text_pair": second})
        assert answer.in_order == pytest.approx(expected[-1], abs=1e-5)
    result = ask("sentence-order", {"sentences": texts})
    assert [(pair.first, pair.second) for pair in result.pairs] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [pair.in_order for pair in result.pairs] == pytest.approx(expected, abs=1e-5)
    assert result.coherence == pytest.approx(math.prod(expected) ** (1 / 4), abs=1e-5)


@pytest.fixture(scope="module")
def hf_vectors(checkpoint_dir: Path) -> Ask:
    """A function that returns the vectors of a text by pooling, "none" as in the pipeline."""
    model = transformers.AutoModel.from_pretrained(checkpoint_dir).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint_dir)

    def run(text: str, side: str = "right") -> dict[str, Any]:
        tokenizer.truncation_side = side
        batch = tokenizer([text], truncation=True, max_length=128, return_tensors="pt")
        with torch.inference_mode():
            hidden_1SH = model(**batch).last_hidden_state
        (hidden_SH,) = hidden_1SH
        pooled = {"mean": hidden_SH.mean(0), "cls": hidden_SH[0], "max": hidden_SH.amax(0)}
        return {**pooled, "none": hidden_1SH}

    return run


def assert_close(result: Sequence[Any], expected: torch.Tensor) -> None:
    assert np.shape(result) == expected.shape
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-4)


def test_embeddings_equal_transformers_and_have_length_1_if_normalized(
    ask: Ask, hf_vectors: Ask, sentences: list[str]
) -> None:
    for text in [*sentences, "The [MASK] run", "½ ﬁ café"]:
        for pooling, expected in hf_vectors(text).items():
            result = ask("feature-extraction", text, pooling=pooling)
            assert_close(result, expected)
            assert (np.array(result) == np.round(result, 8)).all()
            lengths = expected.norm(dim=-1, keepdim=True)
            assert lengths.min() > 1.5
            normalized = ask("feature-extraction", text, pooling=pooling, normalize=True)
            assert_close(normalized, expected / lengths)


def test_a_request_overrides_the_pooling_of_the_model_but_not_its_length(
    task_setup: TaskSetup, answer: Answerer, hf_vectors: Ask
) -> None:
    """Token embeddings use neither the model's pooling nor its length."""
    defaults = SentenceVectors(pooling="cls", normalize=True, max_length=8)
    setup = replace(task_setup, sentence_vectors=defaults)
    vectors = hf_vectors("It rained.")
    for parameters, expected in (
        ({}, vectors["cls"] / vectors["cls"].norm()),
        ({"normalize": False}, vectors["cls"]),
        ({"pooling": "mean"}, vectors["mean"] / vectors["mean"].norm()),
        ({"pooling": "none"}, vectors["none"]),
    ):
        prepared = prepare(setup, "feature-extraction", "It rained.", **parameters)
        assert_close(answer(prepared), expected)
        long = prepare(setup, "feature-extraction", LONG, truncation=True, **parameters)
        assert long.num_tokens == (128 if "none" in parameters.values() else 8)


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_direction_selects_the_end_where_a_long_text_is_truncated(
    side: TruncationDirection, task_setup: TaskSetup, answer: Answerer, hf_vectors: Ask
) -> None:
    text = f"First of all {LONG} and at last"
    options = {"truncation_direction": side, "truncate": True}
    prepared = prepare(task_setup, "feature-extraction", text, **options)
    assert prepared.num_tokens == 128
    assert prepared.num_truncated == len(task_setup.tokenizer.encode(text)) - 128 > 0
    assert_close(answer(prepared), hf_vectors(text, side)["mean"])
