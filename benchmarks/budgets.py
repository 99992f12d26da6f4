"""Accuracy and seconds of `albert-serve finetune` on labelled texts, by the time that it is given.

Runs the command as a user does, in a process of its own: the fitted head alone, each budget, a
budget beside another process that keeps a core busy, and a few texts of each label without any
option. Measures the best checkpoint of each on the test texts, and prints a table. Seconds are of
the whole command with its start, the fit and all validations. The last row has TF-IDF of words
with logistic regression.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pandas
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from sklearn.pipeline import make_pipeline

from albert_serve.settings import num_usable_cpus
from benchmarks.embeddings import INVERSE_PENALTY_OF_ALL
from benchmarks.harness.page import describe_machine, table
from benchmarks.harness.process import REPOSITORY, BenchmarkError, last_line
from training.errors import report_errors
from training.evaluation.run import EvaluateConfig, evaluate
from training.system.command_line import make_parser

_HEADINGS: Final = ("", "training texts", "seconds", "accuracy", "macro-F1")
_MAX_ITERATIONS: Final = 1000
_macro_f1: Final = partial(f1_score, average="macro")
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.budgets banking77/train.csv banking77/test.csv
  python -m benchmarks.budgets train.csv test.csv --budgets 20s --busy-budget 20s --few 8
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run of the command.

    Attributes:
        few: texts of each label; None for all.
        is_shared: whether another process keeps a core busy.
    """

    options: tuple[str, ...] = ()
    few: int | None = None
    is_shared: bool = False

    @property
    def title(self) -> str:
        """The options, and what differs from a run of all texts on an idle machine."""
        few = "" if self.few is None else f", {self.few} texts a label"
        return f"{' '.join(self.options) or 'no options'}{few}{' beside another' * self.is_shared}"


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    yield Case(options=("--head-only",))
    for budget in options.budgets:
        yield Case(options=("--budget", budget))
    if options.busy_budget:
        yield Case(options=("--budget", options.busy_budget), is_shared=True)
    for few in options.few:
        yield Case(options=("--head-only",), few=few)
        yield Case(few=few)


def _row(case: Case, options: argparse.Namespace, folder: Path) -> list[str]:
    """Run a case in a new folder, and return its row.

    Raises:
        BenchmarkError: the command failed.
    """
    run, file, texts = folder / "run", folder / "train.csv", pandas.read_csv(options.train)
    if case.few is not None:
        texts = texts.sample(frac=1, random_state=0).groupby(options.label_column).head(case.few)
    texts.to_csv(file, index=False)
    columns = ("--text-column", options.text_column, "--label-column", options.label_column)
    command = [
        "--initialize-from",
        str(options.initialize_from),
        "--text-classification",
        str(file),
    ]
    began_s = time.perf_counter()
    with ExitStack() as stack:
        if case.is_shared:
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(other.wait)
            stack.callback(other.kill)
        log = stack.enter_context((folder / "log").open("w"))
        ended = subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "training.commands.finetune",
                    *command,
                    *columns,
                    *case.options,
                ),
                *("--output", str(run)),
            ],
            stdout=log,
            stderr=log,
            check=False,
        )
    duration_s = time.perf_counter() - began_s
    if ended.returncode:
        raise BenchmarkError(f"{case.title}: {last_line(folder / 'log')}")
    best = run / "best" if (run / "best").exists() else run / "checkpoint"
    test = EvaluateConfig(
        checkpoint=str(best),
        text_classification=(options.test,),
        text_column=options.text_column,
        label_column=(options.label_column,),
        truncation=True,
    )
    figures = evaluate(test).figures
    names = ("text_classification_accuracy", "text_classification_macro_f1")
    return _cells(case.title, len(texts), duration_s, [figures[name] for name in names])


def _cells(title: str, num_texts: int, duration_s: float, figures: Sequence[float]) -> list[str]:
    return [title, f"{num_texts:,}", f"{duration_s:.0f}", *(f"{100 * x:.2f}" for x in figures)]


def _peer(options: argparse.Namespace) -> list[str]:
    train, test = pandas.read_csv(options.train), pandas.read_csv(options.test)
    text, label = options.text_column, options.label_column
    began_s = time.perf_counter()
    peer = make_pipeline(
        TfidfVectorizer(),
        LogisticRegression(C=INVERSE_PENALTY_OF_ALL, max_iter=_MAX_ITERATIONS),
    )
    predicted = peer.fit(train[text], train[label]).predict(test[text])
    duration_s = time.perf_counter() - began_s
    measured = [measure(test[label], predicted) for measure in (accuracy_score, _macro_f1)]
    return _cells("TF-IDF, logistic regression", len(train), duration_s, measured)


def _run(options: argparse.Namespace) -> int:
    rows = []
    for case in _cases(options):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(_row(case, options, Path(folder)))
        print("  ".join(rows[-1]), file=sys.stderr)
    rows.append(_peer(options))
    print(*describe_machine(num_usable_cpus()), "", table(_HEADINGS, rows), sep="\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m benchmarks.budgets", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("train", type=Path, help="a CSV file of texts and labels, such as Banking77's")
    add("test", type=Path, help="the same to measure on")
    add("--text-column", default="text", help="(%(default)s)")
    add("--label-column", default="category", help="(%(default)s)")
    shipped = REPOSITORY / "models" / "albert-small-en"
    add("--initialize-from", type=Path, default=shipped, help="checkpoint (models/albert-small-en)")
    add("--budgets", nargs="*", default=["60s", "6m"], help="(60s 6m)")
    add("--busy-budget", default="6m", help="beside another process; '' for none (%(default)s)")
    add("--few", nargs="*", type=int, default=[16, 8], help="texts a label (16 8)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
