"""Distillation: its configuration, and how a teacher teaches the student of a pretraining job."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, replace
from typing import Annotated, Any, Final, Literal

import numpy as np
import torch

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import LossName
from training.data.shards import Shards
from training.data.streams import PackedStream
from training.distillation.alignment import Aligner
from training.distillation.batches import DistilCollator
from training.distillation.losses import DistillationLoss, LayerPairs, student_states
from training.distillation.start import (
    check_start,
    default_layers,
    shared_pieces,
    sizes_of,
    start_from_teacher,
)
from training.distillation.teacher import Teacher, TeacherError, describe_model
from training.errors import RunError
from training.losses import LOSS_OF, LossFunction
from training.model.heads import AlbertForTasks, head_sizes
from training.options.flags import Options, flag
from training.options.values import Count, Parsed, Weight
from training.pretraining.config import CorpusRunConfig
from training.pretraining.job import PretrainingJob
from training.pretraining.recipes import Recipe

# Minimum fraction of the corpus' tokens that are one piece of the teacher's vocabulary. The
# official vocabularies of English encoders share over 80 % on Wikipedia.
_MIN_SHARED: Final = 0.5


def _parse_pair(text: str) -> tuple[int, int]:
    """Parse a student's and a teacher's layer, such as `2:4`."""
    ours, colon, theirs = text.partition(":")
    if not (colon and ours.isdecimal() and theirs.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair of layers; write 2:4")
    return int(ours), int(theirs)


@dataclass(frozen=True, kw_only=True)
class _TeacherOptions(Options, title="teacher"):
    """The teacher, and its losses."""

    teacher: str = flag("a model's folder, or its name on the Hugging Face hub", MISSING)
    start: Literal["teacher", "local", "random"] | None = flag(
        "the student's initialization: the teacher's embeddings and one of its layers (teacher), "
        "attention to neighbours, or random weights"
    )
    start_layers: tuple[Count, ...] = flag(
        "the teacher's layers that initialise the student's (the one at two thirds)", ()
    )
    hidden_layers: tuple[Annotated[tuple[int, int], Parsed(_parse_pair)], ...] = flag(
        "layers whose hidden states are matched (those at each third of the depth)",
        (),
        metavar="STUDENT:TEACHER",
    )
    hidden_weight: Weight = flag("hidden-state loss", 3.0)
    masked_weight: Weight = flag("masked-token loss", 1.0)


@dataclass(frozen=True, kw_only=True)
class DistilConfig(CorpusRunConfig, _TeacherOptions):
    """Configuration of a distillation run, by the names of the command's flags.

    Raises:
        RunError: a value is not allowed, options contradict each other, or the run has no end.
        TeacherError: no loss uses the teacher.
    """

    def __post_init__(self) -> None:
        """Check that the run has an end, and that the teacher is used."""
        super().__post_init__()
        if not self.has_end:
            raise RunError("a run needs an end: give --steps or --budget")
        if not self.hidden_weight:
            raise TeacherError(
                "--hidden-weight 0 ignores the teacher; choose another weight, or train without a "
                "teacher (albert-serve pretrain)"
            )


def student_sizes(config: DistilConfig, recipe: Recipe, teacher: Teacher) -> dict[str, Any]:
    """Return the default sizes of a new student: the teacher's, or the preset's."""
    if config.initialize_from is not None:
        return {}
    if config.preset is None:
        return sizes_of(teacher)
    return {"activation": sizes_of(teacher)["activation"]} if recipe.start == "teacher" else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherSetup:
    """A teacher, and how it teaches a student.

    Attributes:
        layers: the layers to match.
        start_layers: the teacher's layers, from 1, that initialise the student's.
    """

    config: DistilConfig
    teacher: Teacher
    layers: LayerPairs
    start_layers: tuple[int, ...]

    @classmethod
    def choose(
        cls, config: DistilConfig, recipe: Recipe, sizes: AlbertConfig, teacher: Teacher
    ) -> TeacherSetup:
        """Choose the layers to match and to start from, where the configuration leaves them open.

        Raises:
            TeacherError: the teacher cannot teach such a student.
        """
        layers = tuple(config.hidden_layers or _default_pairs(sizes, teacher))
        _check_layers(layers, sizes, teacher)
        return cls(
            config=config,
            teacher=teacher,
            layers=layers,
            start_layers=_start_layers(config, recipe, sizes, teacher),
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings that affect the results, for `run.json`."""
        config = self.config
        return {
            **describe_model(self.teacher.name, self.teacher.model),
            "start_layers": list(self.start_layers),
            "hidden_layers": [list(pair) for pair in self.layers],
            "loss_weights": {
                "masked": config.masked_weight,
                "hidden": config.hidden_weight,
            },
        }


@dataclass(frozen=True, kw_only=True)
class DistillationJob(PretrainingJob):
    """A distillation run: a pretraining run with a teacher."""

    teaching: TeacherSetup

    def masked_stream(self) -> PackedStream:
        """Return the task stream of masked rows, and of the same text for the teacher.

        Raises:
            TeacherError: the teacher does not read the language of the corpus.
        """
        teacher, streams = self.teaching.teacher, self.streams
        _check_vocabulary(teacher, self.tokenizer, self.shards)
        collate = DistilCollator(
            student=streams.collator,
            aligner=Aligner(self.tokenizer, teacher.tokenizer),
            pad_id=teacher.tokenizer.pad_id,
            max_teacher=teacher.max_positions,
        )
        return replace(streams.masked(collate), further_losses=("hidden-states",))

    @property
    def loss_of(self) -> Mapping[str, LossFunction]:
        """The loss function of rows with a teacher."""
        self.teaching.teacher.model.to(self.world.device)
        loss = DistillationLoss(
            teacher=self.teaching.teacher,
            layers=self.teaching.layers,
            student=torch.compile(student_states) if self.compiles else student_states,
        )
        return {**LOSS_OF, "distillation": loss}

    @property
    def loss_weights(self) -> Mapping[LossName, float]:
        """The weights of the losses."""
        config = self.teaching.config
        return {
            **self.recipe.loss_weights,
            "fill-mask": config.masked_weight,
            "hidden-states": config.hidden_weight,
        }

    def model(self) -> AlbertForTasks:
        """Return the student with its initial weights."""
        if self.start.folder is not None or self.recipe.start != "teacher":
            return super().model()
        torch.manual_seed(self.recipe.seed)
        sizes = self.architecture
        model = AlbertForTasks(sizes, head_sizes(sizes, self.recipe.tasks))
        counts = self.shards.token_counts(sizes.vocab_size)
        layers = self.teaching.start_layers
        explained = start_from_teacher(model, self.teaching.teacher, self.tokenizer, counts, layers)
        if self.world.is_main:
            print(
                f"embeddings of size {sizes.embedding_size} explain {explained:.1%} of the "
                "variance of the teacher's"
            )
        return model


def _default_pairs(sizes: AlbertConfig, teacher: Teacher) -> list[tuple[int, int]]:
    """Return pairs of layers at each third of both depths."""
    ours, theirs = sizes.num_layers * sizes.num_inner_layers, teacher.num_layers
    thirds = ((max(1, round(ours * k / 3)), max(1, round(theirs * k / 3))) for k in (1, 2, 3))
    return sorted(set(thirds))


def _start_layers(
    config: DistilConfig, recipe: Recipe, sizes: AlbertConfig, teacher: Teacher
) -> tuple[int, ...]:
    """Return the teacher's layers that initialise the student's; empty without such a start."""
    if recipe.start != "teacher" or config.initialize_from is not None:
        if config.start_layers:
            raise TeacherError("--start-layers requires --start teacher and new weights")
        return ()
    layers = config.start_layers or default_layers(sizes.num_attentions, teacher.num_layers)
    check_start(sizes, teacher, layers)
    return layers


def _check_layers(layers: LayerPairs, config: AlbertConfig, teacher: Teacher) -> None:
    """Check that a student of these sizes can match the teacher's layers."""
    if config.hidden_size != teacher.hidden_size:
        raise TeacherError(
            f"hidden states are {teacher.hidden_size} wide in {teacher.name} and "
            f"{config.hidden_size} in the student, and cannot be matched; give "
            f"--hidden-size {teacher.hidden_size}"
        )
    num_layers = config.num_layers * config.num_inner_layers
    for ours, theirs in layers:
        if not (1 <= ours <= num_layers and 1 <= theirs <= teacher.num_layers):
            raise TeacherError(
                f"--hidden-layers {ours}:{theirs}: the student has layers 1 to {num_layers}, "
                f"{teacher.name} 1 to {teacher.num_layers}"
            )


def _check_vocabulary(teacher: Teacher, tokenizer: AlbertTokenizer, shards: Shards) -> None:
    """Check that enough of the corpus' tokens are pieces of the teacher's vocabulary."""
    counts = shards.token_counts(tokenizer.vocab_size)
    shared = shared_pieces(teacher, tokenizer)
    part = float(np.sum(counts * shared) / max(1, counts.sum()))
    if part < _MIN_SHARED:
        raise TeacherError(
            f"{part:.0%} of the corpus' tokens are in the vocabulary of {teacher.name}, but "
            f"{_MIN_SHARED:.0%} are required; does the teacher read another language?"
        )
