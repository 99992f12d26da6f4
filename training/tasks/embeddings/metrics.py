"""Evaluation of embeddings: similarity of scored pairs, and retrieval of matching texts.

The embeddings of `/feature-extraction` have length 1, so their dot product is the cosine.

Shape legend: N texts, P pairs, Q queries, C candidates, M matching candidates of a query, H hidden
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from albert_serve.api.embeddings import FeatureExtractionAnswer, FeatureExtractionParameters
from albert_serve.errors import TextTooLongError
from albert_serve.tasks.base import Logits, Prepared, Runner, TaskSetup
from albert_serve.tasks.feature_extraction import FeatureExtraction
from training.data.labelled.rows import raise_listed
from training.tasks.embeddings.files import SimilarTexts
from training.tasks.engine import EngineItem, predict
from training.tasks.metrics import compute_metrics

# Prefix of the metrics' names.
PREFIX: Final = "embeddings"
_RECALLS: Final = (1, 5, 10)
_MAX_RANK: Final = 10
_NUM_BATCH_QUERIES: Final = 256
_NUM_SHOWN_CHARS: Final = 60

Vectors: TypeAlias = NDArray[np.float32]
# Function that returns the embeddings (N, H) of texts, each of length 1.
Embed: TypeAlias = Callable[[Sequence[str]], Vectors]


@dataclass(kw_only=True)
class Embedder:
    """A function that returns the embeddings (N, H) of texts, each of length 1.

    Attributes:
        truncation: whether to truncate texts of more than `max_length` tokens.
        num_texts: number of texts so far.
        num_truncated: number of truncated texts so far.
    """

    runner: Runner
    setup: TaskSetup
    truncation: bool = True
    num_texts: int = 0
    num_truncated: int = 0

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a text."""
        return self.setup.sentence_vectors.max_length or self.setup.max_positions

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Return the embeddings (N, H) of texts."""
        task = FeatureExtraction(self.setup)
        parameters = FeatureExtractionParameters(
            normalize=True, truncation="truncate" if self.truncation else "error"
        )
        items, errors = [], []
        for text in texts:
            try:
                prepared = task.prepare(text, parameters)
            except TextTooLongError:
                start = repr(text[:_NUM_SHOWN_CHARS])
                errors.append(
                    f"{start}... has more than {self.max_length} tokens. Use --truncation."
                )
            else:
                self.num_truncated += prepared.num_truncated > 0
                decode = partial(_decode_vector, prepared)
                items.append(EngineItem(inputs=prepared.inputs, decode=decode))
        self.num_texts += len(texts)
        raise_listed(errors)
        vectors = predict(self.runner, items, "embeddings")
        return np.array(vectors, np.float32)


def _decode_vector(
    prepared: Prepared[FeatureExtractionAnswer], logits: list[Logits]
) -> list[FeatureExtractionAnswer]:
    return [prepared.finish(logits)]


def similarity_metrics(pairs: Sequence[SimilarTexts], embed: Embed) -> dict[str, Any]:
    """Return the correlations between the cosines and the scores of pairs.

    Benchmarks compare Spearman's correlation (MTEB, arXiv 2210.07316). Pearson's is added. Both are
    nan if all cosines or all scores are equal.
    """
    index_of, vectors_NH = _embed_once((text for pair in pairs for text in pair.texts), embed)
    firsts_P, seconds_P = ([index_of[pair.texts[k]] for pair in pairs] for k in (0, 1))
    cosines_P = np.einsum("ph,ph->p", vectors_NH[firsts_P], vectors_NH[seconds_P])
    scores_P = np.array([pair.score for pair in pairs], np.float64)
    metrics = compute_metrics(("spearman", "pearson"), cosines_P[:, None], scores_P)
    figures: dict[str, Any] = {f"{PREFIX}_{name}": value for name, value in metrics.items()}
    return {**figures, f"{PREFIX}_pairs": len(pairs)}


def retrieval_metrics(pairs: Sequence[SimilarTexts], embed: Embed) -> dict[str, Any]:
    """Return recall at 1, 5 and 10, and the mean reciprocal rank at 10, of retrieval by cosine.

    The first text of a pair is a query. The other texts of all pairs are candidates, each distinct
    text once. The matches of a query are the second texts of its pairs. Recall at k is the fraction
    of the matches among the first k candidates. The reciprocal rank is 1 / rank of the first match,
    or 0 if the rank is more than 10. If candidates have equal cosines, matches rank last.

    Args:
        pairs: pairs of a query and a matching text, or triplets with another candidate.
    """
    matching: dict[str, set[str]] = {}
    for pair in pairs:
        matching.setdefault(pair.texts[0], set()).add(pair.texts[1])
    _, queries_QH = _embed_once(matching, embed)
    index_of, candidates_CH = _embed_once((text for p in pairs for text in p.texts[1:]), embed)
    indices = [[index_of[text] for text in texts] for texts in matching.values()]
    ranks = list(_ranks(queries_QH, candidates_CH, indices))
    recalls = {
        f"recall_at_{k}": float(np.mean([(ranks_M <= k).mean() for ranks_M in ranks]))
        for k in _RECALLS
    }
    firsts_Q = np.array([ranks_M.min() for ranks_M in ranks])
    figures: dict[str, Any] = {
        **recalls,
        f"mrr_at_{_MAX_RANK}": float(np.where(firsts_Q <= _MAX_RANK, 1 / firsts_Q, 0.0).mean()),
        "queries": len(matching),
        "candidates": len(index_of),
    }
    return {f"{PREFIX}_{name}": value for name, value in figures.items()}


def _ranks(
    queries_QH: Vectors, candidates_CH: Vectors, indices: Sequence[Sequence[int]]
) -> Iterator[NDArray[np.int64]]:
    """Yield the ranks (M,) of each query's matches, from 1.

    Args:
        indices: indices of each query's matches among the candidates.
    """
    for start in range(0, len(queries_QH), _NUM_BATCH_QUERIES):
        cosines_QC = queries_QH[start : start + _NUM_BATCH_QUERIES] @ candidates_CH.T
        for cosines_C, matching_M in zip(cosines_QC, indices[start:], strict=False):
            yield (cosines_C >= cosines_C[matching_M, None]).sum(-1)


def _embed_once(texts: Iterable[str], embed: Embed) -> tuple[dict[str, int], Vectors]:
    """Return the index of each distinct text, and the embeddings (N, H) by index."""
    index_of = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    return index_of, embed(list(index_of))
