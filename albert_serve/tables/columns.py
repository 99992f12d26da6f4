"""Names of columns: the usual ones of texts and labels, and the search for one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, TypeAlias

from albert_serve.errors import InvalidInputError

# Columns of a text, and of a second one where there may be one.
TextColumns: TypeAlias = tuple[str, str | None]

# The first that a file has are taken: GLUE's (QNLI before the others, since its second column is
# also the name of a single text), SICK's and MRPC's.
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
    *("gold_label", "Quality", "is_duplicate"),  # of files of GLUE
)
# Of the context and the question: RACE's and others', SWAG's, COPA's, HellaSwag's.
CONTEXTS: Final[Sequence[TextColumns]] = (
    *(("context", "question"), ("context", None)),
    *(("article", "question"), ("article", None)),
    *(("passage", "question"), ("passage", None)),
    *(("sent1", "sent2"), ("sent1", None)),
    *(("premise", "question"), ("premise", None)),
    *(("ctx_a", "ctx_b"), ("ctx_a", None)),
    *(("prompt", None), ("question", None), ("question_stem", None), ("text", None)),
)
# Of texts that belong together, perhaps with one that does not, or are as alike as a score says.
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
    names: Collection[str], known: Sequence[str], named: str | None = None
) -> str | None:
    """Return the first of the known columns that there is; or the named one, if there is."""
    wanted = known if named is None else (named,)
    return next((name for each in wanted if (name := find_name(names, each)) is not None), None)


def find_texts(
    names: Collection[str],
    known: Sequence[TextColumns],
    text: str | None = None,
    pair: str | None = None,
) -> TextColumns | None:
    """Return the columns of a text and, where there is one, of its second text.

    Args:
        known: of which the first are taken that there are.
        text, pair: the columns in their place.
    """
    for first, second in known if text is None else ((text, None),):
        one, wanted = find_name(names, first), pair or second
        if one is None:
            continue
        other = None if wanted is None else find_name(names, wanted)
        if (wanted is None or other is not None) and one != other:
            return one, other
    return None


def find_name(names: Collection[str], wanted: str) -> str | None:
    """Return the name that is `wanted`, or else the one that is but for case and outer spaces."""
    if wanted in names:
        return wanted
    alike = [name for name in names if name.strip().casefold() == wanted.casefold()]
    if len(alike) > 1:
        raise InvalidInputError(
            f"the columns {' and '.join(map(repr, alike))} differ only in case; name one of them, "
            "or rename the others"
        )
    return alike[0] if alike else None
