"""One measurement: its options, and its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from benchmarks.engines.contest import Contest, Measured, Result
from benchmarks.engines.inputs import Selection
from benchmarks.engines.jobs import Contestant, Kind, Shape, TaskName
from benchmarks.engines.report import Report
from benchmarks.engines.setting import TASK_KINDS, Setting, Subject, forms
from benchmarks.harness.errors import BenchmarkError
from benchmarks.harness.machine import describe_machine

# A median of fewer is swayed by the first one.
_LEAST_ROUNDS: Final = 3
_FEW_ROUNDS: Final = (
    "fewer than 3 rounds: the first, in which some make kernels for lengths that are new, counts"
)


def present(contestants: Sequence[Contestant]) -> Iterator[Contestant | str]:
    """Yield the contestants whose packages are installed; for the others, advice."""
    for contestant in contestants:
        lacking = [name for name in contestant.modules if find_spec(name) is None]
        if lacking:
            yield (
                f"{contestant.name} is left out: {', '.join(lacking)} not installed; "
                f"pip install {contestant.install}"
            )
        else:
            yield contestant


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementOptions:
    """The options of a measurement.

    Attributes:
        kinds: of cases.
        shapes: of the fixed shapes.
        texts: files or folders; `questions`: files in SQuAD's format.
        rounds: turns of each contestant at each case.
        shape_s: for how long calls of a shape are repeated in a turn, at least.
    """

    subject: Subject
    output: Path
    contestants: Sequence[Contestant]
    kinds: Sequence[Kind]
    shapes: Sequence[Shape]
    texts: Sequence[Path]
    questions: Sequence[Path]
    num_texts: int
    num_questions: int
    rounds: int
    shape_s: float
    num_threads: int

    def cases(self, task: TaskName) -> list[str]:
        """The cases of a task, in order."""
        kinds = [kind for kind in TASK_KINDS[task] if kind in self.kinds]
        shapes = [str(shape) for shape in self.shapes]
        return [case for kind in kinds for case in (shapes if kind == "shapes" else [kind])]

    def entrants(self, task: TaskName) -> list[Contestant]:
        """The contestants that take part in cases of a task."""
        kinds = [kind for kind in TASK_KINDS[task] if kind in self.kinds]
        return [one for one in self.contestants if any(map(one.takes_part, kinds))]

    def tasks(self) -> list[TaskName]:
        """The tasks that somebody takes part in.

        Raises:
            BenchmarkError: there is none.
        """
        tasks = [task for task in TASK_KINDS if self.entrants(task)]
        if not tasks:
            raise BenchmarkError(
                f"none of the contestants takes part in {', '.join(self.kinds)}; "
                "leave --contestants or --cases out for all"
            )
        return tasks

    def num_units(self) -> int:
        """Forms, processes and turns, for the progress bar."""
        units = 0
        for task in self.tasks():
            entrants, own = self.entrants(task), set(TASK_KINDS[task])
            units += len({"checkpoint", *forms(task, entrants)})
            variants = [variant for one in entrants for variant in one.variants]
            units += sum(bool(own & set(variant.kinds)) for variant in variants)
            units += self.rounds * len(entrants) * len(self.cases(task))
        return units


def measure(options: MeasurementOptions, bar: tqdm[Any]) -> Report:
    """Prepare everything, measure, and return the report.

    Raises:
        BenchmarkError: nothing can be measured, or the model cannot be made.
        CorpusError: a file of texts or questions cannot be read.
        OSError: the output folder cannot be written.
    """
    machine = list(describe_machine(options.num_threads))
    options.output.mkdir(parents=True, exist_ok=True)
    setting = Setting(
        output=options.output.resolve(),
        num_threads=options.num_threads,
        subject=options.subject,
        bar=bar,
    )
    options = _without_absent(options, setting)
    tasks = options.tasks()
    bar.reset(options.num_units())
    setting.make_checkpoints(tasks)
    _check_shapes(options, setting.max_tokens)
    inputs = setting.choose_inputs(
        Selection(
            texts=options.texts,
            questions=options.questions,
            num_texts=options.num_texts,
            num_questions=options.num_questions if "question-answering" in tasks else 0,
            max_tokens=setting.max_tokens,
        )
    )
    if options.rounds < _LEAST_ROUNDS:
        setting.notes.append(_FEW_ROUNDS)
    measured = [_measure(options, setting, task) for task in tasks]
    return Report(
        machine=[*machine, _model_line(options, setting)],
        num_threads=options.num_threads,
        config=setting.config,
        num_labels=setting.num_labels,
        inputs=inputs,
        results=merged([result for one in measured for result in one.results]),
        peaks={case: peaks for one in measured for case, peaks in one.peaks.items()},
        others=max((one.others for one in measured if one.others is not None), default=None),
        disk=setting.disk,
        guesses="question-answering" in setting.random_heads,
        notes=[*setting.notes, *(f"{form}: {why}" for form, why in setting.missing.items())],
    )


def merged(results: Sequence[Result]) -> list[Result]:
    """One result a contestant, over all tasks."""
    merged_results: dict[str, Result] = {}
    for result in results:
        name = result.contestant.name
        before = merged_results.get(name)
        merged_results[name] = result if before is None else _both(before, result)
    return list(merged_results.values())


def _both(one: Result, other: Result) -> Result:
    return replace(
        one,
        turns={**one.turns, **other.turns},
        ways={**one.ways, **other.ways},
        batch_sizes={**one.batch_sizes, **other.batch_sizes},
        processes=[*one.processes, *other.processes],
        failures=[*one.failures, *other.failures],
    )


def _without_absent(options: MeasurementOptions, setting: Setting) -> MeasurementOptions:
    there: list[Contestant] = []
    for one in present(options.contestants):
        if isinstance(one, str):
            setting.notes.append(one)
            with setting.bar.external_write_mode():
                print(f"note: {one}")
        else:
            there.append(one)
    return replace(options, contestants=there)


def _measure(options: MeasurementOptions, setting: Setting, task: TaskName) -> Measured:
    entrants = options.entrants(task)
    setting.make_forms(task, entrants)
    contest = Contest(
        cases=options.cases(task),
        rounds=options.rounds,
        shape_s=options.shape_s,
        logs=setting.output,
        bar=setting.bar,
    )
    field = [(one, setting.jobs(task, one)) for one in entrants]
    return contest.run([each for each in field if each[1]], setting.peak_job(task))


def _check_shapes(options: MeasurementOptions, max_tokens: int) -> None:
    too_long = [str(shape) for shape in options.shapes if shape.length > max_tokens]
    if too_long and "shapes" in options.kinds:
        raise BenchmarkError(
            f"--shapes {' '.join(too_long)}: the model has {max_tokens} positions; leave them out"
        )


def _model_line(options: MeasurementOptions, setting: Setting) -> str:
    checkpoint, config = options.subject.checkpoint, setting.config
    name = (
        f"{options.subject.preset}, random weights"
        if checkpoint is None
        else checkpoint.resolve().name
    )
    return (
        f"ALBERT {name}: {config.num_layers} layers of {config.hidden_size}, vocabulary "
        f"{config.vocab_size:,}; medians of {options.rounds} rounds"
    )
