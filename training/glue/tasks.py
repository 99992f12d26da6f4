"""The tasks of GLUE: names of files and columns, labels, and the official metric of each.

Wang et al. 2019, https://gluebenchmark.com/tasks. The columns are in the official archives, and
in the original MRPC and STS benchmark. Diagnostics (AX) is omitted: it has no training data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from albert_serve.bundle.manifest import ProblemType
from training.data.labelled.columns import Columns

# `f1` is the F1 of label 1 of two, and `macro_f1` the mean F1 over all labels. For texts with
# several labels, `micro_f1` is the F1 over all labels of all texts, and `subset_accuracy` is the
# fraction of texts whose labels are all correct.
Metric: TypeAlias = Literal[
    "accuracy",
    "f1",
    "macro_f1",
    "micro_f1",
    "subset_accuracy",
    "matthews_correlation",
    "pearson",
    "spearman",
    "mse",
]
# Every task has one held-out split, except MNLI, which has two.
_ONLY_DEV: Final = "dev"


@dataclass(frozen=True, kw_only=True, slots=True)
class GlueTask:
    """A task of GLUE.

    Attributes:
        title: name in tables of the literature.
        columns: columns of the task's files, which may be the official ones or the Hub's.
        labels: names of the labels 0, 1, and so on, which the files contain by name or number.
            Empty for a regression.
        scale: range of a regression's scores.
        metrics: official metrics. The mean of several metrics is the task's score.
        train: patterns of the training files' names. The first pattern with a file is used.
        dev: patterns of the file names of each held-out split.
        test: patterns of the file names of each split without labels.
        submitted: whether the files for GLUE's server contain label names or numbers.
    """

    title: str
    columns: Columns
    labels: tuple[str, ...] = ()
    scale: tuple[float, float] | None = None
    metrics: tuple[Metric, ...] = ("accuracy",)
    train: tuple[str, ...] = ("train.tsv", "train.part*.tsv")
    dev: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: MappingProxyType({_ONLY_DEV: ("dev.tsv",)})
    )
    test: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: MappingProxyType({"test": ("test.tsv", "test-*.parquet")})
    )
    submitted: Literal["names", "numbers"] = "numbers"

    @property
    def problem(self) -> ProblemType:
        """Kind of the task's labels."""
        return "single_label_classification" if self.scale is None else "regression"


_SINGLE: Final = Columns(delimiter="\t")
_PAIRS: Final = Columns(delimiter="\t", needs_pair=True)
_SENTENCES: Final = replace(_PAIRS, headerless=("index", "sentence1", "sentence2", "label"))
_ENTAILMENT: Final = ("entailment", "not_entailment")

TASKS: Final[Mapping[str, GlueTask]] = MappingProxyType(
    {
        "cola": GlueTask(
            title="CoLA",
            columns=replace(_SINGLE, headerless=("source", "label", "original_label", "sentence")),
            labels=("unacceptable", "acceptable"),
            metrics=("matthews_correlation",),
        ),
        "sst2": GlueTask(title="SST-2", columns=_SINGLE, labels=("negative", "positive")),
        "mrpc": GlueTask(
            title="MRPC",
            columns=_PAIRS,
            labels=("not_equivalent", "equivalent"),
            metrics=("f1", "accuracy"),
            train=("train.tsv", "msr_paraphrase_train.txt"),
            dev={_ONLY_DEV: ("dev.tsv", "msr_paraphrase_test.txt")},
        ),
        "stsb": GlueTask(
            title="STS-B",
            columns=replace(
                _PAIRS,
                # Some rows end with two more columns, the sources.
                headerless=(
                    *("genre", "filename", "year", "old_index", "score"),
                    *("sentence1", "sentence2", "source1", "source2"),
                ),
            ),
            scale=(0, 5),
            metrics=("pearson", "spearman"),
            train=("train.tsv", "sts-train.tsv"),
            dev={_ONLY_DEV: ("dev.tsv", "sts-dev.tsv")},
        ),
        "qqp": GlueTask(
            title="QQP",
            columns=_PAIRS,
            labels=("not_duplicate", "duplicate"),
            metrics=("f1", "accuracy"),
        ),
        "mnli": GlueTask(
            title="MNLI",
            columns=_PAIRS,
            labels=("entailment", "neutral", "contradiction"),
            dev={"matched": ("dev_matched.tsv",), "mismatched": ("dev_mismatched.tsv",)},
            test={
                split: (f"test_{split}.tsv", f"test_{split}-*.parquet")
                for split in ("matched", "mismatched")
            },
            submitted="names",
        ),
        "qnli": GlueTask(
            title="QNLI",
            columns=replace(_PAIRS, headerless=("index", "question", "sentence", "label")),
            labels=_ENTAILMENT,
            submitted="names",
        ),
        "rte": GlueTask(
            title="RTE",
            columns=_SENTENCES,
            labels=_ENTAILMENT,
            submitted="names",
        ),
        "wnli": GlueTask(
            title="WNLI",
            columns=_SENTENCES,
            labels=("not_entailment", "entailment"),
        ),
    }
)


def task_name(text: str) -> str:
    """Return the key of a task from its name in the literature, such as `SST-2`."""
    name = text.lower().replace("-", "").replace("_", "")
    if name not in TASKS:
        raise ValueError(f"{text!r} is not a task.")
    return name
