"""Configuration of a text classifier in a run, and its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

from albert_serve.bundle.manifest import ProblemType
from training.data.labelled.cells import first_spellings
from training.data.labelled.folders import RACE, files_of_split, labelled_files, race_files
from training.data.labelled.rows import collecting, raise_listed
from training.errors import RunError
from training.glue.files import training_files
from training.glue.tasks import TASKS, Metric
from training.options.flags import flag
from training.options.labelled import LabelledTexts
from training.options.values import Parsed, parse_positive

_MetricName = Literal["loss", Metric, "exact_match"]
# LABEL_OPTIONS describe a text classifier's labels. TEXT_OPTIONS also describe its columns.
LABEL_OPTIONS: Final = ("problem_type", "labels", "class_weights")
TEXT_OPTIONS: Final = (
    *LABEL_OPTIONS,
    *("text_column", "pair_column", "label_column", "label_separator", "delimiter"),
)


def _parse_class_weight(text: str) -> str | float:
    """Parse `balanced`, or a number above 0."""
    return text if text == "balanced" else parse_positive(text)


class ClassifierFiles(NamedTuple):
    """The files of a classifier, or of multiple choice."""

    train: Sequence[Path]
    validation: Sequence[Path]


def _race_files(folder: Path, validation: Sequence[Path]) -> ClassifierFiles:
    errors: list[str] = []
    splits: dict[Literal["train", "dev"], Sequence[Path]] = {"train": (), "dev": validation}
    for split, files in splits.items():
        if not files:
            with collecting(errors):
                splits[split] = race_files(folder, split)
    raise_listed(list(dict.fromkeys(errors)))  # both splits report a missing folder
    return ClassifierFiles(splits["train"], splits["dev"])


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(LabelledTexts, title="labelled texts"):
    """The data of a text classifier, and its validation."""

    problem_type: ProblemType | None = flag(
        "kind of the labels: one per text, any number per text, or a number (default: "
        "single_label_classification)"
    )
    labels: tuple[str, ...] = flag(
        "names of the labels 0, 1, ... (default: those in the files, sorted)", ()
    )
    class_weights: tuple[Annotated[str | float, Parsed(_parse_class_weight)], ...] = flag(
        "weights of the labels in the loss, in their order, or `balanced`: by the inverse of "
        "their frequencies (default: 1)",
        (),
        metavar="WEIGHT",
    )
    validation: tuple[Path, ...] = flag(
        "held-out files of text classification or multiple choice, otherwise of question "
        "answering, otherwise of embeddings (pairs with a score); the best checkpoint is stored"
        " as `best` (default with --task: val.tsv if it exists, otherwise its dev files)",
        (),
    )
    metric: _MetricName | None = flag(
        "metric that selects the best checkpoint (default: the task's; with several classifiers, "
        "their mean)"
    )

    def __post_init__(self) -> None:
        """Check that no label is named twice."""
        super().__post_init__()
        if len(first_spellings(self.labels)) < len(self.labels):
            raise RunError(
                f"--labels {' '.join(self.labels)}: two labels differ only in case or outer "
                "spaces. Name each label once."
            )

    @property
    def has_texts(self) -> bool:
        """Whether the run has data for a text classifier."""
        return bool(self.text_classification or self.task in TASKS)

    @cached_property
    def files(self) -> ClassifierFiles:
        """Files of the folders and the task, which are downloaded if necessary."""
        if self.task is not None and self.task_folder is not None:
            if self.task == RACE:
                return _race_files(self.task_folder, self.validation)
            train, held_out = training_files(TASKS[self.task], self.task_folder)
            return ClassifierFiles(train, self.validation or held_out)
        if self.text_classification:
            return ClassifierFiles(
                labelled_files(self.text_classification, "train"), self._held_out_texts
            )
        return ClassifierFiles((), self.validation)

    @property
    def _held_out_texts(self) -> Sequence[Path]:
        """Validation files (default: the validation files in the training folders)."""
        validation = list(self.validation)
        if not validation:
            folders = [path for path in self.text_classification if path.is_dir()]
            validation = [
                file for folder in folders for file in files_of_split(folder, "validation")
            ]
            if validation:
                print(f"Validation uses {', '.join(map(str, validation))}.")
        return labelled_files(validation, "validation") if validation else ()

    @property
    def problem(self) -> ProblemType | None:
        """Kind of the labels, by --task, --problem-type or the columns, or None if undecided."""
        if self.task is not None:
            return TASKS[self.task].problem
        if self.problem_type is None and self.columns.has_several_labels:
            return "multi_label_classification"
        return self.problem_type
