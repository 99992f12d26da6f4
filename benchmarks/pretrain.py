"""Speed of pretraining with this package, against `transformers` and the hardware's peak.

Trains the same model on the same text with `albert-serve pretrain` and with
`transformers.AlbertForPreTraining` and its `Trainer`, in bf16 (fp32 on a CPU without it), compiled
and with AdamW, in turns, and prints real tokens a second, MFU, memory and how many times faster
ours is, as the median over rounds. Writes `results.json` and `tables.md` into the output folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from albert_serve.compute import train_flops_per_token
from albert_serve.config import PRESETS, AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.harness.flops import mfu, peak_flops
from benchmarks.harness.page import describe_machine
from benchmarks.harness.process import BenchmarkError
from benchmarks.harness.texts import WIKI
from benchmarks.harness.trainers import (
    HfSettings,
    TrainerJob,
    TrainerResult,
    add_trainer_options,
    compare_trainers,
    sized_config,
    trainer_table,
)
from training.commands.pretrain import PretrainConfig
from training.data.examples import IGNORED, ExampleSettings
from training.data.masking import NgramMasking
from training.data.packing import Plan
from training.data.preparation import prepare
from training.data.shards import Shards
from training.errors import report_errors
from training.loop.distributed import World
from training.loop.step import Run
from training.options.values import parse_count
from training.pretraining.config import Start
from training.pretraining.job import open_job
from training.pretraining.recipes import RECIPES
from training.system.command_line import make_parser
from training.system.precision import product_dtype

_AGAINST: Final = {
    "sdpa": HfSettings(num_rows=0),
    "sdpa-kept": HfSettings(num_rows=0, keeps_memory=True),
    "eager-kept": HfSettings(num_rows=0, attention="eager", keeps_memory=True),
}
# Tokens a step: more was no faster.
_BATCH_TOKENS: Final = {"cpu": 4096, "cuda": 65536}
# Rows of `transformers` for each of ours, where as many are not its fastest.
_HF_ROWS: Final = {"small": 2}
_BATCHES_OF_EXAMPLES: Final = 32
# A rate at which neither side's loss diverges.
_LR: Final = 1e-4
# Settings of ours under which both sides train alike.
_AS_TRANSFORMERS: Final[dict[str, Any]] = {
    "recipe": "paper",
    "optimizer": "adamw",
    "lr": _LR,
    "schedule": "wsd",
    "decay": 0.1,
    "dropout": "v2",
}
_SEED: Final = 0
_TERA: Final = 1e12
_EXAMPLES: Final = r"""examples:
  python -m benchmarks.pretrain
  python -m benchmarks.pretrain --quick
  python -m benchmarks.pretrain --corpus wiki/*.jsonl.xz --tokenizer vocab/ --cases base@512
  python -m benchmarks.pretrain --cases small@64 small@256 small@512 --against sdpa --rounds 3
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainingCase:
    """One model at one length, and its data.

    Attributes:
        num_rows: rows of a step of ours.
        shards: folder of the tokenised corpus.
        examples: the same text's examples for `transformers`, as `make_examples` returns them.
        tokenizer: folder of the `tokenizer.json` that the data was made with.
    """

    config: AlbertConfig
    length: int
    num_rows: int
    shards: Path
    examples: Sequence[dict[str, Any]]
    tokenizer: Path

    @property
    def flops_per_token(self) -> float:
        """Training FLOPs per token, for the examples' lengths and masks.

        All of the model's products are counted, for both sides; ours leaves those of the last layer
        out that nothing reads.
        """
        sizes = np.array([len(each["input_ids"]) for each in self.examples], np.float64)
        num_masked = sum(int((each["labels"] != IGNORED).sum()) for each in self.examples)
        # Tokens of the sequence of a token, on average over tokens.
        mean_seen = float((sizes**2).sum() / sizes.sum())
        masked_rate = float(num_masked / sizes.sum())
        return train_flops_per_token(self.config, length=mean_seen, masked_rate=masked_rate)

    @property
    def lr(self) -> float:
        """The learning rate."""
        return _LR

    def build_ours(self, job: TrainerJob) -> Run:
        """Return the run of pretraining: by a recipe, or as `transformers` trains."""
        config = PretrainConfig(
            output=Path("unused"),
            shards=self.shards,
            tokenizer=self.tokenizer,
            steps=sys.maxsize,
            device=torch.device(job.device),
            compile=job.compiles,
            length=self.length,
            batch_size=self.num_rows,
            **({} if job.recipe else _AS_TRANSFORMERS),
        )
        recipe = config.changed(RECIPES[config.recipe])
        start = Start(folder=None, name=None, tokenizer=self.tokenizer)
        world = World(device=config.device)
        return open_job(config, recipe, self.config, start, world, "auto").build()

    def make_hf_model(self, attention: str) -> Any:
        """Return the model of `transformers`, at its first weights."""
        import transformers

        config = transformers.AlbertConfig.from_dict(self.config.to_hf())
        config._attn_implementation = attention
        torch.manual_seed(0)
        return transformers.AlbertForPreTraining(config)

    def hf_rows(self) -> Sequence[dict[str, Any]]:
        """Return the examples, which have the names of `transformers`."""
        return self.examples


def make_examples(
    shards: Shards, tokenizer: Path, *, length: int, num_examples: int
) -> list[dict[str, Any]]:
    """Return the first examples of a run over a tokenised corpus under `transformers`' names.

    Examples, masks and labels are those that `albert-serve pretrain` makes of them, each one a
    sequence of its own. A corpus too small gives as many epochs as it takes.
    """
    masking = NgramMasking.of(AlbertTokenizer.from_file(tokenizer / "tokenizer.json"))
    plan = Plan(shards=shards, settings=ExampleSettings(length=length), seed=_SEED)
    rows = chain.from_iterable(plan.epoch(number) for number in count())
    made = []
    for example in islice(chain.from_iterable(rows), num_examples):
        whole, second = example.tokens(shards.parts[example.part])
        masked, chosen = masking(whole, example.mask_rng(_SEED))
        labels = np.full(len(whole), IGNORED)
        labels[chosen] = whole[chosen]
        made.append(
            {
                "input_ids": masked.astype(np.int64),
                "token_type_ids": (np.arange(len(whole)) >= second).astype(np.int64),
                "labels": labels,
                "sentence_order_label": int(example.label),
            }
        )
    return made


def _markdown(results: Sequence[TrainerResult], peak: float) -> str:
    """Return the table of a case, with its title."""
    ours = results[0]
    case = ours.job.case
    assert isinstance(case, PretrainingCase)
    mean_size = sum(len(each["input_ids"]) for each in case.examples) / len(case.examples)
    part = mean_size / case.length
    title = f"{ours.job.title}; rows padded to the full length hold {part:.0%} real tokens"

    def part_of_peak(result: TrainerResult) -> str:
        flops = case.flops_per_token
        part = mfu(tokens_per_s=result.tokens_per_s, flops_per_token=flops, peak_flops=peak)
        return f"{part:.0%}"

    rates = [("tokens/s", lambda result: f"{result.tokens_per_s:,.0f}"), ("MFU", part_of_peak)]
    return f"{title}\n\n{trainer_table(results, rates)}"


def _parse_case(text: str, options: argparse.Namespace) -> tuple[str, int, int]:
    """Return shape, length and rows of a step of a word such as `base@128`."""
    shape, _, length = text.partition("@")
    if shape not in PRESETS or not length.isdecimal():
        raise BenchmarkError(
            f"--cases {text}: write SHAPE@LENGTH, where SHAPE is one of {', '.join(PRESETS)}"
        )
    tokens = options.batch_tokens or _BATCH_TOKENS[options.device.type]
    return shape, int(length), max(1, tokens // int(length))


def _jobs(
    shape: str, length: int, num_rows: int, shards: Shards, options: argparse.Namespace
) -> list[TrainerJob]:
    """Return the jobs of a case, ours first."""
    tokenizer: Path = options.tokenizer.resolve()
    num_pieces = AlbertTokenizer.from_file(tokenizer / "tokenizer.json").vocab_size
    num_examples = _BATCHES_OF_EXAMPLES * num_rows
    case = PretrainingCase(
        config=sized_config(shape, length, num_pieces),
        length=length,
        num_rows=num_rows,
        shards=(options.output / "shards").resolve(),
        examples=make_examples(shards, tokenizer, length=length, num_examples=num_examples),
        tokenizer=tokenizer,
    )
    ours = TrainerJob(
        title=f"{shape}, {num_rows} x {length} tokens",
        case=case,
        hf=None,
        device=options.device.type,
        num_threads=options.threads,
        compiles=options.compile,
    )
    hf_rows = num_rows * _HF_ROWS.get(shape, 1)
    peers = [replace(_AGAINST[name], num_rows=hf_rows) for name in options.against]
    # A user's own run has the default recipe; a CPU's rounds are long enough without it.
    by_recipe = [replace(ours, recipe=PretrainConfig.recipe)] if ours.device == "cuda" else []
    return [ours, *by_recipe, *(replace(ours, hf=settings) for settings in peers)]


def _run(options: argparse.Namespace) -> int:
    torch.set_num_threads(options.threads)
    cases = [_parse_case(text, options) for text in options.cases]
    shards = prepare(
        options.corpus, options.tokenizer / "tokenizer.json", options.output / "shards"
    )
    peak = peak_flops(options.device)
    dtype = "bf16" if product_dtype(options.device) == torch.bfloat16 else "fp32"
    device = torch.cuda.get_device_name() if options.device.type == "cuda" else "measured before"
    machine = [
        *describe_machine(options.threads),
        f"MFU counts from {peak / _TERA:,.2f} TFLOPS in {dtype} ({device})",
    ]
    jobs = [_jobs(*case, shards, options) for case in cases]
    compare_trainers(jobs, options, machine, lambda results: _markdown(results, peak))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    if options.quick:
        options.cases, options.rounds, options.turn = ["small@128"], 2, 4.0
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m benchmarks.pretrain", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--corpus", nargs="+", type=Path, default=[WIKI], help="text (a few articles)")
    cases = ["small@128", "base@128"]
    add("--cases", nargs="+", metavar="SHAPE@LENGTH", default=cases, help="(small@128 base@128)")
    add("--batch-tokens", type=parse_count, help="of a step (4096 or, on GPU, 65536)")
    default = ["sdpa", *([] if torch.cuda.is_available() else ["eager-kept"])]
    against = (
        "transformers with SDPA as it comes; with malloc told to keep memory; and with eager "
        "attention, too (%(default)s)"
    )
    add("--against", nargs="*", choices=list(_AGAINST), default=default, help=against)
    add("--quick", action="store_true", help="the small model, 2 turns of 4s: a first look")
    add_trainer_options(parser, "runs/benchmark-pretrain", 5)
    return parser


if __name__ == "__main__":
    # Imported by its name, because processes unpickle the jobs by it.
    from benchmarks.pretrain import main as run

    sys.exit(run())
