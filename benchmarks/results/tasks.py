"""The tasks: their files, the options of training and evaluation, and the paper's figures.

Figures of ALBERT-base v2 are those of its authors' README; those of xxlarge are of table 9 of the
paper (arXiv 1909.11942), which has none of base for these tasks.
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
        paper: the figure of a published ALBERT, as the table shows it.
        unit: the value of one point: 0.01 of parts of 1, 1 of percents.
    """

    title: str
    key: str
    paper: str = ""
    unit: float = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """An evaluation of a trained checkpoint.

    Attributes:
        title: of the row.
        files: held-out files, in the folder of the task.
        options: further ones of `training.evaluate`.
    """

    title: str
    figures: tuple[Figure, ...]
    files: _Files = field(default_factory=lambda: MappingProxyType({}))
    options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultTask:
    """A task: what is trained, for how long, and what is measured.

    Attributes:
        folder: in the data folder.
        files: those of training, with those of validation if there are any.
        options: of `training.finetune`, without those of its files.
        end: of each run, as options.
        note: for the reader of the table.
    """

    folder: str
    measures: tuple[Measure, ...]
    options: tuple[str, ...]
    end: tuple[str, ...]
    files: _Files = field(default_factory=lambda: MappingProxyType({}))
    note: str = ""

    def training(self, data: Path) -> list[str]:
        """Return the options of training on the files in a data folder.

        Raises:
            BenchmarkError: files are missing.
        """
        if not (data / self.folder).is_dir():
            raise _lacking(data / self.folder)
        return [*_options(data / self.folder, self.files), *self._named(data), *self.options]

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


def _glue(title: str, folder: str, *figures: Figure, epochs: str, note: str = "") -> ResultTask:
    name = ("--task", title)
    return ResultTask(
        folder=folder,
        measures=(Measure(title=title, figures=figures, options=name),),
        options=(*name, *_SETTINGS),
        end=("--epochs", epochs),
        note=note,
    )


def _text(title: str, name: str, paper: str = "") -> Figure:
    return Figure(title=title, key=f"text_classification_{name}", paper=paper)


def _answer(title: str, name: str, paper: str) -> Figure:
    return Figure(title=title, key=f"question_answering_{name}", paper=paper, unit=1)


# A small model wants higher rates than the paper's.
_RATES: Final = ("--optimizer", "adamw", "--lr", "1e-4", "--schedule", "linear", "--warmup", "0.06")
_SETTINGS: Final = (*_RATES, "--length", "128", "--batch-size", "16")
_SST2: Final = ("--task", "SST-2", *_SETTINGS)
_SST2_END: Final = ("--steps", "300", "--validate-every", "300")
_SST2_ACCURACY: Final = _text("accuracy", "accuracy", "92.9 (base v2)")
_SQUAD_TRAIN: Final = ("train-v1.1.json*", "squadshifts-new_wiki.json*")

# The smallest first.
RESULT_TASKS: Final[Mapping[str, ResultTask]] = MappingProxyType(
    {
        "cola": _glue(
            "CoLA",
            "cola",
            _text("Matthews' correlation", "matthews_correlation", "71.4 (xxlarge)"),
            epochs="1",
        ),
        "rte": _glue("RTE", "rte", _text("accuracy", "accuracy", "89.2 (xxlarge)"), epochs="2"),
        "mrpc": _glue(
            "MRPC",
            "mrpc",
            _text("F1", "f1"),
            _text("accuracy", "accuracy", "90.9 (xxlarge)"),
            epochs="1",
            note="Measured on the original test file; the paper's figure is of GLUE's dev file.",
        ),
        "stsb": _glue(
            "STS-B",
            "stsb",
            _text("Pearson's correlation", "pearson", "93.0 (xxlarge)"),
            _text("Spearman's correlation", "spearman"),
            epochs="1",
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
                    figures=(_text("accuracy", "accuracy", "84.6 on MNLI (base v2)"),),
                    files={"--text-classification": ["SICK_test_annotated.txt"]},
                    options=_TAB,
                ),
            ),
            options=(*_TAB, *_SETTINGS),
            end=("--epochs", "1"),
            note="Three-way entailment; the paper has MNLI, which is a larger and harder task.",
        ),
        "banking77": ResultTask(
            folder="banking77",
            files={
                "--text-classification": ["train.csv"],
                "--validation": ["test.csv"],
            },
            measures=(
                Measure(
                    title="Banking77",
                    figures=(_text("accuracy", "accuracy"), _text("macro-F1", "macro_f1")),
                    files={"--text-classification": ["test.csv"]},
                ),
            ),
            options=_SETTINGS,
            end=("--epochs", "2"),
        ),
        "sst2": ResultTask(
            folder="sst2",
            measures=(Measure(title="SST-2", figures=(_SST2_ACCURACY,), options=_SST2[:2]),),
            options=_SST2,
            end=_SST2_END,
        ),
        "sst2-early-exit": ResultTask(
            folder="sst2",
            measures=(
                Measure(
                    title="SST-2, `--adaptive-depth`",
                    figures=(_SST2_ACCURACY,),
                    options=_SST2[:2],
                ),
            ),
            options=(*_SST2, "--adaptive-depth"),
            end=_SST2_END,
            note="The last layer's answers, after the same steps as SST-2.",
        ),
        "squad": ResultTask(
            folder="squad",
            files={"--question-answering": _SQUAD_TRAIN},
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
            options=(*_RATES, "--length", "320", "--batch-size", "16"),
            end=("--steps", "200"),
            note="Trained on questions of SQuAD 1.1 and of New Wikipedia (SQuADShifts), none of "
            "them without an answer, and measured on both dev files; the figures of 2.0 are those "
            "of the best thresholds.",
        ),
        "race": ResultTask(
            folder="race",
            files={
                "--multiple-choice": ["train/middle"],
                "--validation": ["dev/middle"],
            },
            measures=(
                Measure(
                    title="RACE, middle schools",
                    figures=(
                        Figure(
                            title="accuracy",
                            key="multiple_choice_accuracy",
                            paper="66.8 with high schools (base v2)",
                        ),
                    ),
                    files={"--multiple-choice": ["dev/middle"]},
                    options=("--truncation",),
                ),
            ),
            options=(*_RATES, "--length", "256", "--batch-size", "8"),
            end=("--steps", "60", "--validate-every", "60"),
        ),
    }
)
