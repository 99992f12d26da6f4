"""Questions without an answer, made from questions that have one (SQuAD's form).

A model learns from them to give no answer, and figures on them say whether it does. Of three kinds:
the question with another paragraph of the same article, the one most like it; with a year, number,
name or word exchanged; or with a paragraph of another article, which is off topic. Written in the
form of SQuAD 2.0, each with its `kind`; give the file beside that of the answerable questions. The
same files, options and seed give the same file to the byte.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np

from albert_serve.progress import progress_bar
from recipes.albert_small_en.making_questions import MakingQuestions, run_making
from recipes.albert_small_en.question_corpus import KINDS, Corpus, Kind, read_corpus
from recipes.albert_small_en.squad_file import write_squad_file
from training.data.questions import Question, read_squad
from training.options.flags import flag
from training.options.values import Count, Seed, Weight

_EXAMPLES: Final = r"""examples:
  python -m recipes.albert_small_en.unanswerable train-v1.1.json unanswerable.json.xz
  python -m recipes.albert_small_en.unanswerable train-v1.1.json off-topic.json --same-article 0 \
      --exchanged 0 --max-questions 10000
  albert-serve finetune --initialize-from runs/base/checkpoint \
      --question-answering train-v1.1.json unanswerable.json.xz --recipe paper --output runs/squad
"""


@dataclass(frozen=True, kw_only=True)
class _UnanswerableConfig(MakingQuestions, title="questions"):
    """The files in SQuAD's form, and the questions that are made of them."""

    same_article: Weight = flag("share of questions with another paragraph of the article", 0.45)
    exchanged: Weight = flag("share of questions with a year, number, name or word exchanged", 0.3)
    off_topic: Weight = flag("share of questions with a paragraph of another article", 0.25)
    max_questions: Count | None = flag("questions in all (half of those that have an answer)")
    seed: Seed = flag("of the choice of questions, paragraphs and words", 0)

    def counts(self, num_answerable: int) -> dict[Kind, int]:
        """Return the number of questions of each kind."""
        shares = dict(zip(KINDS, (self.same_article, self.exchanged, self.off_topic), strict=True))
        total = (num_answerable + 1) // 2 if self.max_questions is None else self.max_questions
        return {
            kind: round(total * share / (sum(shares.values()) or 1))
            for kind, share in shares.items()
        }


def _make(corpus: Corpus, counts: dict[Kind, int], seed: int) -> Iterator[Question]:
    """Yield so many questions of each kind, or as many as can be made."""
    with progress_bar(title="questions", total=sum(counts.values()), unit="questions") as bar:
        for number, (kind, count) in enumerate(counts.items()):
            made = corpus.make(kind, np.random.default_rng([seed, number]))
            for question in islice(filter(None, made), count):
                yield question
                bar.update()


def _articles(questions: Iterable[Question]) -> Iterator[dict[str, Any]]:
    """Yield the questions in the form of SQuAD 2.0, under the article that they were made from."""
    articles: defaultdict[str, defaultdict[str, list[dict[str, Any]]]]
    articles = defaultdict(lambda: defaultdict(list))
    for each in questions:
        entry = {"id": each.id, "question": each.question, "is_impossible": True, "answers": []}
        articles[each.article][each.context].append({**entry, "kind": each.kind})
    for article, paragraphs in articles.items():
        yield {
            "title": article.partition(": ")[2],
            "paragraphs": [{"context": key, "qas": qas} for key, qas in paragraphs.items()],
        }


def _run(config: _UnanswerableConfig) -> int:
    corpus = read_corpus([read_squad([file]) for file in config.files])
    counts = config.counts(len(corpus.questions))
    made = list(_make(corpus, counts, config.seed))
    write_squad_file(
        config.output,
        "v2.0",
        _articles(made),
        if_none="no question can be made: they need answers, and paragraphs without these",
    )
    shown = ", ".join(
        f"{sum(each.kind == kind for each in made):,} {kind} (of {count:,} asked for)"
        for kind, count in counts.items()
    )
    print(f"{config.output}: {len(made):,} questions of {len(corpus.questions):,}: {shown}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    return run_making(
        _UnanswerableConfig,
        _run,
        arguments,
        prog="python -m recipes.albert_small_en.unanswerable",
        description=__doc__,
        examples=_EXAMPLES,
        files="SQuAD files",
    )


if __name__ == "__main__":
    sys.exit(main())
