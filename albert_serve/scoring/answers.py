"""The tasks that can be scored, with the columns of an item and of its answer in a table.

In JSONL, an answer is one value, `output`. In a table (CSV, TSV, Parquet), it has several columns,
which are the same for all rows. To add a task, add an entry to `SCORED_TASKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from albert_serve.api.embeddings import FEATURE_EXTRACTION
from albert_serve.bundle.weights import TOKENS
from albert_serve.errors import AlbertServeError
from albert_serve.tables.columns import PAIRS, SINGLES, TextColumns

_Types = Mapping[str, Any]  # Arrow types by column
_TEXT: Final = pa.string()
_INTEGER: Final = pa.int64()
_NUMBER: Final = pa.float64()


def _list_of(**fields: Any) -> Any:
    """Return the Arrow type of a list of structures."""
    return pa.list_(pa.struct(fields))


@dataclass(frozen=True, kw_only=True, slots=True)
class _ScoredTask:
    """The columns of a task's items and answers.

    Attributes:
        fields: names of an item's fields. An item with only one field is not an object.
        required: sets of fields. An item needs all fields of at least one set.
        columns: Arrow types of the answer's columns, by name.
        to_columns: function from an item's JSON answer to the column values that are not null.
        texts: other usual column names of the first two fields.
        defaults: default parameters of the job.
        optional_columns: name of the job parameter that adds each optional column, by column.
    """

    fields: tuple[str, ...]
    required: tuple[tuple[str, ...], ...]
    columns: _Types
    to_columns: Callable[[Any], dict[str, Any]]
    texts: Sequence[TextColumns] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    optional_columns: Mapping[str, str] = field(default_factory=dict)


# Every table has these columns next to the answer. JSONL omits them if they are null.
_NOTES: Final[_Types] = {
    "warnings": pa.list_(_TEXT),
    "truncated_tokens": _INTEGER,
    "error": _TEXT,
    "error_type": _TEXT,
}
# JSONL stores the answer under this key.
OUTPUT: Final = "output"


def _fill_mask(output: Any) -> dict[str, Any]:
    """Return the columns of a text's predictions, with the best token if there is only one mask."""
    predictions = output if output and isinstance(output[0], list) else [output]
    if len(predictions) > 1 or not predictions[0]:
        return {"predictions": predictions}
    best = predictions[0][0]
    return {
        "token_str": best.get("token_str"),
        "score": best["score"],
        "sequence": best["sequence"],
        "predictions": predictions,
    }


def _best_and_all(name: str) -> Callable[[Any], dict[str, Any]]:
    """Return a function that turns a ranking into columns: its best entry, and all entries."""

    def columns(output: Any) -> dict[str, Any]:
        ranking = output if isinstance(output, list) else [output]
        return {**(ranking[0] if ranking else {}), name: ranking}

    return columns


def _feature_extraction(output: Any) -> dict[str, Any]:
    if output and isinstance(output[0], list):
        return {"token_embeddings": output[0]}
    return {"embedding": output}


_LABEL: Final = {"label": _TEXT, "score": _NUMBER}
_ANSWER: Final = {"answer": _TEXT, "score": _NUMBER, "start": _INTEGER, "end": _INTEGER}
_ENTITY: Final = {
    "entity_group": _TEXT,
    "entity": _TEXT,
    "score": _NUMBER,
    "index": _INTEGER,
    "word": _TEXT,
    "start": _INTEGER,
    "end": _INTEGER,
}
_PREDICTIONS: Final = _list_of(
    score=_NUMBER,
    token=_INTEGER,
    token_str=_TEXT,
    sequence=_TEXT,
)

SCORED_TASKS: Final[dict[str, _ScoredTask]] = {
    "fill-mask": _ScoredTask(
        fields=("text",),
        required=(("text",),),
        columns={
            "token_str": _TEXT,
            "score": _NUMBER,
            "sequence": _TEXT,
            "predictions": pa.list_(_PREDICTIONS),
        },
        to_columns=_fill_mask,
        texts=SINGLES,
    ),
    "text-classification": _ScoredTask(
        fields=("text", "text_pair"),
        required=(("text",),),
        columns={**_LABEL, "labels": _list_of(**_LABEL)},
        to_columns=_best_and_all("labels"),
        texts=(*PAIRS, *SINGLES),
        defaults={"top_k": 1},
        optional_columns={"labels": "top_k"},
    ),
    "question-answering": _ScoredTask(
        fields=("question", "context"),
        required=(("question", "context"),),
        columns={**_ANSWER, "answers": _list_of(**_ANSWER)},
        to_columns=_best_and_all("answers"),
    ),
    "sentence-order": _ScoredTask(
        fields=("text", "text_pair", "sentences"),
        required=(("text", "text_pair"), ("sentences",)),
        columns={
            "in_order": _NUMBER,
            "coherence": _NUMBER,
            "pairs": _list_of(first=_INTEGER, second=_INTEGER, in_order=_NUMBER),
        },
        to_columns=dict,
        texts=PAIRS,
    ),
    TOKENS: _ScoredTask(
        fields=("text",),
        required=(("text",),),
        columns={"entities": _list_of(**_ENTITY)},
        to_columns=lambda output: {"entities": output},
        texts=SINGLES,
    ),
    FEATURE_EXTRACTION: _ScoredTask(
        fields=("text",),
        required=(("text",),),
        columns={
            "embedding": pa.list_(pa.float32()),
            "token_embeddings": pa.list_(pa.list_(pa.float32())),
        },
        to_columns=_feature_extraction,
        texts=SINGLES,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowResult:
    """The result of a row.

    Attributes:
        values: JSON values: `output` and notes, or `error` and `error_type`.
        num_tokens: number of tokens that were computed for the row.
    """

    values: dict[str, Any]
    num_tokens: int = 0

    @classmethod
    def of_error(cls, error: AlbertServeError) -> RowResult:
        """Return the result of a row that cannot be answered."""
        # The message can contain a file name that is not UTF-8.
        message = str(error).encode(errors="backslashreplace").decode()
        return cls(values={"error": message, "error_type": error.error_type})

    @property
    def is_error(self) -> bool:
        """Whether the row failed."""
        return "error" in self.values


def answer_columns(task: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Arrow types of all columns that the output adds to the input columns.

    Args:
        parameters: parameters of the job.
    """
    scored = SCORED_TASKS[task]
    optional = scored.optional_columns
    omitted = {name for name, parameter in optional.items() if parameter not in parameters}
    columns = {name: kind for name, kind in scored.columns.items() if name not in omitted}
    return {**columns, **_NOTES}


# Names of the columns that JSONL adds to the input columns.
JSON_NAMES: Final = frozenset({OUTPUT, *_NOTES})


def table_values(task: str, result: RowResult) -> dict[str, Any]:
    """Return a result's values by table column."""
    notes = {name: value for name, value in result.values.items() if name != OUTPUT}
    if OUTPUT not in result.values:
        return notes
    return {**SCORED_TASKS[task].to_columns(result.values[OUTPUT]), **notes}
