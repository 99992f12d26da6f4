"""Pretraining from text: masked n-grams and sentence order (Lan et al. 2019, section 3.1).

Writes `checkpoint/` (a Hugging Face directory), `metrics.jsonl` and `state.pt` into the output
folder. The same command goes on with a run that was stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, get_args

import torch

from albert_serve.config import PRESETS, AlbertConfig, Sharing, preset
from albert_serve.tokenizer import AlbertTokenizer
from training.corpus import find_files
from training.errors import report_errors
from training.examples import MIN_LENGTH
from training.feeds import pretrain_feed
from training.heads import AlbertForTasks, head_sizes
from training.initialize import Start, start_local
from training.loop import Run, Saver, go_on, train
from training.masking import NgramMasking, word_starts
from training.optim import Schedule, muon_with_adamw
from training.options import add_end, add_optimization, add_reports, parse_count, parse_part
from training.provenance import file_names
from training.run import Progress, RunError, is_known_run, record_run
from training.shards import prepare

# Sentence order has one label a sequence: at the embeddings' rate its head follows noise
# (docs/decisions.md).
_POOLED_RATE: Final = 0.1

_EXAMPLES: Final = r"""examples:
  python -m training.pretrain --corpus wiki/*.jsonl.xz --tokenizer vocab/ --output runs/base \
      --steps 125000 --batch-size 256
  python -m training.pretrain --corpus wiki/*.jsonl.xz --tokenizer vocab/ --output runs/small \
      --hidden-size 384 --layers 6 --heads 6 --budget 2h
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything that decides what a run computes, but the corpus and the model's sizes."""

    length: int
    batch_size: int
    num_steps: int | None
    budget_s: float | None
    muon_lr: float
    adamw_lr: float
    warmup: float
    decay: float
    mask_rate: float
    clip_norm: float
    sop_weight: float
    start: Start
    seed: int


def _build(
    options: argparse.Namespace,
    settings: Settings,
    config: AlbertConfig,
    tokenizer: AlbertTokenizer,
) -> Run:
    progress = Progress(num_steps=settings.num_steps, budget_s=settings.budget_s)
    shards = prepare(
        options.corpus, options.tokenizer / "tokenizer.json", options.output / "shards"
    )
    feed = pretrain_feed(
        shards,
        NgramMasking(word_starts=word_starts(tokenizer), rate=settings.mask_rate),
        length=settings.length,
        batch_size=settings.batch_size,
        seed=settings.seed,
    )
    torch.manual_seed(settings.seed)
    model = AlbertForTasks(config, head_sizes(config, feed.tasks))
    if settings.start == "local":
        start_local(model, shards.token_counts(config.vocab_size))
    model.to(options.device)
    if options.compile:
        model.albert.compile()
    return Run(
        model=model,
        optimizers=muon_with_adamw(
            model,
            muon_lr=settings.muon_lr,
            adamw_lr=settings.adamw_lr,
            pooled_lr=_POOLED_RATE * settings.adamw_lr,
        ),
        schedule=Schedule(warmup=settings.warmup, decay=settings.decay),
        feeds=[feed],
        weights=[1.0],
        loss_weights={"sentence-order": settings.sop_weight},
        clip_norm=settings.clip_norm,
        seed=settings.seed,
        device=options.device,
        progress=progress,
    )


def _config(options: argparse.Namespace, vocab_size: int) -> AlbertConfig:
    sizes = {
        "embedding_size": options.embedding_size,
        "hidden_size": options.hidden_size,
        "num_layers": options.layers,
        "num_heads": options.heads,
        "ffn_size": options.ffn_size or (options.hidden_size and 4 * options.hidden_size),
        "num_groups": options.groups,
        "sharing": options.sharing,
        "max_positions": options.max_positions,
    }
    given = {name: value for name, value in sizes.items() if value is not None}
    config = preset(options.preset, vocab_size=vocab_size, **given)
    if not MIN_LENGTH <= options.length <= config.max_positions:
        raise RunError(
            f"--length {options.length}: a sequence has from {MIN_LENGTH} tokens to the model's "
            f"{config.max_positions} positions (--max-positions)"
        )
    return config


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        length=options.length,
        batch_size=options.batch_size,
        num_steps=options.steps,
        budget_s=options.budget,
        muon_lr=options.muon_lr,
        adamw_lr=options.adamw_lr,
        warmup=options.warmup,
        decay=options.decay,
        mask_rate=options.mask_rate,
        clip_norm=options.clip_norm,
        sop_weight=options.sop_weight,
        start=options.start,
        seed=options.seed,
    )


def _corpus(paths: Sequence[Path]) -> list[list[Any]]:
    """Names and sizes of the files: enough to tell another corpus by, and the same anywhere."""
    return [[file.name, file.stat().st_size] for file in find_files(paths)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    tokenizer = AlbertTokenizer.from_file(options.tokenizer / "tokenizer.json")
    settings, config = _settings(options), _config(options, tokenizer.vocab_size)
    record = {
        "settings": asdict(settings),
        "config": config.to_hf(),
        "corpus": _corpus(options.corpus),
    }
    is_known = is_known_run(options.output, record)
    run = _build(options, settings, config, tokenizer)
    if is_known:
        go_on(run, options.output)
    else:
        record_run(options.output, record)
    saver = Saver(
        folder=options.output,
        tokenizer_from=options.tokenizer,
        every_s=options.save_every,
        program="training.pretrain",
        stage={
            "settings": asdict(settings),
            "corpus": file_names(find_files(options.corpus)),
        },
    )
    status = train(run, saver, report_every=options.report_every)
    print(
        f"{options.output / 'checkpoint'}: {run.progress.step:,} steps, {run.num_tokens:,} tokens, "
        f"{run.progress.seconds:,.0f} s"
    )
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.pretrain",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--corpus", nargs="+", type=Path, required=True, help="text or JSONL files, or folders")
    add("--tokenizer", type=Path, required=True, help="folder that training.vocab wrote")
    add("--output", type=Path, required=True, help="the run's folder")
    sizes = parser.add_argument_group("model (what is not given is the preset's)")
    sizes.add_argument("--preset", choices=list(PRESETS), default="base")
    for name in ("embedding-size", "hidden-size", "layers", "heads", "ffn-size", "groups"):
        sizes.add_argument(f"--{name}", type=parse_count)
    sizes.add_argument("--max-positions", type=parse_count)
    sizes.add_argument(
        "--start",
        choices=get_args(Start),
        default="local",
        help="first weights: with attention to what is near, or the paper's random ones (local)",
    )
    sizes.add_argument("--sharing", choices=get_args(Sharing))
    add_end(parser)
    how = parser.add_argument_group("how it trains")
    how.add_argument("--length", type=parse_count, default=128, help="tokens a sequence (128)")
    how.add_argument("--batch-size", type=parse_count, default=32, help="sequences a step (32)")
    how.add_argument(
        "--mask-rate", type=parse_part, default=0.15, help="part of tokens predicted (0.15)"
    )
    add_optimization(how, muon_lr=1e-3, adamw_lr=3e-3, warmup=0.03, decay=0.3)
    how.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    add_reports(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
