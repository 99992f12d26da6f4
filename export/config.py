"""Configuration of an export, by the names of the command's flags, and its error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from albert_serve.bundle.manifest import ComputePrecision, Part, Precision
from albert_serve.bundle.weights import TaskName
from training.errors import TrainingError
from training.options.flags import flag
from training.options.labelled import ENTITIES_HELP, LabelledTexts
from training.options.values import Finite


class ExportError(TrainingError):
    """A checkpoint that cannot be exported, or a bundle that is worse than its checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig(LabelledTexts, title="export"):
    """A checkpoint, the bundle to write, and the data on which it is measured.

    Attributes:
        checkpoint: a folder, or a model of the Hugging Face Hub.
        heads: the data of further classifiers.
    """

    checkpoint: str | Path
    bundle: str | Path
    heads: tuple[LabelledTexts, ...] = ()
    tasks: tuple[TaskName, ...] = flag(
        "the tasks to export (those that the last training run trained, or that there is data for "
        "here; all if the checkpoint does not say what was trained)",
        (),
        metavar="TASK",
    )
    precision: Precision = flag(
        "fp32: the checkpoint's own file; int8: a quarter of the size, fastest on CPUs; fp16: half "
        "of the size on disk, fp32 in memory",
        "fp32",
    )
    keep_fp32: tuple[Part, ...] = flag("parts that stay fp32", (), metavar="PART")
    cuda_precision: ComputePrecision = flag(
        "the type that the encoder computes in on a GPU; fp16 and bf16 are as fast, bf16 has the "
        "range of fp32 and an eighth of fp16's exactness",
        "fp16",
    )
    question_answering: tuple[Path, ...] = flag("SQuAD's JSON", (), metavar="FILE")
    token_classification: tuple[Path, ...] = flag(ENTITIES_HELP, (), metavar="FILE")
    text: tuple[Path, ...] = flag(
        "texts without labels, of which the first 100 lines show how much the answers of heads "
        "without labelled data differ from torch's (an excerpt of Wikipedia)",
        (),
        metavar="FILE",
    )
    quality: bool = flag("compare each task with torch on these texts", True)
    max_cost: Finite = flag(
        "maximum loss of a task's metric in points, by precision; only significant losses count",
        1.0,
        metavar="POINTS",
    )
    max_difference: Finite = flag(
        "largest difference from torch in fp32, as a share of the largest value",
        1e-4,
        metavar="SHARE",
    )
    max_cuda_difference: Finite | None = flag(
        "largest difference from torch on a GPU, emulated, as a share of the largest value (fp32 "
        "1e-4, fp16 0.06, bf16 0.3)",
        metavar="SHARE",
    )
    force: bool = flag("write the bundle even if a task loses more, or differs too much", False)
    evaluation: Path | None = flag("results to put into the manifest", metavar="FILE.json")
    null_score_diff_threshold: Finite | None = flag(
        "the service's default for questions: by how much the logit of no answer must be over that "
        "of the best answer to win (question_answering_best_f1_threshold of --evaluation, or the "
        "bundle's that is exported again, or that of the checkpoint's evaluation)",
        metavar="LOGITS",
    )
    examples: Path | None = flag(
        "examples for the service's page: for each task a list of inputs, as in "
        "albert_serve/web/examples.json (those of the bundle that is exported again)",
        metavar="FILE.json",
    )
    overwrite: bool = flag("replace the bundle that is at BUNDLE_DIR", False)
