"""Embeddings against `transformers`: pooling, lengths, truncation at either end, and their cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from albert_serve.api.embeddings import (
    FeatureExtractionParameters,
    FeatureExtractionRequest,
    TruncationDirection,
)
from albert_serve.errors import TooMuchAtOnceError
from albert_serve.tasks import FeatureExtraction, TaskSetup, prepare_request
from tests.albert_serve.task_fixtures import Answerer

LONG = "The run was scored in the first inning. " * 20


@pytest.fixture(scope="module")
def task(task_setup: TaskSetup) -> FeatureExtraction:
    return FeatureExtraction(task_setup)


class Oracle:
    """The model and the tokenizer in `transformers`."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModel.from_pretrained(folder).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def encode(self, texts: list[str], side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states (B, S, H) and the attention mask (B, S) of a padded batch."""
        self.tokenizer.truncation_side = side
        batch = self.tokenizer(
            texts, padding=True, truncation=True, max_length=128, return_tensors="pt"
        )
        with torch.inference_mode():
            return self.model(**batch).last_hidden_state, batch["attention_mask"]

    def mean(self, texts: list[str], side: str = "right") -> NDArray[np.float32]:
        """Return embeddings (B, H) as the mean pooling of sentence-transformers has them."""
        hidden_BSH, mask_BS = self.encode(texts, side)
        weights_BS1 = mask_BS[..., None].to(hidden_BSH.dtype)
        sums_BH = (hidden_BSH * weights_BS1).sum(1)
        means_BH: NDArray[np.float32] = (sums_BH / weights_BS1.sum(1).clamp(min=1e-9)).numpy()
        return means_BH


@pytest.fixture(scope="module")
def oracle(checkpoint_dir: Path) -> Oracle:
    return Oracle(checkpoint_dir)


def ask(task: FeatureExtraction, answer: Answerer, text: str, **parameters: Any) -> Any:
    return np.array(answer(task.prepare(text, FeatureExtractionParameters(**parameters))))


@pytest.mark.parametrize("pooling", ["mean", "cls", "none"])
def test_vectors_are_those_of_transformers(
    task: FeatureExtraction, answer: Answerer, oracle: Oracle, sentences: list[str], pooling: str
) -> None:
    """The mean as sentence-transformers has it; without pooling as the pipeline."""
    for text in [*sentences, "The [MASK] run", "½ ﬁ café"]:
        hidden_BSH, _ = oracle.encode([text])
        vectors = {"mean": oracle.mean([text])[0], "cls": hidden_BSH[0, 0], "none": hidden_BSH}
        result = ask(task, answer, text, pooling=pooling)
        assert result.shape == vectors[pooling].shape
        np.testing.assert_allclose(result, vectors[pooling], rtol=0, atol=1e-4)
    assert (result == np.round(result, 8)).all()


@pytest.mark.parametrize("pooling", ["mean", "cls", "none"])
def test_normalized_vectors_point_the_same_way(
    task: FeatureExtraction, answer: Answerer, pooling: str
) -> None:
    plain = ask(task, answer, "It rained.", pooling=pooling)
    unit = ask(task, answer, "It rained.", pooling=pooling, normalize=True)
    lengths = np.linalg.norm(plain, axis=-1, keepdims=True)
    assert lengths.min() > 1.5  # of what is not normalized
    np.testing.assert_allclose(unit, plain / lengths, atol=1e-7)


def test_a_vector_of_zeros_stays_one(task: FeatureExtraction) -> None:
    prepared = task.prepare("It rained.", FeatureExtractionParameters(normalize=True))
    assert prepared.finish([np.zeros((1, 64), np.float32)]) == [0.0] * 64


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("allowed", [{"truncation": "truncate"}, {"truncate": True}])
def test_a_long_text_is_cut_at_the_end_that_is_asked_for(
    task: FeatureExtraction,
    answer: Answerer,
    oracle: Oracle,
    side: TruncationDirection,
    allowed: dict[str, Any],
) -> None:
    text = f"First of all {LONG} and at last"
    parameters = FeatureExtractionParameters(truncation_direction=side, **allowed)
    prepared = task.prepare(text, parameters)
    assert prepared.num_tokens == 128
    assert prepared.num_truncated == len(task.setup.tokenizer.encode(text)) - 128 > 0
    (expected,) = oracle.mean([text], side)
    np.testing.assert_allclose(answer(prepared), expected, rtol=0, atol=1e-4)


def test_vectors_of_very_many_tokens_are_refused(task: FeatureExtraction) -> None:
    texts = ["run " * 120] * 200
    pooled = FeatureExtractionRequest(inputs=texts)
    assert len(prepare_request(task, pooled)) == 200
    request = FeatureExtractionRequest.model_validate({"inputs": texts, "pooling": "none"})
    with pytest.raises(TooMuchAtOnceError, match="pool the tokens' vectors"):
        prepare_request(task, request)
