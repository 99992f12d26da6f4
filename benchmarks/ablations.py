"""The paper's ablations at small scale: sharing, embeddings, sentence task, depth and width.

Every model is pretrained on the same number of tokens and measured on the same held-out text.
Writes `runs/` and `ablations.md`, a table for each ablation of the means of all seeds and their
ranges, into the output folder. The same command resumes an ablation that was stopped and repeats
no finished run; with more `--tables` or `--seeds` it adds runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch

from albert_serve.config import Sharing
from albert_serve.files import write_atomically
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.harness.page import table
from benchmarks.harness.process import BenchmarkError
from training.commands import pretrain
from training.conversion.source import open_checkpoint
from training.data.examples import ExampleSettings, SentenceTask
from training.data.masking import NgramMasking
from training.data.shards import Shards
from training.errors import report_errors
from training.evaluation.validation import held_out, measure
from training.loop.progress import is_known_run, record_run
from training.losses import Objective, Tally
from training.model.checkpoint import check_config, load_checkpoint, read_config
from training.model.heads import AlbertForTasks
from training.options.device import add_device
from training.options.values import parse_count, parse_part
from training.system.command_line import make_parser

TableName = Literal["sentence", "sharing", "embedding", "depth", "width"]
_TITLES: Final[dict[TableName, str]] = {
    "sentence": "Sentence task (Table 5)",
    "sharing": "What the layers share (Table 4)",
    "embedding": "Size of the embeddings (Table 3)",
    "depth": "Number of layers (Table 11)",
    "width": "Hidden size (Table 12)",
}
_SHARED: Final[dict[Sharing, str]] = {
    "all": "all shared",
    "attention": "attention shared",
    "ffn": "FFN shared",
    "none": "nothing shared",
}
_PAIR_TASKS: Final[tuple[SentenceTask, ...]] = ("nsp", "sop")
_SENTENCE_TASKS: Final[tuple[SentenceTask, ...]] = ("none", "nsp", "sop")
_ACCURACIES: Final = {"masked acc.": "masked", "NSP, own head": "nsp", "SOP, own head": "sop"}
HEADINGS: Final = ("parameters", "tokens", "masked loss", *_ACCURACIES)
_FIGURES_FILE: Final = "figures.json"
# The figures depend on these settings and on both corpora.
_SETTINGS: Final = (
    *("heads", "initialize_from", "length", "batch_size", "sentence_weight", "held_out_tokens"),
)
_REPORTS_A_RUN: Final = 50
_EXAMPLES: Final = r"""examples:
  python -m benchmarks.ablations --shards wiki-shards/ --validation held-out-shards/ \
      --tokenizer vocab/ --output runs/ablations --steps 2000
  python -m benchmarks.ablations --shards wiki-shards/ --validation held-out-shards/ \
      --tokenizer vocab/ --output runs/sentence --tables sentence --seeds 0 1 2 \
      --initialize-from runs/base/checkpoint --steps 1000
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One model of an ablation: the settings in which models differ."""

    hidden_size: int
    num_layers: int
    num_heads: int
    sharing: Sharing
    embedding_size: int
    sentence_task: SentenceTask
    num_steps: int
    seed: int

    @property
    def name(self) -> str:
        """Tells it from the others; the name of its run's folder."""
        return (
            f"{self.hidden_size}x{self.num_layers}-share-{self.sharing}-e{self.embedding_size}"
            f"-{self.sentence_task}-{self.num_steps}-steps-seed{self.seed}"
        )


def _table_rows(name: TableName, options: argparse.Namespace) -> dict[str, Variant]:
    """Return the models of a table by label, with the first seed; they differ in one thing."""
    width, heads = options.hidden_size, options.heads
    base = Variant(
        hidden_size=width,
        num_layers=options.layers,
        num_heads=heads,
        sharing="all",
        embedding_size=options.embedding_size,
        sentence_task="sop",
        num_steps=options.steps,
        seed=options.seeds[0],
    )
    match name:
        case "sharing":
            return {label: replace(base, sharing=shared) for shared, label in _SHARED.items()}
        case "embedding":
            sizes = sorted({*options.embedding_sizes, width})
            return {f"E = {size}": replace(base, embedding_size=size) for size in sizes}
        case "depth":
            depths = sorted({*options.depths, options.layers})
            return {f"{depth} layers": replace(base, num_layers=depth) for depth in depths}
        case "width":
            # Heads are as wide in all of them.
            return {
                f"H = {size}": replace(base, hidden_size=size, num_heads=size * heads // width)
                for size in sorted({*options.widths, width})
            }
        case "sentence":
            tasks = _SENTENCE_TASKS
            return {f"{task} trained": replace(base, sentence_task=task) for task in tasks}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if options.initialize_from is not None:
        _take_sizes(options)
    settings = settings_of(options, _SETTINGS)
    if not is_known_run(options.output, {"ablation": settings}):
        record_run(options.output, {"ablation": settings})
    tables = {name: _table_rows(name, options) for name in dict.fromkeys(options.tables)}
    variants = dict.fromkeys(each for rows in tables.values() for each in rows.values())
    runs = [replace(each, seed=seed) for seed in options.seeds for each in variants]
    try:
        for variant in runs:
            folder = _folder(variant, options)
            if read_figures(folder) is not None:
                continue
            print(f"run {variant.name}", flush=True)
            if status := make_run(variant, folder, options):
                return status
        return 0
    finally:
        _write_tables(tables, options)


def _take_sizes(options: argparse.Namespace) -> None:
    """Take the sizes of the initial checkpoint as options."""
    if options.tables != ["sentence"]:
        raise BenchmarkError("--initialize-from is for the sentence tasks: give --tables sentence")
    with open_checkpoint(options.initialize_from) as checkpoint:
        config = check_config(read_config(checkpoint.folder), options.initialize_from)
    options.hidden_size, options.layers = config.hidden_size, config.num_layers
    options.heads, options.embedding_size = config.num_heads, config.embedding_size


def settings_of(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return the settings that the figures depend on: both corpora, and options by name."""
    tokenizer = options.tokenizer / "tokenizer.json"
    corpora = {
        name: Shards.open(getattr(options, name), tokenizer).fingerprint
        for name in ("shards", "validation")
    }
    return {**corpora, **{name: getattr(options, name) for name in names}}


def make_run(variant: Variant, folder: Path, options: argparse.Namespace) -> int:
    """Pretrain one model or resume its run, and write its figures; return the exit status.

    `cpu_s` among them is the CPU time of the training in this process.
    """
    torch.compiler.reset()  # compiled code is the previous model's
    began = time.process_time()
    if status := pretrain.main(_pretraining(variant, folder, options)):
        return status
    cpu_s = time.process_time() - began
    model = load_checkpoint(folder / "checkpoint").to(options.device)
    figures = _measure(model, variant.sentence_task, options)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    record = {"variant": asdict(variant), "tokens": last["tokens"], "cpu_s": cpu_s, **figures}
    write_atomically(folder / _FIGURES_FILE, (json.dumps(record, indent=2) + "\n").encode())
    return 0


def _pretraining(variant: Variant, folder: Path, options: argparse.Namespace) -> list[str]:
    """Return the command line of `albert-serve pretrain`."""
    steps = variant.num_steps
    # A divisor of the steps, so that the last one is reported.
    most = max(1, steps // _REPORTS_A_RUN)
    report_every = max(size for size in range(1, most + 1) if steps % size == 0)
    return [
        *("--shards", str(options.shards), "--tokenizer", str(options.tokenizer)),
        *("--output", str(folder), "--recipe", "small"),
        *_sizes(variant, options),
        *("--length", str(options.length), "--batch-size", str(options.batch_size)),
        *("--sentence-weight", str(options.sentence_weight), "--steps", str(steps)),
        *("--sentence-task", variant.sentence_task, "--seed", str(variant.seed)),
        *("--device", str(options.device), "--keep", "1", "--save-every", "2m"),
        *("--report-every", str(report_every)),
        "--compile" if options.compile else "--no-compile",
    ]


def _sizes(variant: Variant, options: argparse.Namespace) -> list[str]:
    """Return the options of the model's sizes, or of the checkpoint that has them."""
    if options.initialize_from is not None:
        return ["--initialize-from", options.initialize_from]
    return [
        *("--preset", "small", "--max-positions", str(options.length)),
        *("--hidden-size", str(variant.hidden_size), "--layers", str(variant.num_layers)),
        *("--heads", str(variant.num_heads), "--sharing", variant.sharing),
        *("--embedding-size", str(variant.embedding_size)),
    ]


def _measure(
    model: AlbertForTasks, own: SentenceTask, options: argparse.Namespace
) -> dict[str, float]:
    """Measure a model on held-out text in the form of its own sentence task.

    One with a head for pairs is also asked to tell the pairs of both sentence tasks.
    """
    tokenizer = options.tokenizer / "tokenizer.json"
    shards = Shards.open(options.validation, tokenizer)
    masking = NgramMasking.of(AlbertTokenizer.from_file(tokenizer))
    figures: dict[str, float] = {
        "parameters": sum(p.numel() for p in model.albert.parameters()),
    }
    has_head = "sentence-order" in model.tasks
    for form in dict.fromkeys((own, *(_PAIR_TASKS if has_head else ()))):
        batches = held_out(
            shards,
            masking,
            ExampleSettings(length=options.length, sentence_task=form),
            max_rows=max(1, options.held_out_tokens // options.length),
        )
        objective = Objective(model, options.device)
        tallies = measure(objective, batches, ("fill-mask", "sentence-order"), options.device)
        assert tallies is not None
        masked, pairs = tallies["fill-mask"], tallies["sentence-order"]
        if form == own:
            figures |= {"masked_loss": masked.loss, **_accuracy("masked", masked)}
        if has_head:
            figures |= _accuracy(form, pairs)
    return figures


def _accuracy(name: str, tally: Tally) -> dict[str, float]:
    """Return an accuracy and the number of predictions."""
    return {f"{name}_accuracy": tally.accuracy, f"{name}_count": tally.count}


def _write_tables(
    tables: Mapping[TableName, Mapping[str, Variant]], options: argparse.Namespace
) -> None:
    """Write the tables of all finished runs."""
    lines = ["# Ablations", ""]
    for name, rows in tables.items():
        body = []
        for label, row in rows.items():
            runs = [_folder(replace(row, seed=seed), options) for seed in options.seeds]
            figures = [each for run in runs if (each := read_figures(run)) is not None]
            if figures:
                body.append([label, str(len(figures)), *cells(figures)])
        if body:
            lines += [f"## {_TITLES[name]}", "", table(["", "seeds", *HEADINGS], body), ""]
    lines.append(
        "Means over the seeds, with the lowest and the highest. The lengths of the segments alone "
        "predict the order of more than half of the pairs (docs/paper.md)."
    )
    text = "\n".join(lines)
    write_atomically(options.output / "ablations.md", text.encode())
    print(text)


def _folder(variant: Variant, options: argparse.Namespace) -> Path:
    output: Path = options.output
    return output / "runs" / variant.name


def read_figures(folder: Path) -> dict[str, Any] | None:
    """Return the figures of a run; None if it is not finished.

    Raises:
        BenchmarkError: they are damaged.
    """
    file = folder / _FIGURES_FILE
    if not file.is_file():
        return None
    try:
        figures: dict[str, Any] = json.loads(file.read_bytes())
    except ValueError as error:
        raise BenchmarkError(f"{file}: {error}; delete {file} to measure again") from error
    return figures


def cells(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the cells of `HEADINGS` for runs that differ in their seed."""
    yield f"{runs[0]['parameters'] / 1e6:.2f}M"
    yield f"{runs[0]['tokens'] / 1e6:.2f}M"
    yield _spread([run["masked_loss"] for run in runs], 3)
    for name in _ACCURACIES.values():
        key = f"{name}_accuracy"
        yield _spread([100 * run[key] for run in runs], 1) if key in runs[0] else "–"


def _spread(values: Sequence[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m benchmarks.ablations", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--shards", type=Path, required=True, help="folder that albert-serve prepare wrote")
    add("--validation", type=Path, required=True, help="the same of held-out text")
    add("--tokenizer", type=Path, required=True, help="folder that albert-serve vocab wrote")
    add("--output", type=Path, required=True, help="the ablation's folder")
    names = get_args(TableName)
    add("--tables", nargs="+", choices=names, default=names, help="(all)")
    add("--steps", type=parse_count, required=True, help="of each run")
    add("--seeds", nargs="+", type=int, default=[0], help="each trains all models (0)")
    add = parser.add_argument_group("the models").add_argument
    add("--hidden-size", type=parse_count, default=256, help="(%(default)s)")
    add("--layers", type=parse_count, default=6, help="(%(default)s)")
    add("--heads", type=parse_count, default=4, help="(%(default)s)")
    add("--embedding-size", type=parse_count, default=128, help="E, but in its table (128)")
    sizes = "sizes of the embedding table, beside the hidden size (64 128 256)"
    widths = [64, 128, 256]
    add("--embedding-sizes", nargs="+", type=parse_count, default=widths, metavar="E", help=sizes)
    depths = "in the table of depth, beside --layers (3 12)"
    add("--depths", nargs="+", type=parse_count, default=[3, 12], metavar="LAYERS", help=depths)
    hidden = "in the table of width, beside --hidden-size (128 512)"
    add("--widths", nargs="+", type=parse_count, default=[128, 512], metavar="H", help=hidden)
    start = "the sizes and first weights of all models of the table of sentence tasks"
    add("--initialize-from", metavar="CHECKPOINT", help=start)
    add("--length", type=parse_count, default=128, help="tokens a row (%(default)s)")
    add("--batch-size", type=parse_count, default=32, help="rows a step (%(default)s)")
    add("--sentence-weight", type=parse_part, default=1.0, help="of the sentence task's loss (1)")
    measured = "held-out text to measure on, in rows of --length tokens (%(default)s)"
    add("--held-out-tokens", type=parse_count, default=1 << 18, help=measured)
    machine = parser.add_argument_group("the machine")
    add_device(machine)
    compiles = "worth its minutes from some thousand steps on"
    machine.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help=compiles
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
