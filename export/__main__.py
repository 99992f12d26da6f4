"""The command line: `python -m export CHECKPOINT BUNDLE_DIR`."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, get_args

from albert_serve.bundle.manifest import ComputePrecision, Part, Precision, Quality
from export.errors import ExportError
from export.examples import read_examples
from export.source import read_json_object
from export.write import Exported, LayerOptions, Limits, export_bundle
from training.conversion.source import REFERENCE_HELP
from training.data.labelled.folders import labelled_files
from training.data.labelled.race import RACE, race_files
from training.errors import report_errors
from training.evaluation.real_text import DEFAULT_TEXT, RealData
from training.glue.files import dev_files
from training.glue.tasks import TASKS
from training.run.heads import add_heads, each_head, head_parser, parse_with_heads
from training.run.options import (
    add_choices,
    add_columns,
    add_task,
    columns_of,
    parse_count,
    parse_duration,
    parse_finite,
    with_task_data,
)
from training.system.command_line import make_parser

_WIDTH: Final = 24  # of the first column of the summary
_EXAMPLES: Final = """\
examples:
  python -m export runs/base/checkpoint models/base
  python -m export runs/base/checkpoint models/base-int8 --precision int8 \\
      --text-classification sst2/dev.tsv --question-answering squad/dev-v1.1.json
  python -m export runs/both/best bundles/both --precision int8 \\
      --text-classification sst2/dev.tsv --head topic --text-classification news/test.csv
  python -m export albert/albert-base-v2 bundles/base
  python -m export textattack/albert-base-v2-SST-2@main bundles/sst2 --precision int8 \\
      --keep-fp32 embeddings heads
  python -m export albert_base/ bundles/base

CHECKPOINT is a folder, or a model of the Hugging Face Hub: one of ours, one that transformers
wrote, or what Google published (albert_config.json, model.ckpt-best.*, 30k-clean.model). Its
evaluation.json and training.json go into the bundle's manifest. BUNDLE_DIR appears whole or not
at all.

Each task is run on real text in torch and from the bundle, and both figures go into the manifest.
Give a task's own held-out data for its own metric; without, it is how often the two agree.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = parse_with_heads(_parser(), head_parser(), arguments)
    return report_errors(lambda: _run(options), Path(f"{options.bundle}.errors.txt"))


def _run(options: argparse.Namespace) -> int:
    evaluation = _read_evaluation(options.evaluation)
    exported = export_bundle(
        options.checkpoint,
        options.bundle,
        precision=options.precision,
        kept_fp32=options.keep_fp32,
        cuda_precision=options.cuda_precision,
        data=_real_data(options),
        quality_budget_s=options.quality_budget,
        limits=Limits(
            max_difference=options.max_difference,
            max_cuda_difference=options.max_cuda_difference,
            max_cost=options.max_cost,
            forced=options.force,
        ),
        evaluation=evaluation,
        null_score_diff_threshold=options.null_score_diff_threshold,
        layers=LayerOptions(
            num_layers=options.layers,
            max_layers=options.max_layers,
            patience=options.patience,
        ),
        examples=read_examples(options.examples) if options.examples else None,
        overwrite=options.overwrite,
    )
    if exported.unused:
        listed = ", ".join(exported.unused)
        print(f"warning: no task reads these weights of the file: {listed}", file=sys.stderr)
    print(summarize(exported))
    return 0


def summarize(exported: Exported) -> str:
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
            "largest difference from torch",
            *(f"  {name:<{width}} {value:>14.1e}" for name, value in manifest.parity.items()),
            f"for CUDA in {manifest.cuda_precision}, emulated, over the largest value",
            *(f"  {name:<{width}} {value:>14.1e}" for name, value in manifest.cuda_parity.items()),
            *_summarize_quality(manifest.head_quality, width),
        ]
    )


def _summarize_quality(quality: Mapping[str, Quality], width: int) -> Iterator[str]:
    if quality:
        yield "on real text, in percent: in torch, from the bundle"
    for task, found in quality.items():
        figures = f"{found.torch:.2f} {found.bundle:.2f}"
        yield f"  {task:<{width}} {figures:>14} {found.metric} ({found.count:,})"


def _real_data(options: argparse.Namespace) -> RealData | None:
    if options.no_quality:
        return None
    options = with_task_data(options)
    choices = options.multiple_choice or []
    if options.task == RACE:
        choices = race_files(options.data, "dev")
    return replace(
        _labelled_data(options),
        text=tuple(options.text or [DEFAULT_TEXT]),
        questions=tuple(options.question_answering),
        choices=tuple(choices),
        choice_columns=tuple(options.choice_columns),
        heads={own.head: _labelled_data(own) for own in each_head(options)},
    )


def _labelled_data(options: argparse.Namespace) -> RealData:
    """Return the labelled texts of a classifier."""
    task = TASKS.get(options.task)
    if task is None:
        labelled = labelled_files(options.text_classification, "test", "validation")
    else:
        labelled = [file for files in dev_files(task, options.data).values() for file in files]
    return RealData(text=(), labelled=tuple(labelled), columns=columns_of(options), task=task)


def _read_evaluation(file: Path | None) -> dict[str, object]:
    if file is None:
        return {}
    if not file.is_file():
        raise ExportError(f"--evaluation {file} is not there")
    return read_json_object(file)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "export", "Write an ALBERT checkpoint as the bundle that albert-serve opens.", _EXAMPLES
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=REFERENCE_HELP)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE_DIR")
    add = parser.add_argument
    add(
        "--precision",
        choices=get_args(Precision),
        default="fp32",
        help="fp32: the checkpoint's own file; int8: a quarter of it, and the fastest on CPUs; "
        "fp16: half of it on disk, fp32 in memory (%(default)s)",
    )
    add(
        "--keep-fp32",
        nargs="+",
        choices=get_args(Part),
        default=[],
        help="parts that stay fp32",
        metavar="PART",
    )
    add(
        "--cuda-precision",
        choices=get_args(ComputePrecision),
        default="fp16",
        help="the type that the encoder computes in on a GPU; fp16 and bf16 are as fast, bf16 has "
        "the range of fp32 and an eighth of fp16's exactness (%(default)s)",
    )
    depth = parser.add_argument_group("depth")
    depth.add_argument(
        "--layers",
        type=parse_count,
        metavar="NUMBER",
        help="apply only so many layers of a model whose layers share all weights; what that costs "
        "is measured against all of them",
    )
    depth.add_argument(
        "--max-layers",
        type=parse_count,
        metavar="NUMBER",
        help="the service's default for a classifier that was trained with --adaptive-depth: "
        "answer a text after so many layers at the latest (all)",
    )
    depth.add_argument(
        "--patience",
        type=parse_count,
        metavar="NUMBER",
        help="the same: answer it as soon as so many layers in a row give the label of the layer "
        "before them (never)",
    )
    data = parser.add_argument_group("real data")
    add_data = functools.partial(data.add_argument, nargs="+", type=Path, metavar="FILE")
    add_data("--text", help="a corpus (an excerpt of Wikipedia)")
    add_data("--text-classification", default=[], help="labelled CSV, TSV, JSONL or Parquet")
    add_heads(data)
    add_task(data)
    add_columns(data)
    add_choices(data)
    add_data("--question-answering", default=[], help="SQuAD's JSON")
    data.add_argument("--no-quality", action="store_true", help="do not measure it")
    data.add_argument(
        "--quality-budget",
        type=parse_duration,
        default="10m",
        metavar="TIME",
        help="time for measuring it, such as 90s or 5m, after which less of the data is used "
        "(%(default)s)",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-cost",
        type=float,
        default=1.0,
        metavar="POINTS",
        help="most points of a task's metric that precision and depth may cost (%(default)s)",
    )
    limits.add_argument(
        "--max-difference",
        type=float,
        default=1e-4,
        help="largest absolute difference from torch that is let through in fp32 (%(default)s)",
    )
    limits.add_argument(
        "--max-cuda-difference",
        type=float,
        help="largest difference from torch on a GPU, emulated, as a share of the largest value "
        "(fp32 1e-4, fp16 0.06, bf16 0.3)",
        metavar="SHARE",
    )
    limits.add_argument("--force", action="store_true", help="let through what costs more")
    add("--evaluation", type=Path, metavar="FILE.json", help="results to put into the manifest")
    add(
        "--null-score-diff-threshold",
        type=parse_finite,
        metavar="LOGITS",
        help="the service's default for questions: by how much the logit of no answer must be over "
        "that of the best answer to win (question_answering_best_f1_threshold of the evaluation)",
    )
    add(
        "--examples",
        type=Path,
        metavar="FILE.json",
        help="examples for the service's page: for each task a list of inputs, as in "
        "albert_serve/web/examples.json",
    )
    add("--overwrite", action="store_true", help="replace the bundle that is at BUNDLE_DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
