"""Names of columns: usual names of texts and labels, and the search for a column."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, TypeAlias

from albert_serve.errors import InvalidInputError

# The column of a text, and the column of its second text, or None for single texts.
TextColumns: TypeAlias = tuple[str, str | None]

# The first of these pairs that a file has is used (GLUE, SICK, MRPC). QNLI's pair precedes GLUE's
# other pairs, because its second column is also the name of a single text.
PAIRS: Final[Sequence[TextColumns]] = (
    ("text", "text_pair"),
    ("question", "sentence"),
    ("question1", "question2"),
    ("sentence1", "sentence2"),
    ("sentence_A", "sentence_B"),
    ("premise", "hypothesis"),
    ("#1 String", "#2 String"),
)
SINGLES: Final[Sequence[TextColumns]] = tuple(
    (name, None) for name in ("text", "sentence", "sentence1", "sentence_A")
)
LABELS: Final = (
    *("label", "category", "labels", "score"),
    *("gold_label", "Quality", "is_duplicate"),  # GLUE
)
# Contexts and questions have these columns in RACE, SWAG, COPA, HellaSwag and others.
CONTEXTS: Final[Sequence[TextColumns]] = (
    *(("context", "question"), ("context", None)),
    *(("article", "question"), ("article", None)),
    *(("passage", "question"), ("passage", None)),
    *(("sent1", "sent2"), ("sent1", None)),
    *(("premise", "question"), ("premise", None)),
    *(("ctx_a", "ctx_b"), ("ctx_a", None)),
    *(("prompt", None), ("question", None), ("question_stem", None), ("text", None)),
)
# Similar texts have these columns, perhaps with a dissimilar text or a similarity score.
SIMILAR: Final[Sequence[tuple[str, ...]]] = (
    *(("anchor", "positive", "negative"), ("anchor", "positive")),
    *(("sentence1", "sentence2"), ("sentence_A", "sentence_B")),
    *(("query", "answer"), ("question", "answer")),
    *(("query", "positive", "negative"), ("query", "positive")),
)
SCORES: Final = ("score", "similarity", "similarity_score", "relatedness_score")
ANSWERS: Final = ("label", "answer", "answerKey")
CHOICES: Final = ("choices", "options", "endings")


def find_column(
    names: Collection[str], usual_names: Sequence[str], requested: str | None = None
) -> str | None:
    """Return the requested column, or the first usual column if none is requested, or None."""
    candidates = usual_names if requested is None else (requested,)
    matches = (find_name(names, candidate) for candidate in candidates)
    return next((match for match in matches if match is not None), None)


def find_texts(
    names: Collection[str],
    usual_names: Sequence[TextColumns],
    text: str | None = None,
    pair: str | None = None,
) -> TextColumns | None:
    """Return the columns of a text and its second text, if any, or None without a match.

    Args:
        usual_names: columns to look for. The first match is returned.
        text, pair: requested columns, which replace the usual columns.
    """
    for first, second in usual_names if text is None else ((text, None),):
        first_column, second = find_name(names, first), pair or second
        if first_column is None:
            continue
        second_column = None if second is None else find_name(names, second)
        if (second is None or second_column is not None) and first_column != second_column:
            return first_column, second_column
    return None


def find_name(names: Collection[str], requested: str) -> str | None:
    """Return the requested name, or else the name that differs only in case and outer spaces."""
    if requested in names:
        return requested
    matches = [name for name in names if name.strip().casefold() == requested.casefold()]
    if len(matches) > 1:
        raise InvalidInputError(
            f"The columns {' and '.join(map(repr, matches))} differ only in case. Use one of these "
            "names, or rename the other columns."
        )
    return matches[0] if matches else None
