"""Batch scoring against the engine alone, and against pipelines of `transformers`.

Classifies texts with `albert-serve score`, in fp32 and int8, and measures the same texts with
nothing but the engine, and a sample of them with `transformers`: its pipeline in fp32, and the
model in bf16 (autocast). Every measurement is in a process of its own, one after another. Speeds
are tokens a second, without padding, tokenisation included (but of the engine alone); a job's time
is without that of a job of one text, which starts a process and opens the model. Prints the table,
and with `--write` puts it into docs/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from albert_serve.api.schemas import TextClassificationParameters
from albert_serve.bundle.manifest import TOKENIZER_FILE, Bundle
from albert_serve.config import PRESETS
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions, num_usable_cpus
from albert_serve.tasks.load import load_tasks
from benchmarks.engine.contestants import CONTESTANTS, Contestant, ModelJob
from benchmarks.engine.player import open_player, plain_encoder
from benchmarks.harness.checkpoint import make_checkpoint
from benchmarks.harness.page import bullets, describe_machine, table, write_between
from benchmarks.harness.process import REPOSITORY, BenchmarkError, run_in_process
from export.bundle import export_bundle
from training.data.corpus import read_documents
from training.errors import report_errors
from training.system.command_line import make_parser

_PAGE: Final = REPOSITORY / "docs" / "measurements.md"
_BEGIN: Final = "<!-- speed: python -m benchmarks.score --texts FILE --write -->"
_END: Final = "<!-- end of speed -->"
_TASK: Final = "text-classification"
_PRECISIONS: Final = ("fp32", "int8")
# In the table of docs/measurements.md by these batch sizes: the fastest of 1, 2, 4, 8, 16 and 32.
_PEERS: Final = {
    "pipeline fp32, batch 1": CONTESTANTS["pipeline-1"],
    "bf16 autocast, batch 8": Contestant(
        name="bf16 autocast",
        module="hf",
        form="checkpoint",
        batch_size=8,
        settings={"dtype": "autocast"},
    ),
}
_MAX_TOKENS: Final = 512
_ENGINE_WINDOW: Final = 1024
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.score --texts imdb/test.jsonl.xz --num-texts 500
  python -m benchmarks.score --texts imdb/test.jsonl.xz --write

Nothing else should run on the machine meanwhile.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedJob:
    """The measurement of one process.

    Attributes:
        model: the folder of a bundle, or of a checkpoint for `transformers`.
        texts: JSONL, one `{"text"}` a line.
    """

    name: str
    model: Path
    texts: Path
    num_threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _ScoringSpeed:
    """The speed of a process."""

    name: str
    num_texts: int
    num_tokens: int
    duration_s: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.duration_s

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens by the processors' time, which other programs change little."""
        return self.num_tokens / self.cpu_s


def measure_score(job: SpeedJob) -> _ScoringSpeed:
    """Measure `albert-serve score`, from its file to its file, less a job of one text."""
    lines = job.texts.read_text(encoding="utf-8").splitlines(keepends=True)
    first = job.texts.with_name("first.jsonl")
    first.write_text(lines[0], encoding="utf-8")
    start_s, start_cpu_s, one = _timed_score(job, first)
    all_s, all_cpu_s, summary = _timed_score(job, job.texts)
    if summary["num_errors"]:
        raise BenchmarkError(f"{summary['num_errors']} errors; the first: {summary['first_error']}")
    return _ScoringSpeed(
        name=job.name,
        num_texts=summary["num_rows"],
        num_tokens=summary["num_tokens"] - one["num_tokens"],
        duration_s=all_s - start_s,
        cpu_s=all_cpu_s - start_cpu_s,
    )


def _timed_score(job: SpeedJob, source: Path) -> tuple[float, float, dict[str, Any]]:
    """Return seconds, seconds of processors, and the summary."""
    output, summary = (source.with_name(f"scored.{name}") for name in ("jsonl", "json"))
    command = [
        *(sys.executable, "-m", "albert_serve", "score", str(source), str(output)),
        *("--task", _TASK, "--bundle", str(job.model), "--restart", "--keep", ""),
        *("--parameters", '{"truncation": true}', "--summary", str(summary)),
        *("--threads", str(job.num_threads), "--device", "cpu"),
    ]
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ended = subprocess.run(command, cwd=REPOSITORY, check=False, capture_output=True, text=True)
    duration_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode:
        raise BenchmarkError(f"the job ended with {ended.returncode}: {ended.stderr.strip()}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return duration_s, cpu_s, json.loads(summary.read_bytes())


def _timed(job: SpeedJob, run: Callable[[], object], lengths: Sequence[int]) -> _ScoringSpeed:
    """Time a run over texts of these numbers of tokens."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    run()
    return _ScoringSpeed(
        name=job.name,
        num_texts=len(lengths),
        num_tokens=sum(lengths),
        duration_s=time.perf_counter() - began_s,
        cpu_s=time.process_time() - began_cpu_s,
    )


def measure_engine(job: SpeedJob) -> _ScoringSpeed:
    """Measure the engine on inputs that are tokenised before, one of each text."""
    bundle = Bundle.open(job.model)
    engine = Engine.open(bundle, RuntimeOptions(device="cpu", num_threads=job.num_threads))
    task = load_tasks(bundle)[_TASK]
    parameters = TextClassificationParameters(truncation="truncate")
    texts = read_documents([job.texts])
    inputs = [one for text in texts for one in task.prepare(text, parameters).inputs]

    def run() -> None:
        for start in range(0, len(inputs), _ENGINE_WINDOW):
            engine.run(inputs[start : start + _ENGINE_WINDOW])

    return _timed(job, run, [len(one.ids) for one in inputs])


def measure_peer(job: SpeedJob) -> _ScoringSpeed:
    """Measure `transformers` on texts in the order of length."""
    contestant, tokenizer = _PEERS[job.name], job.model / TOKENIZER_FILE
    player = open_player(
        ModelJob(
            contestant=contestant,
            model=job.model,
            tokenizer=tokenizer,
            num_threads=job.num_threads,
            max_tokens=_MAX_TOKENS,
        )
    )
    texts = sorted(read_documents([job.texts]), key=len)
    player.process(texts[:4], contestant.batch_size)
    lengths = [len(ids) for ids in plain_encoder(tokenizer, _MAX_TOKENS)(texts)]
    return _timed(job, lambda: player.process(texts, contestant.batch_size), lengths)


_MEASURES: Final = {"engine": measure_engine, "job": measure_score}


def speed_tables(speeds: Sequence[_ScoringSpeed], notes: Sequence[str]) -> str:
    """Return the table of all speeds, and the notes, in Markdown."""
    named = {speed.name: speed for speed in speeds}
    peers = [named[name] for name in _PEERS]

    def rates(rate: float, of_peers: Iterator[float]) -> list[str]:
        return [f"{rate:.0f}", *(f"{rate / other:.2f}" for other in of_peers)]

    rows = [
        [
            speed.name,
            str(speed.num_texts),
            *rates(speed.tokens_per_s, (peer.tokens_per_s for peer in peers)),
            *rates(speed.tokens_per_cpu_s, (peer.tokens_per_cpu_s for peer in peers)),
        ]
        for speed in speeds
    ]
    shares = [
        f"{kind}: the job has {100 * job.tokens_per_s / engine.tokens_per_s:.1f}% of the engine's "
        f"throughput, {100 * job.tokens_per_cpu_s / engine.tokens_per_cpu_s:.1f}% by CPU time"
        for kind in _PRECISIONS
        for job, engine in [(named[f"job {kind}"], named[f"engine {kind}"])]
    ]
    columns = ("x pipeline", "x bf16")
    headings = ["", "texts", "tokens/s", *columns, "tokens/CPU s", *columns]
    return f"{table(headings, rows)}\n\n{bullets([*shares, *notes])}\n"


def _measure_speeds(options: argparse.Namespace) -> str:
    folder: Path = options.output
    machine = list(describe_machine(options.threads))
    texts = list(read_documents([options.texts]))
    num_all = len(texts)
    texts = _spread(texts, options.num_texts or num_all)
    every = _write_texts(texts, folder / "texts.jsonl")
    sample = _write_texts(_spread(texts, options.num_peer_texts), folder / "sample.jsonl")
    models = _make_models(options)

    def measure(name: str, form: str, file: Path) -> _ScoringSpeed:
        job = SpeedJob(
            name=name,
            model=models[form],
            texts=file,
            num_threads=options.threads,
        )
        speed = run_in_process(_MEASURES.get(name.partition(" ")[0], measure_peer), job)
        print(f"{name}: {speed.tokens_per_s:.0f} tokens/s", flush=True)
        return speed

    speeds = [measure(peer, "checkpoint", sample) for peer in _PEERS]
    for precision in _PRECISIONS:
        form = f"bundle-{precision}"
        speeds += [measure(f"{kind} {precision}", form, every) for kind in _MEASURES]
    of_all = f"{len(texts)} of the {num_all} texts of {options.texts.name}"
    cut = f"{options.preset} with random weights, texts cut to {_MAX_TOKENS} tokens"
    return speed_tables(speeds, [f"{of_all}; {cut}", *machine])


def _spread(texts: Sequence[str], count: int) -> list[str]:
    """Return so many of the texts, spread evenly over them; all if there are not more."""
    count = min(count, len(texts))
    return [texts[number * len(texts) // count] for number in range(count)]


def _write_texts(texts: Sequence[str], file: Path) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return file


def _make_models(options: argparse.Namespace) -> dict[str, Path]:
    """Make a checkpoint at random, and its bundles."""
    folder: Path = options.output.resolve()
    checkpoint = make_checkpoint(PRESETS[options.preset], folder / "checkpoint", _TASK)
    made = {"checkpoint": checkpoint}
    for precision in _PRECISIONS:
        target = folder / f"bundle-{precision}"
        export_bundle(checkpoint, target, precision=precision, overwrite=True)
        made[target.name] = target
    return made


def _run(options: argparse.Namespace) -> int:
    options.output.mkdir(parents=True, exist_ok=True)
    text = _measure_speeds(options)
    print(f"\n{text}")
    if options.write:
        write_between(_PAGE, _BEGIN, _END, text)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m benchmarks.score", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--texts", type=Path, required=True, help="JSONL with a `text`, or text; compressed or not")
    add("--num-texts", type=int, help="a sample of so many, spread evenly (all)")
    add("--num-peer-texts", type=int, default=96, help="of transformers (%(default)s)")
    add("--preset", choices=list(PRESETS), default="base", help="sizes (%(default)s)")
    add("--threads", type=int, default=num_usable_cpus(), help="(%(default)s)")
    add("--output", type=Path, default=Path("runs/bench-score"), help="(%(default)s)")
    add("--write", action="store_true", help=f"put the table into {_PAGE.name}")
    return parser


if __name__ == "__main__":
    # Imported by its name, because processes unpickle the jobs by it.
    from benchmarks.score import main as run

    sys.exit(run())
