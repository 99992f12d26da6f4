"""An export, by its configuration.

exported = export(ExportConfig(checkpoint="runs/mine/best", bundle="bundles/mine"))
with AlbertClient.local(exported.bundle.folder) as albert:
    ...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from albert_serve.bundle.manifest import ComputePrecision, Part, Precision, Quality
from albert_serve.bundle.weights import TaskName
from export.bundle import ExportResult, Limits, export_bundle
from export.errors import ExportError
from export.examples import read_examples
from export.source import read_json_object
from training.data.labelled.folders import RACE, labelled_files
from training.evaluation.real_text import DEFAULT_TEXT, RealData
from training.glue.files import dev_files
from training.glue.tasks import TASKS
from training.options.flags import flag
from training.options.labelled import ENTITIES_HELP, LabelledTexts, with_task_data
from training.options.values import Duration, Finite

_WIDTH: Final = 24  # the least width of the first column of the summary


@dataclass(frozen=True, kw_only=True)
class ExportConfig(LabelledTexts, Limits, title="export"):
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
    text: tuple[Path, ...] = flag("a corpus (an excerpt of Wikipedia)", (), metavar="FILE")
    question_answering: tuple[Path, ...] = flag("SQuAD's JSON", (), metavar="FILE")
    token_classification: tuple[Path, ...] = flag(ENTITIES_HELP, (), metavar="FILE")
    quality: bool = flag("compare each task with torch on real data", True)
    quality_budget: Duration = flag(
        "time for measuring it, such as 90s or 5m, after which less of the data is used (10m)",
        600.0,
        metavar="TIME",
    )
    evaluation: Path | None = flag("results to put into the manifest", metavar="FILE.json")
    null_score_diff_threshold: Finite | None = flag(
        "the service's default for questions: by how much the logit of no answer must be over that "
        "of the best answer to win (question_answering_best_f1_threshold of the evaluation)",
        metavar="LOGITS",
    )
    examples: Path | None = flag(
        "examples for the service's page: for each task a list of inputs, as in "
        "albert_serve/web/examples.json",
        metavar="FILE.json",
    )
    overwrite: bool = flag("replace the bundle that is at BUNDLE_DIR", False)


def export(config: ExportConfig) -> ExportResult:
    """Write a checkpoint as a bundle, measured on real data.

    Raises:
        ExportError, TrainingError, AlbertServeError, OSError: as `export_bundle`, or data cannot be
            read.
    """
    return export_bundle(
        config.checkpoint,
        Path(config.bundle),
        tasks=config.tasks,
        precision=config.precision,
        kept_fp32=config.keep_fp32,
        cuda_precision=config.cuda_precision,
        data=_real_data(config) if config.quality else None,
        quality_budget_s=config.quality_budget,
        limits=config,
        evaluation=_read_evaluation(config.evaluation),
        null_score_diff_threshold=config.null_score_diff_threshold,
        examples=read_examples(config.examples) if config.examples else None,
        overwrite=config.overwrite,
    )


def report(exported: ExportResult) -> None:
    """Print the files, the measurements and the tasks that were left out."""
    if exported.unused:
        listed = ", ".join(exported.unused)
        print(f"warning: no task reads these weights of the file: {listed}", file=sys.stderr)
    for task, why in exported.left_out.items():
        print(f"{task} is left out: {why}", file=sys.stderr)
    if not exported.bundle.manifest.tasks:
        print("the bundle has no head: it answers embeddings only", file=sys.stderr)
    print(_summarize(exported))


def _summarize(exported: ExportResult) -> str:
    """Sizes and differences, for people."""
    manifest = exported.bundle.manifest
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    graphs = sum(size for name, size in sizes.items() if name.endswith(".onnx"))
    total = sum(sizes.values())
    share = total / exported.fp32_bytes
    width = max(_WIDTH, *map(len, (*sizes, *manifest.parity)))
    return "\n".join(
        [
            f"{exported.bundle.folder} ({manifest.precision})",
            *(f"  {name:<{width}} {size:>14,} bytes" for name, size in sizes.items()),
            f"  {'graphs':<{width}} {graphs:>14,} bytes, which hold no weight",
            f"  {'all':<{width}} {total:>14,} bytes, {share:.3f} of fp32 weights",
            "largest difference from torch, over the largest value",
            *(f"  {name:<{width}} {value:>14.1e}" for name, value in manifest.parity.items()),
            f"for CUDA in {manifest.cuda_precision}, emulated, over the largest value",
            *(f"  {name:<{width}} {value:>14.1e}" for name, value in manifest.cuda_parity.items()),
            *_summarize_quality(manifest.head_quality, width),
        ]
    )


def _summarize_quality(quality: Mapping[str, Quality], width: int) -> Iterator[str]:
    if quality:
        yield "on real text, in percent: in torch, from the bundle"
    for task, measured in quality.items():
        figures = f"{measured.torch:.2f} {measured.bundle:.2f}"
        yield f"  {task:<{width}} {figures:>14} {measured.metric} ({measured.count:,})"


def _real_data(config: ExportConfig) -> RealData:
    if config.task == RACE:
        raise ExportError("--task RACE is multiple choice, which is not served. Leave it out")
    config = with_task_data(config)
    return replace(
        _labelled_data(config),
        text=config.text or (DEFAULT_TEXT,),
        questions=config.question_answering,
        tagged=config.token_classification,
        heads={
            head.head: _labelled_data(head)
            for head in map(with_task_data, config.heads)
            if head.head is not None
        },
    )


def _labelled_data(data: LabelledTexts) -> RealData:
    """Return the labelled texts of a classifier."""
    task = TASKS.get(data.task or "")
    if task is None or data.data is None:
        labelled = labelled_files(data.text_classification, "test", "validation")
    else:
        labelled = [file for files in dev_files(task, data.data).values() for file in files]
    return RealData(text=(), labelled=tuple(labelled), columns=data.columns, task=task)


def _read_evaluation(file: Path | None) -> dict[str, object]:
    if file is None:
        return {}
    if not file.is_file():
        raise ExportError(f"--evaluation {file} is not there")
    return read_json_object(file)
