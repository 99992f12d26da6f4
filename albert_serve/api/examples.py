"""Example requests for each task, for the API document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestExample:
    """A request's body, and a summary."""

    summary: str
    body: dict[str, Any]


_CONTEXT: Final = (
    "The bridge over the river was built in 1932. It was designed by an engineer from Vienna, and "
    "was closed to cars in 1988."
)

EXAMPLES: Final[dict[str, tuple[RequestExample, ...]]] = {
    "fill-mask": (
        RequestExample(
            summary="The most likely tokens",
            body={"inputs": "He was born in the United [MASK].", "parameters": {"top_k": 3}},
        ),
        RequestExample(
            summary="Several texts, and the tokens to choose from",
            body={
                "inputs": ["The capital of France is [MASK].", "It is the [MASK] of the country."],
                "parameters": {"targets": ["paris", "capital", "london"], "truncation": False},
            },
        ),
    ),
    "text-classification": (
        RequestExample(summary="A text", body={"inputs": "A moving film with a wonderful cast."}),
        RequestExample(
            summary="A text and a pair of texts, and the best label of each",
            body={
                "inputs": ["A moving film.", {"text": "A dog runs.", "text_pair": "It moves."}],
                "parameters": {"top_k": 1, "function_to_apply": "sigmoid", "truncation": True},
            },
        ),
    ),
    "question-answering": (
        RequestExample(
            summary="The best answer",
            body={"inputs": {"question": "When was the bridge built?", "context": _CONTEXT}},
        ),
        RequestExample(
            summary='Several answers from overlapping windows, including "no answer"',
            body={
                "inputs": {"question": "Who designed it?", "context": " ".join([_CONTEXT] * 6)},
                "parameters": {
                    "top_k": 3,
                    "handle_impossible_answer": True,
                    "null_score_diff_threshold": 1.5,
                    "max_answer_len": 8,
                    "max_seq_len": 64,
                    "doc_stride": 16,
                },
            },
        ),
    ),
    "sentence-order": (
        RequestExample(
            summary="A pair of texts, and a list of sentences",
            body={
                "inputs": [
                    {"text": "It rained.", "text_pair": "So we stayed in."},
                    {"sentences": ["It rained.", "So we stayed in.", "We played cards."]},
                ]
            },
        ),
    ),
    "token-classification": (
        RequestExample(summary="The entities of a text", body={"inputs": _CONTEXT}),
        RequestExample(
            summary="Each token of two texts with its label",
            body={
                "inputs": ["Anna Berg lives in Vienna.", "She was born in Graz."],
                "parameters": {"aggregation_strategy": "none", "ignore_labels": []},
            },
        ),
    ),
    "feature-extraction": (
        RequestExample(
            summary="Embeddings of length 1, whose dot product is the cosine",
            body={
                "inputs": ["It rained.", "The weather was bad.", "He studied physics."],
                "parameters": {"normalize": True, "truncation": True},
            },
        ),
        RequestExample(
            summary="The vectors of the tokens",
            body={"inputs": "It rained.", "parameters": {"pooling": "none"}},
        ),
        RequestExample(
            summary="As Hugging Face's clients send it",
            body={"inputs": "It rained.", "normalize": True, "truncate": True},
        ),
    ),
}

EMBEDDINGS_EXAMPLES: Final = (
    RequestExample(summary="A text", body={"input": "It rained, so we stayed in."}),
    RequestExample(
        summary="Several texts, as OpenAI's clients send them",
        body={"input": ["It rained.", "He studied physics."], "encoding_format": "base64"},
    ),
)

ZERO_SHOT_EXAMPLES: Final = (
    RequestExample(
        summary="The most likely of several labels",
        body={
            "inputs": "My card was stolen this morning.",
            "parameters": {"candidate_labels": ["card", "loan", "exchange rate"]},
        },
    ),
    RequestExample(
        summary="Several texts, each label scored by itself",
        body={
            "inputs": ["A warm and funny film.", "It drags on for two hours."],
            "parameters": {
                "candidate_labels": ["funny", "long"],
                "hypothesis_template": "This film is {}.",
                "multi_label": True,
            },
        },
    ),
)
