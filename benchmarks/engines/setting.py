"""The files that a measurement needs: checkpoints, the forms of the model, and inputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from tqdm import tqdm

from albert_serve.bundle.weights import read_header
from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.engines.inputs import Inputs, Selection, choose
from benchmarks.engines.jobs import Contestant, Job, Kind, TaskName, Variant
from benchmarks.engines.models import TOKENIZER_FILE, Plan, disk_bytes, make
from benchmarks.engines.report import form_key
from benchmarks.harness.errors import BenchmarkError
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
