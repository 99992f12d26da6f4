"""One measurement: its options, the files that it needs, and its report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from tqdm import tqdm

from albert_serve.bundle.weights import read_header
from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.engines.contest import Contest, Measured, Result
from benchmarks.engines.inputs import Inputs, Selection, choose
from benchmarks.engines.jobs import Contestant, Job, Kind, Shape, TaskName, Variant
from benchmarks.engines.models import TOKENIZER_FILE, Plan, disk_bytes, make
from benchmarks.engines.report import Report, form_key
from benchmarks.harness.errors import BenchmarkError
from benchmarks.harness.machine import describe_machine
from training.vocab import build_tokenizer

TASK_KINDS: Final[dict[TaskName, tuple[Kind, ...]]] = {
    "text-classification": ("shapes", "texts"),
    "question-answering": ("questions",),
}
_HEADS: Final[dict[TaskName, str]] = {
    "text-classification": "classifier.weight",
    "question-answering": "qa_outputs.weight",
}
_SPIECE_FILE: Final = "spiece.model"
_NO_MODEL: Final = Variant(name="", program="peak", form="", kinds=())
# A median of fewer is swayed by the first one.
_LEAST_ROUNDS: Final = 3
_FEW_ROUNDS: Final = (
    "fewer than 3 rounds: the first, in which some make kernels for lengths that are new, counts"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The model to run.

    Attributes:
        checkpoint: a Hugging Face directory; None: random weights.
        preset: their sizes.
        tokenizer: a `tokenizer.json` or `spiece.model`, for random weights.
    """

    checkpoint: Path | None
    preset: str
    tokenizer: Path


@dataclass(kw_only=True, slots=True)
class Setting:
    """The files and properties that a measurement has made.

    Attributes:
        output: the folder of everything that is written.
        config: the model's sizes.
        disk: bytes of each form of the model, by task and form.
        missing: why a form is not there, by task and form.
        random_heads: the tasks whose heads are not the checkpoint's.
        notes: remarks for the reader.
    """

    output: Path
    num_threads: int
    subject: Subject
    bar: tqdm[Any]
    config: AlbertConfig = field(default_factory=AlbertConfig)
    num_labels: int = 2
    disk: dict[str, int] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    random_heads: set[TaskName] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @property
    def inputs_file(self) -> Path:
        """The file of all processes' inputs."""
        return self.output / "inputs.json"

    @property
    def max_tokens(self) -> int:
        """The maximum length of a sequence."""
        return self.config.max_positions

    def folder(self, task: TaskName, form: str) -> Path:
        """Return the folder of a form of the model."""
        return self.output / "models" / task / form

    def make_checkpoints(self, tasks: Sequence[TaskName]) -> None:
        """Write the checkpoints and read their sizes.

        Raises:
            BenchmarkError: one cannot be made, or the tokenizer is not its own.
        """
        tokenizer = self._write_tokenizer()
        for task in tasks:
            self._look_at_head(task)
            plan = self._plan(task, "checkpoint", self.subject.checkpoint, tokenizer)
            self._make(plan)
        content = json.loads((self.folder(tasks[0], "checkpoint") / "config.json").read_bytes())
        self.config = AlbertConfig.from_hf(content)
        self.num_labels = len(content.get("id2label") or range(2))
        num_pieces = AlbertTokenizer.from_file(tokenizer).vocab_size
        if num_pieces > self.config.vocab_size:
            raise BenchmarkError(
                f"the tokenizer has {num_pieces} pieces, the model embeddings for "
                f"{self.config.vocab_size}; name the model's own with --tokenizer"
            )

    def choose_inputs(self, selection: Selection) -> Inputs:
        """Draw the inputs, and write them.

        Raises:
            BenchmarkError, CorpusError: see `inputs.choose`.
        """
        tokenizer = Tokenizer.from_file(str(self._tokenizer_file))
        inputs = choose(selection, tokenizer)
        inputs.write(self.inputs_file)
        return inputs

    def make_forms(self, task: TaskName, contestants: Sequence[Contestant]) -> None:
        """Make the forms that the contestants read; `missing` has the errors."""
        source = self.folder(task, "checkpoint")
        for form in forms(task, contestants):
            if form != "checkpoint":
                try:
                    self._make(self._plan(task, form, source, source / TOKENIZER_FILE))
                except BenchmarkError as error:
                    self.missing[form_key(task, form)] = str(error)

    def jobs(self, task: TaskName, contestant: Contestant) -> list[Job]:
        """Return the job of each variant of the contestant whose form exists."""
        kinds = TASK_KINDS[task]
        return [
            self._job(task, contestant.name, variant)
            for variant in contestant.variants
            if set(kinds) & set(variant.kinds) and form_key(task, variant.form) not in self.missing
        ]

    def peak_job(self, task: TaskName) -> Job:
        """Return the job of the process that measures the machine."""
        return self._job(task, "the machine", _NO_MODEL)

    @property
    def _tokenizer_file(self) -> Path:
        return self.output / "models" / TOKENIZER_FILE

    def _job(self, task: TaskName, contestant: str, variant: Variant) -> Job:
        return Job(
            contestant=contestant,
            variant=variant,
            task=task,
            model=self.folder(task, variant.form),
            tokenizer=self.folder(task, "checkpoint") / TOKENIZER_FILE,
            inputs=self.inputs_file,
            num_threads=self.num_threads,
            max_tokens=self.max_tokens,
        )

    def _plan(self, task: TaskName, form: str, source: Path | None, tokenizer: Path) -> Plan:
        return Plan(
            form=form,
            task=task,
            source=source,
            preset=self.subject.preset,
            tokenizer=tokenizer,
            inputs=self.inputs_file,
            target=self.folder(task, form),
            max_tokens=self.max_tokens,
            num_threads=self.num_threads,
        )

    def _make(self, plan: Plan) -> None:
        self.bar.set_postfix_str(f"{plan.task}: making {plan.form}")
        make(plan, self.output / f"make-{plan.task}-{plan.form}.log")
        self.disk[form_key(plan.task, plan.form)] = disk_bytes(plan.target)
        self.bar.update()

    def _write_tokenizer(self) -> Path:
        """All contestants' `tokenizer.json`."""
        source, file = self._tokenizer_source(), self._tokenizer_file
        file.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".model":
            build_tokenizer(source).save(str(file))
        else:
            AlbertTokenizer.from_file(source)
            file.write_bytes(source.read_bytes())
        return file

    def _tokenizer_source(self) -> Path:
        if self.subject.checkpoint is None:
            return self.subject.tokenizer
        for name in (TOKENIZER_FILE, _SPIECE_FILE):
            if (self.subject.checkpoint / name).is_file():
                return self.subject.checkpoint / name
        raise BenchmarkError(
            f"{self.subject.checkpoint} has neither {TOKENIZER_FILE} nor {_SPIECE_FILE}; "
            "a checkpoint is a folder with config.json, model.safetensors and one of them"
        )

    def _look_at_head(self, task: TaskName) -> None:
        if self.subject.checkpoint is None:
            self.random_heads.add(task)
            return
        weights = self.subject.checkpoint / "model.safetensors"
        if weights.is_file() and _HEADS[task] not in read_header(weights):
            self.random_heads.add(task)
            self.notes.append(
                f"{self.subject.checkpoint.name} has no head for {task}: a random one"
            )


def forms(task: TaskName, contestants: Sequence[Contestant]) -> list[str]:
    """The forms of the model that the contestants read for a task, each once."""
    kinds = set(TASK_KINDS[task])
    variants = (variant for contestant in contestants for variant in contestant.variants)
    return list(dict.fromkeys(one.form for one in variants if kinds & set(one.kinds)))


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
