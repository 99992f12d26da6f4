"""Speed of inference with this package, compared with other runtimes.

Runs one ALBERT with `transformers`, ONNX Runtime, OpenVINO and this package's engine. Each runtime
has its own process and the same number of threads. The processes take turns on the same inputs:
batches of fixed shapes, and a stream of texts to tokenise. On a GPU, the precision is fp16. Prints
medians over rounds, ratios within rounds, memory, load times, and the largest difference from the
probabilities of `transformers` in fp32. Writes `tables.md` and `results.json` into the output
folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from tqdm.auto import tqdm

from albert_serve.config import PRESETS, AlbertConfig
from albert_serve.settings import num_usable_cpus
from albert_serve.terminal import make_parser
from benchmarks.engine.contestants import (
    CONTESTANTS,
    KINDS,
    TEXTS,
    Contestant,
    ModelJob,
    parse_shape,
)
from benchmarks.engine.models import TOKENIZER_FILE, ConversionPlan, convert, size_on_disk
from benchmarks.engine.player import serve
from benchmarks.engine.tables import EngineReport, EngineResult, markdown
from benchmarks.harness.checkpoint import make_checkpoint
from benchmarks.harness.page import describe_machine, write_results
from benchmarks.harness.process import BenchmarkError, Worker
from benchmarks.harness.texts import WIKI, Text, draw_texts
from training.errors import report_errors
from training.options.config import add_device

_NUM_CALIBRATION: Final = 64
_EXAMPLES: Final = r"""examples:
  python -m benchmarks.engine
  python -m benchmarks.engine --texts imdb/test.jsonl.xz --num-texts 96
  python -m benchmarks.engine --preset large --cases shapes --contestants onnxruntime ours-fp32
  python -m benchmarks.engine --shapes 1x32 1x128 --num-texts 16 --rounds 1
  python -m benchmarks.engine --device cuda --shapes 1x32 8x128 32x512 --num-texts 1024

Nothing else should run on the machine. Contestants whose packages are missing are skipped, with a
note; to include all, run: pip install openvino nncf onnxscript
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    options = _parser().parse_args(arguments)
    if options.contestants is None:
        device = options.device.type
        options.contestants = [
            key for key, contestant in CONTESTANTS.items() if device in contestant.devices
        ]
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    bar: tqdm[Any]
    with tqdm(disable=None, unit="turn") as bar:
        report = _measure(options, bar)
    tables = markdown(report)
    write_results(options.output, report, tables)
    print(tables)
    print(f"{options.output / 'results.json'} has every turn")
    return 0


def _measure(options: argparse.Namespace, bar: tqdm[Any]) -> EngineReport:
    machine = list(describe_machine(options.threads))
    config = PRESETS[options.preset]
    shapes = list(dict.fromkeys(options.shapes)) if "shapes" in options.cases else []
    for shape in shapes:
        if parse_shape(shape)[1] > config.max_positions:
            raise BenchmarkError(
                f"--shapes {shape}: the model has {config.max_positions} positions."
            )
    cases = [*shapes, *([TEXTS] if "texts" in options.cases else [])]
    named = [CONTESTANTS[key].on(options.device.type) for key in options.contestants]
    contestants = [entry for entry in named if set(entry.kinds) & set(options.cases)]
    folder = (options.output / "models").resolve()
    checkpoint = make_checkpoint(config, folder / "checkpoint", "text-classification")
    tokenizer = Tokenizer.from_file(str(checkpoint / TOKENIZER_FILE))
    num_texts = options.num_texts + _NUM_CALIBRATION
    texts = draw_texts(options.texts, tokenizer, num_texts, config.max_positions)
    stream, calibration = texts[: options.num_texts], texts[options.num_texts :]
    disk, notes = {"checkpoint": size_on_disk(checkpoint)}, list[str]()
    formats = dict.fromkeys(contestant.model_format for contestant in contestants)
    for model_format in formats.keys() - disk.keys():
        bar.set_postfix_str(f"making {model_format}")
        plan = ConversionPlan(
            model_format=model_format,
            checkpoint=checkpoint,
            target=folder / model_format,
            max_tokens=config.max_positions,
            calibration=[text.text for text in calibration or stream],
        )
        try:
            disk[model_format] = convert(plan)
        except ImportError as error:
            notes.append(f"{model_format} is skipped: {error}")
    jobs = [
        _job(contestant, folder, stream, options)
        for contestant in contestants
        if contestant.model_format in disk
    ]
    return EngineReport(
        machine=[*machine, _describe_model(options, config)],
        cases=cases,
        lengths=[len(text.ids) for text in stream],
        results=_take_turns(jobs, cases, options, bar),
        disk=disk,
        notes=notes,
    )


def _take_turns(
    jobs: Sequence[ModelJob], cases: Sequence[str], options: argparse.Namespace, bar: tqdm[Any]
) -> list[EngineResult]:
    """Measure contestants in turns. A contestant that fails is skipped from then on."""
    bar.reset(len(jobs) * len(cases) * (options.rounds + 1))
    with ExitStack() as stack:
        started = []
        for job in jobs:
            bar.set_postfix_str(f"{job.contestant.name} starts")
            started.append(_open(job, options.output, stack))
        # The first round does not count: it warms caches and compiles kernels for new lengths.
        for number in range(options.rounds + 1):
            for case in cases:
                bar.set_postfix_str(f"round {number}, {case}")
                for result, process in started:
                    _take_turn(result, process, case, counts=number > 0)
                    bar.update()
        return [result for result, _ in started]


def _open(job: ModelJob, logs: Path, stack: ExitStack) -> tuple[EngineResult, Worker]:
    name = job.contestant.name
    log = logs / f"{name.replace(',', '').replace(' ', '-')}.log"
    process = Worker(name, serve, job, environment=job.environment, log=log)
    result = EngineResult(contestant=job.contestant)
    try:
        result.load_s = stack.enter_context(process).receive()
    except BenchmarkError as error:
        result.failure = str(error)
    return result, process


def _take_turn(result: EngineResult, process: Worker, case: str, *, counts: bool) -> None:
    kind = TEXTS if case == TEXTS else "shapes"
    if result.failure or kind not in result.contestant.kinds:
        return
    try:
        turn = process.ask(case)
    except BenchmarkError as error:
        result.failure = str(error)
        result.turns.clear()
        return
    if counts:
        result.turns.setdefault(case, []).append(turn)


def _job(
    contestant: Contestant, folder: Path, stream: Sequence[Text], options: argparse.Namespace
) -> ModelJob:
    return ModelJob(
        contestant=contestant,
        model=folder / contestant.model_format,
        tokenizer=folder / "checkpoint" / TOKENIZER_FILE,
        num_threads=options.threads,
        device=options.device.type,
        max_tokens=PRESETS[options.preset].max_positions,
        texts=[text.text for text in stream],
        pool=[token for text in stream for token in text.ids[1:-1]],
        shape_s=options.turn,
    )


def _describe_model(options: argparse.Namespace, config: AlbertConfig) -> str:
    sizes = f"{config.num_layers} layers of {config.hidden_size}, vocabulary {config.vocab_size:,}"
    on_gpu = options.device.type == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    rounds = f"medians of {options.rounds} rounds on {device}"
    return f"ALBERT {options.preset}, random weights: {sizes}; {rounds}"


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m benchmarks.engine", __doc__, _EXAMPLES)
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        default=Path("runs/bench-engine"),
        help="folder of the results (default: %(default)s)",
    )
    add(
        "--preset",
        choices=list(PRESETS),
        default="base",
        help="sizes of the model (default: %(default)s)",
    )
    names = list(CONTESTANTS)
    contestants_help = "contestants (default: all of the device)"
    add("--contestants", nargs="+", choices=names, help=contestants_help)
    add("--cases", nargs="+", choices=KINDS, default=list(KINDS), help="cases (default: all)")
    shapes = ["1x8", "1x32", "1x128", "4x128", "1x512"]
    add(
        "--shapes",
        nargs="+",
        metavar="ROWSxTOKENS",
        default=shapes,
        help=f"shapes of a call (default: {' '.join(shapes)})",
    )
    texts_help = "text, or JSONL with a field `text` (default: a few articles)"
    add("--texts", nargs="+", type=Path, metavar="FILE", default=[WIKI], help=texts_help)
    add(
        "--num-texts",
        type=int,
        default=64,
        help="number of texts in the stream (default: %(default)s)",
    )
    add(
        "--rounds", type=int, default=3, help="turns per contestant and case (default: %(default)s)"
    )
    add("--turn", type=float, default=0.3, help="minimum seconds per turn (default: %(default)s)")
    add(
        "--threads",
        type=int,
        default=num_usable_cpus(),
        help="threads of a contestant (default: %(default)s)",
    )
    add_device(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
