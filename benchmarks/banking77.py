"""Accuracy of finetuning on Banking77, by number of texts and by training time.

Runs `albert-serve finetune` from the default model with few texts per label and with all, and once
per budget of time. The accuracy is of `albert-serve evaluate` on the test file. Each round draws
other texts and has another seed. Prints medians over rounds, and writes `results.json` and
`tables.md` into the output folder. For comparison, a logistic regression on word-level TF-IDF
learns the same texts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pandas as pd
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from tqdm import tqdm

from albert_serve.bundle.manifest import WEIGHTS_FILE
from albert_serve.files import sha256_of
from albert_serve.settings import num_usable_cpus, shipped_bundle
from albert_serve.terminal import make_parser
from benchmarks.harness.page import bullets, describe_machine, median_of, table, write_results
from benchmarks.harness.process import BenchmarkError
from training.errors import report_errors

_ALL: Final = "all"
_TEXTS_PER_LABEL: Final = ("8", "16", _ALL)
_BUDGETS: Final = ("60s", "6m")
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.banking77 --train banking77/train.csv --test banking77/test.csv
  python -m benchmarks.banking77 --train train.csv --test test.csv --texts 8 --budgets --rounds 1
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """The result of one training run."""

    seconds: float
    accuracy: float


@dataclass(kw_only=True, slots=True)
class _Case:
    """A way to train, and its result in each round.

    Attributes:
        texts: texts per label, or "all".
        options: options of `albert-serve finetune`, or None for TF-IDF.
    """

    texts: str
    options: Sequence[str] | None
    runs: list[_Result] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name in the table."""
        if self.options is None:
            return "TF-IDF, logistic regression"
        return f"`{' '.join(self.options)}`" if self.options else "no options"

    def cells(self) -> list[str]:
        """Return the row of the table."""
        seconds = median_of([run.seconds for run in self.runs], digits=0)
        accuracy = median_of([100 * run.accuracy for run in self.runs])
        return [self.name, self.texts, seconds, accuracy]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    machine: Sequence[str]
    cases: Sequence[_Case]

    def markdown(self) -> str:
        """Return the table and the description of the machine."""
        rows = [case.cells() for case in self.cases if case.runs]
        headings = ["", "texts per label", "seconds", "accuracy, %"]
        return f"{bullets(self.machine)}\n\n{table(headings, rows)}\n"


def _run(options: argparse.Namespace) -> int:
    options.output.mkdir(parents=True, exist_ok=True)
    revision = sha256_of(shipped_bundle() / WEIGHTS_FILE)[:8]
    model = f"from the default model ({revision})"
    machine = [*describe_machine(num_usable_cpus()), model]
    report = _Report(machine=machine, cases=[*_cases(options)])
    for number in range(options.rounds):
        for case in tqdm(report.cases, f"round {number}", disable=None):
            train = _draw(options.train, case.texts, number, options.output)
            if case.options is None:
                case.runs.append(_tf_idf(train, options.test))
            else:
                words = ["--seed", str(number), *case.options]
                case.runs.append(_finetune(train, options.test, words, options.output))
            write_results(options.output, report, report.markdown())
    print(report.markdown())
    return 0


def _cases(options: argparse.Namespace) -> Iterator[_Case]:
    for texts in options.texts:
        yield _Case(texts=texts, options=["--head-only"])
        if texts != _ALL:
            yield _Case(texts=texts, options=[])
        yield _Case(texts=texts, options=None)
    yield from (_Case(texts=_ALL, options=["--budget", budget]) for budget in options.budgets)


def _draw(file: Path, texts: str, seed: int, folder: Path) -> Path:
    """Write a file with this number of texts per label, in random order."""
    frame = pd.read_csv(file)
    if texts != _ALL:
        frame = frame.sample(frac=1, random_state=seed).groupby("category").head(int(texts))
    target = folder / f"train-{texts}.csv"
    frame.to_csv(target, index=False)
    return target


def _tf_idf(train: Path, test: Path) -> _Result:
    rows, held_out = pd.read_csv(train), pd.read_csv(test)
    began_s = time.monotonic()
    model = make_pipeline(TfidfVectorizer(), LogisticRegression(C=10, max_iter=1000))
    model.fit(rows["text"], rows["category"])
    seconds = time.monotonic() - began_s
    return _Result(seconds=seconds, accuracy=model.score(held_out["text"], held_out["category"]))


def _finetune(train: Path, test: Path, options: Sequence[str], folder: Path) -> _Result:
    """Train in a new folder. The seconds include startup and validation."""
    run, metrics = folder / "run", folder / "metrics.json"
    shutil.rmtree(run, ignore_errors=True)
    began_s = time.monotonic()
    _call("finetune", "--text-classification", train, *options, "--output", run)
    seconds = time.monotonic() - began_s
    _call("evaluate", run / "best", "--text-classification", test, "--output", metrics)
    found = json.loads(metrics.read_text(encoding="utf-8"))
    return _Result(seconds=seconds, accuracy=found["text_classification_accuracy"])


def _call(*words: str | Path) -> None:
    command = [sys.executable, "-m", "albert_serve", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise BenchmarkError(f"`{' '.join(command)}` failed: {ended.stderr[-500:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m benchmarks.banking77", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--train", type=Path, required=True, help="CSV with columns text and category")
    add("--test", type=Path, required=True, help="CSV with columns text and category")
    add(
        "--texts",
        nargs="+",
        choices=_TEXTS_PER_LABEL,
        default=_TEXTS_PER_LABEL,
        help="texts per label (default: all choices)",
    )
    add(
        "--budgets",
        nargs="*",
        metavar="TIME",
        default=_BUDGETS,
        help="training times on all texts (default: 60s 6m)",
    )
    add("--rounds", type=int, default=3, help="runs per row (default: %(default)s)")
    add(
        "--output",
        type=Path,
        default=Path("runs/bench-banking77"),
        help="folder of the results (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
