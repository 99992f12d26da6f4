"""Accuracy and speed of SST-2 by the number of layers, of models with `--adaptive-depth`.

Exports the runs that `python -m benchmarks.results --tasks sst2-early-exit` trained, and classifies
the held-out texts with every `max_layers` and `patience`, in turns, with the engine of the service.
Prints a table; `--write` puts it and a plot into docs/.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from albert_serve.api.schemas import TextClassificationParameters
from albert_serve.bundle.manifest import Bundle
from albert_serve.files import write_atomically
from albert_serve.progress import progress
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks.load import load_tasks
from albert_serve.tasks.text_classification import TextClassification
from benchmarks.harness.page import bullets, describe_machine, table, write_between
from benchmarks.harness.process import REPOSITORY, BenchmarkError
from export.write import export_bundle
from training.data.labelled.texts import LabelledText
from training.errors import report_errors
from training.glue.files import dev_files, read_task
from training.glue.tasks import TASKS
from training.run.options import parse_count
from training.system.command_line import make_parser

_DOCS: Final = REPOSITORY / "docs"
_IMAGE: Final = "adaptive-depth.png"
_BEGIN: Final = "<!-- written by python -m benchmarks.results.early_exit: begin -->"
_END: Final = "<!-- written by python -m benchmarks.results.early_exit: end -->"
_HEADINGS: Final = ("layers", "accuracy", "lowest to highest", "throughput", "lowest to highest")
_EXAMPLES: Final = r"""examples:
  python -m benchmarks.results.early_exit --data data/ --output runs/results --write
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitFigures:
    """A setting's figures of one model.

    Attributes:
        accuracy: in percent.
        speed: texts per second of processor time, over that with all layers: the median over
            rounds.
    """

    accuracy: float
    speed: float


def _limits(num_layers: int) -> dict[str, dict[str, int]]:
    """Return the parameters to measure by title: all layers first, fewer, then each patience."""
    fewer = range(num_layers - 1, 0, -1)
    return {
        f"all {num_layers}": {"max_layers": num_layers},
        **{str(number): {"max_layers": number} for number in fewer},
        **{f"patience {number}": {"patience": number} for number in fewer},
    }


def measure(
    bundle: Bundle, texts: Sequence[LabelledText], *, num_rounds: int
) -> dict[str, ExitFigures]:
    """Return the figures of every setting by its title; all take turns."""
    engine = Engine.open(bundle, RuntimeOptions(device="cpu", num_threads=1, spinning=False))
    task = load_tasks(bundle)["text-classification"]
    assert isinstance(task, TextClassification)
    jobs = {
        title: _job(engine, task, texts, limits)
        for title, limits in _limits(bundle.config.num_layers).items()
    }
    accuracies: dict[str, float] = {}
    seconds: dict[str, list[float]] = {title: [] for title in jobs}
    for number in progress(range(num_rounds + 1), title="rounds", unit="rounds"):
        for title, job in jobs.items():
            began = time.process_time()
            accuracies[title] = job()
            if number:  # the first one warms caches
                seconds[title].append(time.process_time() - began)
    whole = next(iter(seconds.values()))
    return {
        title: ExitFigures(
            accuracy=accuracies[title],
            speed=statistics.median(a / b for a, b in zip(whole, seconds[title], strict=True)),
        )
        for title in jobs
    }


def _job(
    engine: Engine,
    task: TextClassification,
    texts: Sequence[LabelledText],
    limits: Mapping[str, int],
) -> Callable[[], float]:
    """Return a function that classifies the texts and returns the accuracy in percent."""
    parameters = TextClassificationParameters.model_validate(limits)
    prepared = [task.prepare(text.text, parameters) for text in texts]
    inputs = [each.inputs[0] for each in prepared]

    def run() -> float:
        logits = engine.run(inputs)
        right = sum(
            int(each.argmax()) == text.label for each, text in zip(logits, texts, strict=True)
        )
        return 100 * right / len(texts)

    return run


def _rows(models: Sequence[Mapping[str, ExitFigures]]) -> Iterator[list[str]]:
    for title in models[0]:
        accuracies = [model[title].accuracy for model in models]
        speeds = [model[title].speed for model in models]
        yield [
            title,
            f"{statistics.median(accuracies):.1f}",
            f"{min(accuracies):.1f} to {max(accuracies):.1f}",
            f"{statistics.median(speeds):.2f}x",
            f"{min(speeds):.2f}x to {max(speeds):.2f}x",
        ]


def draw(models: Sequence[Mapping[str, ExitFigures]], file: Path) -> None:
    """Draw accuracy over throughput, medians of the models, a curve for each kind of limit.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 4), layout="constrained")
    ax = figure.add_subplot()
    curves = {"max_layers": ("#555555", "fewer layers"), "patience": ("#0072B2", "by patience")}
    for kind, (colour, label) in curves.items():
        titles = [title for title in models[0] if title.startswith("patience") == (kind[0] == "p")]
        points = [
            (
                statistics.median(model[title].speed for model in models),
                statistics.median(model[title].accuracy for model in models),
            )
            for title in titles
        ]
        xs, ys = zip(*points, strict=True)
        ax.plot(xs, ys, color=colour, marker="o", markersize=4, label=label)
        for title, point in zip(titles, points, strict=True):
            short = title.removeprefix("patience ")
            ax.annotate(short, point, (4, 4), textcoords="offset points", fontsize=8, color=colour)
    ax.set(xlabel="throughput, of that with all layers", ylabel="accuracy on SST-2's dev file, %")
    ax.legend(frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    write_atomically(file, content.getvalue())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    runs = sorted((options.output / "sst2-early-exit").glob("seed-*/figures.json"))
    if not runs:
        raise BenchmarkError(
            f"{options.output} has no finished run of sst2-early-exit; train them with "
            "python -m benchmarks.results --tasks sst2-early-exit"
        )
    task = TASKS["sst2"]
    files = dev_files(task, options.data / "sst2")
    (texts,) = read_task(task, files).texts.values()
    models = [
        measure(
            export_bundle(run.parent / "checkpoint", run.parent / "bundle", overwrite=True).bundle,
            texts,
            num_rounds=options.rounds,
        )
        for run in runs
    ]
    text = _text(models, len(texts))
    print(text)
    if options.write is not None:
        draw(models, options.write / _IMAGE)
        write_between(options.write / "results.md", _BEGIN, _END, text)
    return 0


def _text(models: Sequence[Mapping[str, ExitFigures]], num_texts: int) -> str:
    title = f"{len(models)} models (seeds), {num_texts} texts in batches of like lengths, fp32:"
    lines = [
        title,
        "",
        table(_HEADINGS, _rows(models)),
        "",
        f"![Accuracy over throughput]({_IMAGE})",
        "",
        bullets(describe_machine(1)),
    ]
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.results.early_exit", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="with the folder sst2/")
    add("--output", type=Path, default=Path("runs/results"), help="with the runs (%(default)s)")
    add("--rounds", type=parse_count, default=7, help="turns of each setting (%(default)s)")
    add(
        "--write",
        nargs="?",
        type=Path,
        const=_DOCS,
        metavar="FOLDER",
        help="put the table and the plot into results.md of a folder (docs/)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
