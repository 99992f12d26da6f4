"""Distillation: builds the run of a job with a teacher."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import LossName
from training.data.shards import Shards
from training.distillation.alignment import Aligner
from training.distillation.batches import DistilCollator
from training.distillation.losses import DistillationLoss, Objectives, student_states
from training.distillation.start import shared_pieces, start_from_teacher
from training.distillation.teacher import Teacher, TeacherError
from training.loop.step import Run
from training.losses import LOSS_OF
from training.model.heads import AlbertForTasks, head_sizes
from training.run.job import Job

# Minimum fraction of the corpus' tokens that are one piece of the teacher's vocabulary. The
# official vocabularies of English encoders share over 80 % on Wikipedia.
_LEAST_SHARED: Final = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class LossWeights:
    """Weights of the losses in their sum."""

    masked: float
    hidden: float
    relations: float

    def by_name(self) -> dict[LossName, float]:
        """Return the weights by the losses' names."""
        return {
            "fill-mask": self.masked,
            "hidden-states": self.hidden,
            "attention-relations": self.relations,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Distillation:
    """A distillation: the teacher, and how it teaches the student of a job.

    Attributes:
        start_layers: the teacher's layers, from 1, that initialise the student's.
    """

    teacher: Teacher
    objectives: Objectives
    weights: LossWeights
    start_layers: tuple[int, ...]

    def build(self, job: Job) -> Run:
        """Build the run of a job at step 0, with the teacher's losses.

        Raises:
            RunError: the batch is not divisible, or the optimizer cannot be sharded.
            TeacherError: the teacher cannot teach this student.
        """
        job.check()
        check_objectives(self.objectives, job.config, self.teacher)
        tokenizer = AlbertTokenizer.from_file(job.tokenizer / "tokenizer.json")
        check_vocabulary(self.teacher, tokenizer, job.shards)
        collate = DistilCollator(
            student=job.collator,
            aligner=Aligner(tokenizer, self.teacher.tokenizer),
            pad_id=self.teacher.tokenizer.pad_id,
            max_teacher=self.teacher.max_positions,
        )
        feed = replace(job.feed(collate), further_losses=self.objectives.names)
        loss = DistillationLoss(
            teacher=self.teacher,
            objectives=self.objectives,
            student=torch.compile(student_states) if job.compiles else student_states,
        )
        return job.assemble(
            self._student(job, tokenizer),
            feed,
            {**LOSS_OF, "distillation": loss},
            self.weights.by_name(),
        )

    def _student(self, job: Job, tokenizer: AlbertTokenizer) -> AlbertForTasks:
        """Return the student with its initial weights."""
        if job.initialize_from is not None or job.recipe.start != "teacher":
            return job.model()
        torch.manual_seed(job.recipe.seed)
        model = AlbertForTasks(job.config, head_sizes(job.config, job.tasks))
        counts = job.shards.token_counts(job.config.vocab_size)
        kept = start_from_teacher(model, self.teacher, tokenizer, counts, self.start_layers)
        if job.world.is_main:
            size = job.config.embedding_size
            print(f"embeddings of {size} keep {kept:.1%} of the variance of the teacher's")
        return model


def check_objectives(objectives: Objectives, config: AlbertConfig, teacher: Teacher) -> None:
    """Check that a student of these sizes can match the teacher's layers and relations.

    Raises:
        TeacherError: it cannot.
    """
    if objectives.layers and config.hidden_size != teacher.hidden_size:
        raise TeacherError(
            f"hidden states are {teacher.hidden_size} wide in {teacher.name} and "
            f"{config.hidden_size} in the student, and cannot be matched; match relations alone "
            "(--hidden-weight 0 --relation-weight 1), or give --hidden-size "
            f"{teacher.hidden_size}"
        )
    num_layers = config.num_layers * config.num_inner_layers
    for ours, theirs in objectives.layers:
        if not (1 <= ours <= num_layers and 1 <= theirs <= teacher.num_layers):
            raise TeacherError(
                f"--hidden-layers {ours}:{theirs}: the student has layers 1 to {num_layers}, "
                f"{teacher.name} 1 to {teacher.num_layers}"
            )
    num_heads = objectives.num_relation_heads
    if not num_heads:
        return
    if config.hidden_size % num_heads or teacher.hidden_size % num_heads:
        raise TeacherError(
            f"--relation-heads {num_heads} divides not both the student's hidden size "
            f"{config.hidden_size} and the teacher's {teacher.hidden_size}"
        )
    if len(teacher.attention_parts()) < 3:
        raise TeacherError(
            f"{teacher.name} has no maps named query, key and value; "
            "give --relation-weight 0 and match hidden states"
        )


def check_vocabulary(teacher: Teacher, tokenizer: AlbertTokenizer, shards: Shards) -> None:
    """Check that the teacher's vocabulary covers the corpus.

    Raises:
        TeacherError: too few of the corpus' tokens are pieces of the teacher's vocabulary.
    """
    counts = shards.token_counts(tokenizer.vocab_size)
    shared = shared_pieces(teacher, tokenizer)
    part = float(np.sum(counts * shared) / max(1, counts.sum()))
    if part < _LEAST_SHARED:
        raise TeacherError(
            f"{part:.0%} of the corpus' tokens are pieces of {teacher.name}'s vocabulary, and "
            f"{_LEAST_SHARED:.0%} have to be; is it a teacher of another language?"
        )
