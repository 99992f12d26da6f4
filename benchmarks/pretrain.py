"""Speed of pretraining with this package, against `transformers` and the hardware's peak.

Trains the same model on the same text with `training.pretrain` and with
`transformers.AlbertForPreTraining` and its `Trainer`, in bf16 (fp32 on a CPU without it), compiled
and with AdamW, in turns, and prints real tokens a second, MFU, memory and how many times faster
ours is, as the median over rounds. Writes `results.json` and `tables.md` into the output folder.

Shape legend: N examples, S positions.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from albert_serve.config import PRESETS, AlbertConfig
from albert_serve.doctor.machine import processor_name
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.harness.process import REPOSITORY, BenchmarkError, Channel
from benchmarks.harness.texts import WIKI
from benchmarks.harness.trainers import (
    HfSettings,
    TrainerContest,
    TrainerJob,
    TrainerResult,
    sized_config,
    train_in_turns,
    trainer_table,
)
from training.data.examples import IGNORED, ExampleSettings
from training.data.masking import NgramMasking, word_starts
from training.data.packing import Plan
from training.data.shards import Shards
from training.errors import report_errors
from training.loop.distributed import World
from training.loop.flops import mfu, peak_flops, train_flops_per_token
from training.loop.progress import Progress
from training.loop.step import Run
from training.prepare import prepare
from training.run.job import Job
from training.run.options import add_device, parse_count, parse_duration, parse_positive
from training.run.recipes import RECIPES
from training.system.command_line import make_parser
from training.system.precision import product_dtype

_RIVALS: Final = ("sdpa", "sdpa-kept", "eager-kept")
_CURVES: Final = {
    "length": ["small@64", "small@128", "small@256", "small@512"],
    "batch": ["small@128x8", "small@128x16", "small@128x32", "small@128x64", "small@128x128"],
    "size": ["small@128", "base@128", "large@128"],
}
# The defaults, and those of --quick.
_AMOUNTS: Final[dict[str, tuple[Any, Any]]] = {
    "cases": (["small@128", "base@128"], ["small@128"]),
    "rounds": (5, 2),
    "turn": (8.0, 4.0),
}
# Tokens a step: more was no faster.
_BATCH_TOKENS: Final = {"cpu": 4096, "cuda": 65536}
_BATCHES_OF_EXAMPLES: Final = 32
# A rate at which neither side's loss diverges.
_LR: Final = 1e-4
_ROUNDING: Final = 8
_LOADING_S: Final = 3.0
_SEED: Final = 0
_TERA: Final = 1e12
_FILLERS: Final = {"input_ids": 0, "token_type_ids": 0, "attention_mask": 0, "labels": IGNORED}
_EXAMPLES: Final = r"""examples:
  python -m benchmarks.pretrain
  python -m benchmarks.pretrain --quick
  python -m benchmarks.pretrain --corpus wiki/*.jsonl.xz --tokenizer vocab/ --cases base@512
  python -m benchmarks.pretrain --curve size --against sdpa --rounds 3
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainingCase:
    """One model at one length, and its data.

    Attributes:
        num_rows: rows of a step of ours.
        shards: folder of the tokenised corpus.
        examples: file of the same text's examples, as `write_examples` writes them.
        tokenizer: folder of the `tokenizer.json` that the data was made with.
    """

    config: AlbertConfig
    length: int
    num_rows: int
    shards: Path
    examples: Path
    tokenizer: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleArrays:
    """Examples, one a row, padded on the right.

    Attributes:
        ids: (N, S), masked.
        types: (N, S), 0 for the first segment, 1 for the second.
        labels: (N, S), the id that stood at a masked token, or IGNORED.
        lengths: (N,) real tokens.
        orders: (N,) labels of sentence order, or IGNORED.
    """

    ids: NDArray[np.int64]
    types: NDArray[np.int64]
    labels: NDArray[np.int64]
    lengths: NDArray[np.int64]
    orders: NDArray[np.int64]

    @classmethod
    def open(cls, file: Path) -> ExampleArrays:
        """Read the examples that `write_examples` wrote."""
        with np.load(file) as arrays:
            return cls(**{name: arrays[name] for name in arrays.files})

    @property
    def fill(self) -> float:
        """Part of a row padded to the full length that is real tokens."""
        return float(self.lengths.mean() / self.ids.shape[1])

    def flops_per_token(self, config: AlbertConfig) -> float:
        """Return the training FLOPs per token, for the examples' lengths and masks.

        All of the model's products are counted, for both sides; ours leaves those of the last layer
        out that nothing reads.
        """
        sizes = self.lengths.astype(np.float64)
        # Tokens of the sequence of a token, on average over tokens.
        mean_seen = float((sizes**2).sum() / sizes.sum())
        masked_rate = float((self.labels != IGNORED).sum() / sizes.sum())
        return train_flops_per_token(config, length=mean_seen, masked_rate=masked_rate)


def write_examples(
    shards: Shards, tokenizer: Path, file: Path, *, length: int, num_examples: int
) -> ExampleArrays:
    """Write the first examples of a run over a tokenised corpus as arrays.

    Examples, masks and labels are those that `training.pretrain` makes of them, each one a
    sequence of its own. A corpus too small gives as many epochs as it takes.
    """
    starts = word_starts(AlbertTokenizer.from_file(tokenizer / "tokenizer.json"))
    masking = NgramMasking(word_starts=starts)
    plan = Plan(shards=shards, settings=ExampleSettings(length=length), seed=_SEED)
    rows = chain.from_iterable(plan.epoch(number) for number in count())
    shape = (num_examples, length)
    ids, types, labels = np.zeros(shape, int), np.zeros(shape, int), np.full(shape, IGNORED)
    lengths, orders = np.zeros(num_examples, int), np.zeros(num_examples, int)
    for row, example in enumerate(islice(chain.from_iterable(rows), num_examples)):
        whole, second = example.tokens(shards.parts[example.part])
        masked, chosen = masking(whole, example.mask_rng(_SEED))
        ids[row, : len(whole)] = masked
        types[row, second : len(whole)] = 1
        labels[row, chosen] = whole[chosen]
        lengths[row], orders[row] = len(whole), example.label
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, ids=ids, types=types, labels=labels, lengths=lengths, orders=orders)
    return ExampleArrays.open(file)


def build_ours(job: TrainerJob) -> Run:
    """Return the run of `training.pretrain`, with AdamW as `transformers` has it."""
    case: PretrainingCase = job.data
    recipe = replace(
        RECIPES["paper"],
        length=case.length,
        batch_size=case.num_rows,
        optimizer="adamw",
        lr=_LR,
        schedule="wsd",
        decay=0.1,
        dropout="v2",
    )
    return Job(
        config=case.config,
        recipe=recipe,
        progress=Progress(num_steps=sys.maxsize, budget_s=None),
        shards=Shards.open(case.shards, case.tokenizer / "tokenizer.json"),
        tokenizer=case.tokenizer,
        world=World(device=torch.device(job.device)),
        compiles=job.compiles,
    ).build()


class UnpaddedExamples(Dataset[dict[str, Any]]):
    """The examples under the names of `transformers`."""

    def __init__(self, arrays: ExampleArrays) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        arrays, size = self._arrays, int(self._arrays.lengths[index])
        return {
            "input_ids": arrays.ids[index, :size],
            "token_type_ids": arrays.types[index, :size],
            "attention_mask": np.ones(size, np.int64),
            "labels": arrays.labels[index, :size],
            "sentence_order_label": int(arrays.orders[index]),
        }


@dataclass(frozen=True, slots=True)
class PadExamples:
    """Pads the examples of a batch to `length`, or to the longest rounded up if that is less."""

    length: int
    is_full: bool

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """The batch."""
        longest = max(len(example["input_ids"]) for example in examples)
        rounded = -(-longest // _ROUNDING) * _ROUNDING
        size = self.length if self.is_full else min(self.length, rounded)
        batch = {name: np.full((len(examples), size), to) for name, to in _FILLERS.items()}
        for row, example in enumerate(examples):
            for name, values in batch.items():
                values[row, : len(example[name])] = example[name]
        orders = torch.tensor([example["sentence_order_label"] for example in examples])
        padded = {name: torch.from_numpy(values) for name, values in batch.items()}
        return {**padded, "sentence_order_label": orders}


def _train_hf(channel: Channel, job: TrainerJob) -> None:
    import transformers

    from benchmarks.harness.hf_trainer import train_hf_in_turns

    case: PretrainingCase = job.data
    assert job.hf is not None
    config = transformers.AlbertConfig.from_dict(case.config.to_hf())
    config._attn_implementation = job.hf.attention
    torch.manual_seed(0)
    model = transformers.AlbertForPreTraining(config)
    examples = UnpaddedExamples(ExampleArrays.open(case.examples))
    collate = PadExamples(case.length, job.hf.padding == "full")
    train_hf_in_turns(channel, job, model, examples, collate, _LR)


def serve(channel: Channel, job: TrainerJob) -> None:
    """Be the process of a job."""
    torch.set_num_threads(job.num_threads)
    if job.hf is None:
        train_in_turns(build_ours(job), channel)
    else:
        _train_hf(channel, job)


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainingReport:
    """The results of one case.

    Attributes:
        results: of ours first.
        peak_flops: of the device, a second.
        fill: part of a row padded to the full length that is real tokens.
        flops_per_token: of training.
        loading_per_s: tokens a second that one process makes ready.
    """

    results: Sequence[TrainerResult]
    peak_flops: float
    fill: float
    flops_per_token: float
    loading_per_s: float

    def markdown(self) -> str:
        """Return a table, with its title."""
        ours = self.results[0]
        title = (
            f"{ours.job.title}; rows padded to the full length would hold {self.fill:.0%} real "
            f"tokens; one process makes {self.loading_per_s:,.0f} tokens/s ready, "
            f"{self.loading_per_s / ours.tokens_per_s:,.0f} times what ours takes"
        )
        rates = [
            ("tokens/s", lambda result: f"{result.tokens_per_s:,.0f}"),
            ("MFU", lambda result: f"{self._mfu(result):.0%}"),
        ]
        return f"{title}\n\n{trainer_table(self.results, rates)}\n"

    def _mfu(self, result: TrainerResult) -> float:
        return mfu(
            tokens_per_s=result.tokens_per_s,
            flops_per_token=self.flops_per_token,
            peak_flops=self.peak_flops,
        )


def _loading_rate(job: TrainerJob) -> float:
    """Return the tokens a second that one process cuts, masks and packs for ours, untrained."""
    feed = build_ours(replace(job, compiles=False, device="cpu")).feeds[0]
    feed.step()
    num_tokens, began = 0, time.perf_counter()
    while time.perf_counter() - began < _LOADING_S:
        num_tokens += sum(one.num_tokens for one in feed.step())
    return num_tokens / (time.perf_counter() - began)


def _job(text: str, options: argparse.Namespace, shards: Path) -> TrainerJob:
    """Return ours of a word such as `base@128` or, with rows a step, `base@128x32`."""
    match = re.fullmatch(r"(\w+)@(\d+)(?:x(\d+))?", text)
    if match is None or match[1] not in PRESETS:
        raise BenchmarkError(
            f"--cases {text}: write SHAPE@LENGTH or SHAPE@LENGTHxROWS, "
            f"where SHAPE is one of {', '.join(PRESETS)}"
        )
    length = int(match[2])
    tokens = options.batch_tokens or _BATCH_TOKENS[options.device.type]
    num_rows = int(match[3] or max(1, tokens // length))
    num_pieces = AlbertTokenizer.from_file(options.tokenizer / "tokenizer.json").vocab_size
    case = PretrainingCase(
        config=sized_config(match[1], length, num_pieces),
        length=length,
        num_rows=num_rows,
        shards=shards.resolve(),
        examples=(options.output / f"{match[1]}-{length}.npz").resolve(),
        tokenizer=options.tokenizer.resolve(),
    )
    return TrainerJob(
        module="benchmarks.pretrain",
        title=f"{match[1]}, {num_rows} x {length} tokens",
        data=case,
        hf=None,
        device=options.device.type,
        num_threads=options.threads,
        compiles=options.compile,
    )


def _candidates(case: PretrainingCase, options: argparse.Namespace) -> list[HfSettings]:
    """Return the settings of `transformers` among which the fastest is looked for."""
    tokens = options.hf_batch_tokens or [case.num_rows * case.length * n for n in (1, 2)]
    settings = [HfSettings(num_rows=max(1, number // case.length)) for number in tokens]
    return [*settings, replace(settings[0], padding="grouped")]


def _rival(name: str, fastest: HfSettings) -> HfSettings:
    attention = replace(fastest, attention="eager") if name == "eager-kept" else fastest
    return replace(attention, keeps_memory=name.endswith("-kept"))


def _measure(
    ours: TrainerJob, options: argparse.Namespace, contest: TrainerContest, peak: float
) -> PretrainingReport:
    case: PretrainingCase = ours.data
    arrays = write_examples(
        Shards.open(case.shards, case.tokenizer / "tokenizer.json"),
        case.tokenizer,
        case.examples,
        length=case.length,
        num_examples=_BATCHES_OF_EXAMPLES * case.num_rows,
    )
    rivals: list[TrainerJob] = []
    if options.against:
        tried = [replace(ours, hf=settings) for settings in _candidates(case, options)]
        best = contest.fastest(tried).hf
        assert best is not None
        rivals = [replace(ours, hf=_rival(name, best)) for name in options.against]
    return PretrainingReport(
        results=contest.measure([ours, *rivals]),
        peak_flops=peak,
        fill=arrays.fill,
        flops_per_token=arrays.flops_per_token(case.config),
        loading_per_s=_loading_rate(ours),
    )


def _run(options: argparse.Namespace) -> int:
    torch.set_num_threads(options.threads)
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    names = _CURVES[options.curve] if options.curve else options.cases
    jobs = [_job(name, options, output / "shards") for name in names]
    prepare(options.corpus, options.tokenizer / "tokenizer.json", output / "shards")
    peak = options.peak_tflops * _TERA if options.peak_tflops else peak_flops(options.device)
    machine = _describe(options, peak)
    print(machine)
    searched = len(_candidates(jobs[0].data, options)) if options.against else 0
    num_units = 3 * searched + (1 + len(options.against)) * (options.rounds + 2)
    reports: list[PretrainingReport] = []
    bar: tqdm[Any]
    with tqdm(total=len(jobs) * num_units, disable=None, unit="turn") as bar:
        contest = TrainerContest(rounds=options.rounds, turn_s=options.turn, logs=output, bar=bar)
        for job in jobs:
            reports.append(_measure(job, options, contest, peak))
            content = {"hardware": machine, "cases": [asdict(report) for report in reports]}
            (output / "results.json").write_text(json.dumps(content, indent=1, default=str))
            tables = "\n".join(report.markdown() for report in reports)
            (output / "tables.md").write_text(f"{machine}\n\n{tables}", encoding="utf-8")
            with bar.external_write_mode():
                print(f"\n{reports[-1].markdown()}")
    print(f"{output / 'results.json'} has every turn")
    return 0


def _describe(options: argparse.Namespace, peak: float) -> str:
    """Describe the machine, and the peak that MFU counts from, in a line."""
    import transformers

    dtype = "bf16" if product_dtype(options.device) == torch.bfloat16 else "fp32"
    versions = (
        f"{peak / _TERA:,.2f} TFLOPS in {dtype}; torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}"
    )
    if options.device.type == "cuda":
        return f"{torch.cuda.get_device_name()}; {versions}"
    return f"{processor_name()}, {options.threads} threads; {versions}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    for name, values in _AMOUNTS.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.quick])
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.pretrain", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--corpus", nargs="+", type=Path, default=[WIKI], help="text (a few articles)")
    shipped = REPOSITORY / "models" / "albert-small-en"
    add("--tokenizer", type=Path, default=shipped, help="folder (the shipped model's)")
    add("--output", type=Path, default=Path("runs/benchmark-pretrain"), help="(%(default)s)")
    add = parser.add_argument_group("what is trained").add_argument
    cases = "SHAPE@LENGTH, or SHAPE@LENGTHxROWS with the rows of a step (small@128 base@128)"
    add("--cases", nargs="+", help=cases)
    add("--curve", choices=list(_CURVES), help="cases along one of these instead")
    add("--batch-tokens", type=parse_count, help="of a step (4096 or, on GPU, 65536)")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    how = parser.add_argument_group("how it is measured")
    add = how.add_argument
    rivals = ["sdpa", *([] if torch.cuda.is_available() else ["eager-kept"])]
    against = (
        "transformers with SDPA as it comes; with malloc told to keep memory; and with eager "
        "attention, too (%(default)s)"
    )
    add("--against", nargs="*", choices=_RIVALS, default=rivals, help=against)
    hf_tokens = "of a step of transformers: the best is looked for (ours, and twice as many)"
    add("--hf-batch-tokens", nargs="+", type=parse_count, help=hf_tokens)
    add("--rounds", type=parse_count, help="turns that count (5)")
    add("--turn", type=parse_duration, metavar="8s", help="length of a turn (8s)")
    peak = "what MFU counts from (the data sheet's, or measured: too little on a busy machine)"
    add("--peak-tflops", type=parse_positive, help=peak)
    add("--threads", type=parse_count, default=torch.get_num_threads())
    add("--quick", action="store_true", help="the small model, 2 turns of 4s: a first look")
    add_device(how)
    return parser


if __name__ == "__main__":
    # Under its own name, by which the processes find what is sent to them.
    from benchmarks.pretrain import main as run

    sys.exit(run())
