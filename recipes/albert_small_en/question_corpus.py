"""Questions without an answer, made from questions that have one.

Three kinds, each told by another difference between question and context:

- `same-article`: the question with another paragraph of its article, the one that is most like it
  by TF-IDF. An article of a few paragraphs counts as one with all others of its file.
- `exchanged`: the question with its own context, of whose words it has another: a year, a number, a
  name or a month of another question, or the antonym of a word.
- `off-topic`: the question with any paragraph of another article.

No paragraph that a question gets holds one of its answers, and nothing that is put into a question
stands in its context.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer

from training.data.corpus import CorpusError
from training.data.questions import Question

Kind: TypeAlias = Literal["same-article", "exchanged", "off-topic"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
# With fewer paragraphs an article is one with all of its file, such as SQuADShifts' reviews.
_MIN_PARAGRAPHS: Final = 10
_TRIES: Final = 50

_MONTHS: Final = (
    "January|February|March|April|May|June|July|August|September|October|November|December"
)
_OPPOSITES: Final = """
    first/last largest/smallest biggest/smallest highest/lowest most/least longest/shortest
    oldest/youngest earliest/latest best/worst more/less higher/lower larger/smaller greater/lesser
    older/younger earlier/later longer/shorter better/worse north/south east/west northern/southern
    eastern/western increase/decrease increased/decreased rise/fall won/lost win/lose started/ended
    begin/end began/ended opened/closed open/close founded/dissolved accepted/rejected accept/reject
    male/female men/women father/mother son/daughter brother/sister husband/wife king/queen
    positive/negative internal/external public/private major/minor upper/lower inside/outside
    love/hate liked/disliked easy/difficult fast/slow cheap/expensive hot/cold rich/poor
    majority/minority maximum/minimum import/export ancient/modern rural/urban
"""
_PAIRS: Final = re.findall(r"(\w+)/(\w+)", _OPPOSITES)
_ANTONYMS: Final[dict[str, str]] = {other: one for one, other in _PAIRS} | dict(_PAIRS)
# Names do not begin a question, whose first word is always in upper case.
_EXCHANGED: Final = re.compile(
    r"(?P<year>\b(?:1\d{3}|20\d{2})\b)"
    r"|(?P<number>\b\d+(?:[,.]\d+)*\b)"
    rf"|(?P<month>\b(?:{_MONTHS})\b)"
    r"|(?P<name>(?<=[\w,] )[A-Z][\w.-]*\w(?: [A-Z][\w.-]*\w)*)"
    rf"|(?P<antonym>(?i:\b(?:{'|'.join(_ANTONYMS)})\b))"
)


class _Part(NamedTuple):
    """A part of a question that can be exchanged.

    Attributes:
        kind: what takes its place is of the same kind; of names it has the word before them, so
            that "in Paris" becomes "in London".
    """

    begin: int
    end: int
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Questions, and the paragraphs that they stand on.

    Attributes:
        questions: those that have an answer.
        contexts: the P paragraphs.
        articles: (P,) the article of each paragraph.
        near: by article, the rows of the paragraphs that its questions are asked of.
        vectorizer: of texts to rows of TF-IDF.
        tfidf: (P, terms) of the paragraphs, sparse.
        parts: different parts of questions by kind, of each article and (under "") of all.
    """

    questions: Sequence[Question]
    contexts: Sequence[str]
    articles: NDArray[np.str_]
    near: dict[str, NDArray[np.int64]]
    vectorizer: TfidfVectorizer
    tfidf: Any
    parts: dict[tuple[str, str], list[str]]

    def make(self, kind: Kind, rng: np.random.Generator) -> Iterator[Question | None]:
        """Yield an unanswerable question of each question in random order; None if there is none.

        Its id is that of the question with the kind at the end.
        """
        makers: dict[Kind, Callable[[Question, np.random.Generator], Question | None]] = {
            "same-article": self._same_article,
            "exchanged": self._exchanged,
            "off-topic": self._off_topic,
        }
        for index in rng.permutation(len(self.questions)).tolist():
            question = self.questions[index]
            made = makers[kind](question, rng)
            if made is None:
                yield None
            else:
                name = f"{question.id}-{kind}"
                yield replace(made, id=name, answers=(), start=None, kind=kind)

    def _same_article(self, question: Question, _: np.random.Generator) -> Question | None:
        rows = self.near[question.article]
        terms = self.vectorizer.transform([question.question])
        likeness = (self.tfidf[rows] @ terms.T).toarray()[:, 0]
        return self._asked_of_first(question, rows[np.argsort(-likeness, kind="stable")])

    def _off_topic(self, question: Question, rng: np.random.Generator) -> Question | None:
        rows = rng.integers(len(self.contexts), size=_TRIES)
        return self._asked_of_first(question, rows[self.articles[rows] != question.article])

    def _asked_of_first(self, question: Question, rows: NDArray[np.int64]) -> Question | None:
        """Return the question with the first paragraph that holds none of its answers."""
        contexts = (self.contexts[row] for row in rows.tolist())
        fitting = (
            context
            for context in contexts
            if context != question.context
            and not any(_holds(context, answer) for answer in question.answers)
        )
        context = next(fitting, None)
        return None if context is None else replace(question, context=context)

    def _exchanged(self, question: Question, rng: np.random.Generator) -> Question | None:
        text, context = question.question, question.context
        parts = [part for part in _parts(text) if _holds(context, part.text)]
        for index in rng.permutation(len(parts)).tolist():
            part = parts[index]
            for other in self._others(part, question.article, rng):
                if not _holds(context, other) and not _holds(text, other):
                    changed = text[: part.begin] + other + text[part.end :]
                    return replace(question, question=changed)
        return None

    def _others(self, part: _Part, article: str, rng: np.random.Generator) -> Iterator[str]:
        """Yield what can take a part's place: of the same article first, which is more alike."""
        if part.kind == "antonym":
            antonym = _ANTONYMS[part.text.lower()]
            yield antonym.capitalize() if part.text[0].isupper() else antonym
            return
        for owner in (article, ""):
            same = self.parts[owner, part.kind]
            yield from (same[index] for index in rng.integers(len(same), size=_TRIES))


def read_corpus(files: Sequence[Sequence[Question]]) -> Corpus:
    """Return the corpus of the questions of one or more files.

    Raises:
        CorpusError: no context has a word.
    """
    questions = list(chain.from_iterable(files))
    paragraphs = list(dict.fromkeys((each.article, each.context) for each in questions))
    articles = np.array([article for article, _ in paragraphs])
    contexts = [context for _, context in paragraphs]
    vectorizer = TfidfVectorizer(sublinear_tf=True)
    try:
        tfidf = vectorizer.fit_transform(contexts)
    except ValueError as error:
        raise CorpusError(f"the contexts of the questions have no words: {error}") from error
    return Corpus(
        questions=[question for question in questions if question.answers],
        contexts=contexts,
        articles=articles,
        near={article: rows for file in files for article, rows in _near(file, articles)},
        vectorizer=vectorizer,
        tfidf=tfidf,
        parts=_collect_parts(questions),
    )


def _near(
    file: Sequence[Question], articles: NDArray[np.str_]
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yield the articles of a file, and the rows of the paragraphs that count as their own."""
    names = list(dict.fromkeys(each.article for each in file))
    of_file = np.flatnonzero(np.isin(articles, names))
    for name in names:
        rows = np.flatnonzero(articles == name)
        yield name, rows if len(rows) >= _MIN_PARAGRAPHS else of_file


def _collect_parts(questions: Sequence[Question]) -> dict[tuple[str, str], list[str]]:
    parts: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for question in questions:
        for part in _parts(question.question):
            for owner in (question.article, ""):
                parts[owner, part.kind][part.text] = None
    return {key: list(texts) for key, texts in parts.items()}


def _parts(question: str) -> Iterator[_Part]:
    for match in _EXCHANGED.finditer(question):
        kind = match.lastgroup or ""
        if kind == "name":
            kind = f"name after {question[: match.start()].split()[-1].lower()}"
        yield _Part(match.start(), match.end(), kind, match[0])


def _holds(text: str, part: str) -> bool:
    """Whether a text has a part, between words, in upper or lower case."""
    return re.search(rf"(?<!\w){re.escape(part.strip())}(?!\w)", text, re.IGNORECASE) is not None
