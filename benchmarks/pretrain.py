"""Speed of pretraining with this package, against `transformers` and the hardware's peak.

Trains the same model on the same text with `training.pretrain` and with
`transformers.AlbertForPreTraining` and its `Trainer`, in bf16 (fp32 on a CPU without it), compiled
and with AdamW, in turns, and prints real tokens a second, MFU, memory and how many times faster
ours is, as the median over rounds. Writes `results.json` and `tables.md` into the output folder.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

import torch
from tqdm import tqdm

from albert_serve.config import PRESETS
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.harness.errors import BenchmarkError
from benchmarks.pretraining.contest import Contest, hf_jobs, loading_rate
from benchmarks.pretraining.data import write
from benchmarks.pretraining.jobs import Case, HfSettings, Job, Rival
from benchmarks.pretraining.report import Report, flops_per_token, hardware, save
from training.data.shards import Shards
from training.errors import report_errors
from training.loop.flops import peak_flops
from training.prepare import prepare
from training.run.options import add_device, parse_count, parse_duration, parse_positive
from training.system.command_line import make_parser

_REPOSITORY: Final = Path(__file__).parents[1]
_CURVES: Final = {
    "length": ["small@64", "small@128", "small@256", "small@512"],
    "batch": ["small@128x8", "small@128x16", "small@128x32", "small@128x64", "small@128x128"],
    "size": ["small@128", "base@128", "large@128"],
}
# Tokens a step: more was no faster.
_BATCH_TOKENS: Final = {"cpu": 4096, "cuda": 65536}
_BATCHES_OF_EXAMPLES: Final = 32
_SMALL_VOCAB: Final = 12000
_SHARDS: Final = "shards"

_EXAMPLES: Final = r"""examples:
  python -m benchmarks.pretrain
  python -m benchmarks.pretrain --corpus wiki/*.jsonl.xz --tokenizer vocab/ --cases base@512
  python -m benchmarks.pretrain --curve size --against sdpa --rounds 3
"""


def _case(text: str, options: argparse.Namespace, num_pieces: int) -> Case:
    """The case of a word such as `base@128` or, with rows a step, `base@128x32`."""
    match = re.fullmatch(r"(\w+)@(\d+)(?:x(\d+))?", text)
    if match is None or match[1] not in PRESETS:
        raise BenchmarkError(
            f"--cases {text}: write SHAPE@LENGTH or SHAPE@LENGTHxROWS, "
            f"where SHAPE is one of {', '.join(PRESETS)}"
        )
    length = int(match[2])
    tokens = options.batch_tokens or _BATCH_TOKENS[options.device.type]
    vocab_size = _SMALL_VOCAB if match[1] == "small" else PRESETS[match[1]].vocab_size
    return Case(
        shape=match[1],
        vocab_size=max(vocab_size, num_pieces),
        length=length,
        num_rows=int(match[3] or max(1, tokens // length)),
    )


def _candidates(case: Case, options: argparse.Namespace) -> list[HfSettings]:
    """The settings of `transformers` among which the fastest is looked for."""
    tokens = options.hf_batch_tokens or [case.num_rows * case.length * n for n in (1, 2)]
    settings = [HfSettings(num_rows=max(1, number // case.length)) for number in tokens]
    return [*settings, replace(settings[0], padding="grouped")]


def _rival(name: Rival, fastest: HfSettings) -> HfSettings:
    if name == "eager-kept":
        return replace(fastest, attention="eager", keeps_memory=True)
    return replace(fastest, keeps_memory=name == "sdpa-kept")


def _measure(
    case: Case, shards: Shards, options: argparse.Namespace, contest: Contest, peak: float
) -> Report:
    folder = options.output / f"{case.shape}-{case.length}"
    num_examples = _BATCHES_OF_EXAMPLES * case.num_rows
    arrays = write(shards, options.tokenizer, folder, length=case.length, num_examples=num_examples)
    ours = Job(
        case=case,
        hf=None,
        shards=(options.output / _SHARDS).resolve(),
        examples=folder.resolve(),
        tokenizer=options.tokenizer.resolve(),
        device=options.device.type,
        num_threads=options.threads,
        compiles=options.compile,
    )
    rivals: list[Job] = []
    if options.against:
        best = contest.fastest(hf_jobs(ours, _candidates(case, options)))
        assert best.hf is not None
        rivals = hf_jobs(ours, [_rival(name, best.hf) for name in options.against])
    return Report(
        case=case,
        results=contest.measure([ours, *rivals]),
        peak_flops=peak,
        fill=arrays.fill,
        flops_per_token=flops_per_token(case, arrays),
        loading=loading_rate(ours),
    )


def _num_units(cases: Sequence[Case], options: argparse.Namespace) -> int:
    """Starts of children and turns, for the progress bar."""
    searched = len(_candidates(cases[0], options)) if options.against else 0
    per_case: int = 3 * searched + (1 + len(options.against)) * (options.rounds + 2)
    return len(cases) * per_case


def _run(options: argparse.Namespace) -> int:
    torch.set_num_threads(options.threads)
    num_pieces = AlbertTokenizer.from_file(options.tokenizer / "tokenizer.json").vocab_size
    names = _CURVES[options.curve] if options.curve else options.cases
    cases = [_case(name, options, num_pieces) for name in names]
    options.output.mkdir(parents=True, exist_ok=True)
    shards = prepare(options.corpus, options.tokenizer / "tokenizer.json", options.output / _SHARDS)
    peak = options.peak_tflops * 1e12 if options.peak_tflops else peak_flops(options.device)
    machine = hardware(options.device.type, options.threads, peak)
    print(machine)
    reports: list[Report] = []
    bar: tqdm[Any]
    with tqdm(total=_num_units(cases, options), disable=None, unit="turn") as bar:
        contest = Contest(rounds=options.rounds, turn_s=options.turn, logs=options.output, bar=bar)
        for case in cases:
            reports.append(_measure(case, shards, options, contest, peak))
            save(reports, machine, options.output)
            with bar.external_write_mode():
                print(f"\n{reports[-1].markdown()}")
    print(f"{options.output / 'results.json'} has every turn")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.pretrain", __doc__, _EXAMPLES)
    add = parser.add_argument
    add(
        "--corpus",
        nargs="+",
        type=Path,
        default=[_REPOSITORY / "tests" / "data" / "wiki.jsonl"],
        help="files of text (a few articles that lie here)",
    )
    add(
        "--tokenizer",
        type=Path,
        default=_REPOSITORY / "models" / "albert-small-en",
        help="folder with tokenizer.json (the shipped model's)",
    )
    add("--output", type=Path, default=Path("runs/benchmark-pretrain"), help="(%(default)s)")
    what = parser.add_argument_group("what is trained")
    what.add_argument(
        "--cases",
        nargs="+",
        default=["small@128", "base@128"],
        help="SHAPE@LENGTH, or SHAPE@LENGTHxROWS with the rows of a step (small@128 base@128)",
    )
    what.add_argument("--curve", choices=list(_CURVES), help="cases along one of these instead")
    what.add_argument("--batch-tokens", type=parse_count, help="of a step (4096 or, on GPU, 65536)")
    what.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    how = parser.add_argument_group("how it is measured")
    how.add_argument(
        "--against",
        nargs="*",
        choices=get_args(Rival),
        default=["sdpa", *([] if torch.cuda.is_available() else ["eager-kept"])],
        help="transformers with SDPA as it comes; with malloc told to keep memory; and with eager "
        "attention, too (%(default)s)",
    )
    how.add_argument(
        "--hf-batch-tokens",
        nargs="+",
        type=parse_count,
        help="of a step of transformers: the best is looked for (ours, and twice as many)",
    )
    how.add_argument("--rounds", type=parse_count, default=5, help="turns that count (5)")
    how.add_argument("--turn", type=parse_duration, default=8.0, help="length of a turn (8s)")
    how.add_argument(
        "--peak-tflops",
        type=parse_positive,
        help="what MFU counts from (the data sheet's, or measured: too little on a busy machine)",
    )
    how.add_argument("--threads", type=parse_count, default=torch.get_num_threads())
    add_device(how)
    return parser


if __name__ == "__main__":
    sys.exit(main())
