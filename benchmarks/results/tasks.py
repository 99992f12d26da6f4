"""The tasks: their files, the options of training and evaluation, and published figures.

Those of BERT-Mini (11 million parameters) are of GLUE's test files, from its model card
(https://huggingface.co/google/bert_uncased_L-4_H-256_A-4). Those of ALBERT-base v2 are of its
authors' README, those of xxlarge of table 9 of the paper (arXiv 1909.11942), which has none of base
for these tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

from benchmarks.harness.process import BenchmarkError

# The patterns of the files that an option takes.
_Files: TypeAlias = Mapping[str, Sequence[str]]
_TAB: Final = ("--delimiter", "\t")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure of a task.

    Attributes:
        title: of the metric.
        key: its name in `evaluation.json`.
        mini: the figure of BERT-Mini, as the table shows it.
        paper: that of a published ALBERT.
        unit: the value of one point: 0.01 of parts of 1, 1 of percents.
    """

    title: str
    key: str
    mini: str = ""
    paper: str = ""
    unit: float = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """An evaluation of a trained checkpoint.

    Attributes:
        title: of the row.
        files: held-out files, in the folder of the task.
        options: further ones of `albert-serve evaluate`.
    """

    title: str
    figures: tuple[Figure, ...]
    files: _Files = field(default_factory=lambda: MappingProxyType({}))
    options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultTask:
    """A task: its training and its figures.

    Attributes:
        folder: in the data folder.
        options: of `albert-serve finetune` that are not the defaults, without those of its files.
        files: those of training, with those of validation if there are any; none of a task that
            --task knows.
        note: for the reader of the table.
    """

    folder: str
    measures: tuple[Measure, ...]
    options: tuple[str, ...] = ()
    files: _Files = field(default_factory=lambda: MappingProxyType({}))
    note: str = ""

    def training(self, data: Path, unanswerable: Path) -> list[str]:
        """Return the options of training on the files in a data folder.

        Args:
            unanswerable: questions without an answer, made of those that are trained on, if any.

        Raises:
            BenchmarkError: files are missing.
        """
        if not (data / self.folder).is_dir():
            raise _lacking(data / self.folder)
        files = _options(data / self.folder, self.files)
        if self.questions(data):
            files.append(str(unanswerable))
        return [*files, *self._named(data), *self.options]

    def questions(self, data: Path) -> list[str]:
        """Return the files of questions that are trained on; raises as `training`."""
        patterns = {"--question-answering": self.files.get("--question-answering", ())}
        return _options(data / self.folder, patterns)[1:]

    def evaluation(self, measure: Measure, data: Path) -> list[str]:
        """Return the options of an evaluation; raises as `training`."""
        files = _options(data / self.folder, measure.files)
        return [*files, *self._named(data), *measure.options]

    def _named(self, data: Path) -> list[str]:
        """Return the folder of a task whose files --task knows."""
        return [] if self.files else ["--data", str(data / self.folder)]


def _options(folder: Path, files: _Files) -> list[str]:
    options: list[str] = []
    for option, patterns in files.items():
        options.append(option)
        for pattern in patterns:
            matching = sorted(folder.glob(pattern))
            if not matching:
                raise _lacking(folder / pattern)
            options += map(str, matching)
    return options


def _lacking(path: Path) -> BenchmarkError:
    return BenchmarkError(
        f"there is no {path}; --data is a folder with a folder for each task, such as "
        "sst2/train.tsv, and --tasks leaves tasks out"
    )


def _glue(title: str, *figures: Figure, options: Sequence[str] = (), note: str = "") -> ResultTask:
    name = ("--task", title)
    return ResultTask(
        folder=title.lower().replace("-", ""),
        measures=(Measure(title=title, figures=figures, options=name),),
        options=(*name, *options),
        note=note,
    )


def _text(title: str, name: str, *, mini: str = "", paper: str = "") -> Figure:
    return Figure(title=title, key=f"text_classification_{name}", mini=mini, paper=paper)


def _answer(title: str, name: str, paper: str) -> Figure:
    return Figure(title=title, key=f"question_answering_{name}", paper=paper, unit=1)


# At the default rate a few thousand texts undo the fitted classifier before they teach anything,
# and a run of minutes may undo a head that the checkpoint has.
_LOW_RATE: Final = ("--lr", "5e-5")

# The tasks are sorted by size, the smallest first.
RESULT_TASKS: Final[Mapping[str, ResultTask]] = MappingProxyType(
    {
        "cola": _glue(
            "CoLA",
            _text(
                "Matthews' correlation",
                "matthews_correlation",
                mini="0.0",
                paper="71.4 (xxlarge)",
            ),
            options=(*_LOW_RATE, "--epochs", "4"),
        ),
        "rte": _glue(
            "RTE",
            _text("accuracy", "accuracy", mini="57.9", paper="89.2 (xxlarge)"),
            options=(*_LOW_RATE, "--epochs", "3"),
        ),
        "mrpc": _glue(
            "MRPC",
            _text("F1", "f1", mini="81.1"),
            _text("accuracy", "accuracy", mini="71.8", paper="90.9 (xxlarge)"),
            options=(*_LOW_RATE, "--epochs", "2"),
            note="Measured on the original test file; the paper's figure is of GLUE's dev file.",
        ),
        "stsb": ResultTask(
            folder="stsb",
            files={"--embeddings": ["sts-train.tsv"]},
            measures=(
                Measure(
                    title="STS-B",
                    figures=(
                        Figure(
                            title="Pearson's correlation",
                            key="embeddings_pearson",
                            mini="75.4",
                            paper="93.0 (xxlarge)",
                        ),
                        Figure(
                            title="Spearman's correlation", key="embeddings_spearman", mini="73.3"
                        ),
                    ),
                    files={"--similarity": ["sts-dev.tsv"]},
                ),
            ),
            options=("--epochs", "1"),
            note="The cosine of two sentence vectors; the published models read both sentences "
            "together.",
        ),
        "sick": ResultTask(
            folder="sick",
            files={
                "--text-classification": ["SICK_train.txt"],
                "--validation": ["SICK_trial.txt"],
            },
            measures=(
                Measure(
                    title="SICK, entailment",
                    figures=(_text("accuracy", "accuracy", paper="84.6 on MNLI (base v2)"),),
                    files={"--text-classification": ["SICK_test_annotated.txt"]},
                    options=_TAB,
                ),
            ),
            options=(*_TAB, *_LOW_RATE, "--epochs", "3"),
            note="Three-way entailment; the paper has MNLI, which is a larger and harder task.",
        ),
        "banking77": ResultTask(
            folder="banking77",
            files={"--text-classification": ["train.csv"]},
            measures=(
                Measure(
                    title="Banking77",
                    figures=(_text("accuracy", "accuracy"), _text("macro-F1", "macro_f1")),
                    files={"--text-classification": ["test.csv"]},
                ),
            ),
        ),
        "sst2": _glue(
            "SST-2",
            _text("accuracy", "accuracy", mini="85.9", paper="92.9 (base v2)"),
            options=(*_LOW_RATE, "--steps", "600"),
        ),
        "squad": ResultTask(
            folder="squad",
            files={"--question-answering": ("train-v1.1.json*", "squadshifts-new_wiki.json*")},
            measures=(
                Measure(
                    title="SQuAD 1.1",
                    figures=(
                        _answer("F1", "f1", "90.2 (base v2)"),
                        _answer("exact match", "exact_match", "83.2 (base v2)"),
                    ),
                    files={"--question-answering": ["dev-v1.1.json*"]},
                ),
                Measure(
                    title="SQuAD 2.0",
                    figures=(
                        _answer("best F1", "best_f1", "82.1 (base v2)"),
                        _answer("best exact match", "best_exact_match", "79.3 (base v2)"),
                    ),
                    files={"--question-answering": ["dev-v2.0.json*"]},
                ),
            ),
            options=(*_LOW_RATE, "--batch-size", "16", "--steps", "120"),
            note="Trained on questions of SQuAD 1.1 and of New Wikipedia (SQuADShifts), and on "
            "questions without an answer that `python -m recipes.albert_small_en.unanswerable` "
            "makes of them; the figures of 2.0 are those of the best thresholds.",
        ),
    }
)
