"""Configuration of an export, whose fields are the command's options, and the export error."""

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
        checkpoint: folder of a checkpoint, or model on the Hugging Face Hub.
        bundle: folder of the bundle to write.
        heads: labelled data of named classifiers.
    """

    checkpoint: str | Path
    bundle: str | Path
    heads: tuple[LabelledTexts, ...] = ()
    tasks: tuple[TaskName, ...] = flag(
        "tasks to export (default: the tasks of the last training run, and the tasks with data in "
        "this command; all if the checkpoint has no record of its training)",
        (),
        metavar="TASK",
    )
    precision: Precision = flag(
        "precision. fp32: the checkpoint's own file; int8: a quarter of the size, fastest on "
        "CPUs; fp16: half of the size on disk, fp32 in memory",
        "fp32",
    )
    keep_fp32: tuple[Part, ...] = flag(
        "modules that stay in fp32: embeddings, attention, ffn, heads", (), metavar="PART"
    )
    cuda_precision: ComputePrecision = flag(
        "precision of the encoder on a GPU; bf16 has the range of fp32 and an eighth of the "
        "precision of fp16",
        "fp16",
    )
    question_answering: tuple[Path, ...] = flag(
        "question answering: files in SQuAD's format", (), metavar="FILE"
    )
    token_classification: tuple[Path, ...] = flag(ENTITIES_HELP, (), metavar="FILE")
    text: tuple[Path, ...] = flag(
        "texts without labels; their first 100 lines show how much the answers of heads without"
        " labelled data differ from torch (default: an excerpt of Wikipedia)",
        (),
        metavar="FILE",
    )
    quality: bool = flag("compare each task with torch (default: compare)", True)
    max_cost: Finite = flag(
        "maximum loss of a task's metric in points; only significant losses count",
        1.0,
        metavar="POINTS",
    )
    max_difference: Finite = flag(
        "maximum difference from torch in fp32, as a fraction of the largest value",
        1e-4,
        metavar="FRACTION",
    )
    max_cuda_difference: Finite | None = flag(
        "maximum difference of the emulated GPU precision from torch, as a fraction of the "
        "largest value (default: fp32 1e-4, fp16 0.06, bf16 0.3)",
        metavar="FRACTION",
    )
    force: bool = flag("write the bundle even if --max-cost or a difference is exceeded", False)
    evaluation: Path | None = flag(
        "file of results for the manifest (default: evaluation.json of the checkpoint)",
        metavar="FILE.json",
    )
    null_score_diff_threshold: Finite | None = flag(
        'the service\'s default threshold: "no answer" wins if its logit exceeds the best '
        "answer's by more (default: the best threshold of --evaluation, or the threshold of "
        "CHECKPOINT if it is a bundle, or the best threshold of its evaluation.json)",
        metavar="LOGITS",
    )
    examples: Path | None = flag(
        "examples for the service's page: a list of inputs per task, as in "
        "albert_serve/web/examples.json (default: the examples of CHECKPOINT, if it is a bundle)",
        metavar="FILE.json",
    )
    overwrite: bool = flag("replace the bundle at BUNDLE_DIR", False)
