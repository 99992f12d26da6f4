"""Configuration of a distillation run."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, dataclass
from typing import Annotated, Literal

from training.distillation.teacher import TeacherError
from training.loop.progress import RunError
from training.run.flags import Options, flag
from training.run.options import Count, Parsed, Weight
from training.run.pretraining import PretrainingConfig


def _parse_pair(text: str) -> tuple[int, int]:
    """Parse a student's and a teacher's layer, such as `2:4`."""
    ours, colon, theirs = text.partition(":")
    if not (colon and ours.isdecimal() and theirs.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no pair of layers; write 2:4")
    return int(ours), int(theirs)


@dataclass(frozen=True, kw_only=True)
class _Teaching(Options, title="teacher"):
    """The teacher, and what is learnt from it."""

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
    relation_heads: Count | None = flag(
        "number of relation heads (the teacher's number of attention heads)"
    )
    hidden_weight: Weight = flag("hidden-state loss", 3.0)
    relation_weight: Weight = flag("relation loss", 0.0)
    masked_weight: Weight = flag("masked-token loss", 1.0)


@dataclass(frozen=True, kw_only=True)
class DistilConfig(PretrainingConfig, _Teaching):
    """Configuration of a distillation run, by the names of the command's flags.

    Raises:
        RunError: a value is not allowed, options contradict each other, or the run has no end.
        TeacherError: nothing is learnt from the teacher.
    """

    def __post_init__(self) -> None:
        """Check that the run has an end, and that the teacher is used."""
        super().__post_init__()
        if not self.has_end:
            raise RunError("a run needs an end: give --steps or --budget")
        if not (self.hidden_weight or self.relation_weight):
            raise TeacherError(
                "--hidden-weight and --relation-weight are both 0, so that nothing is learnt from "
                "the teacher; without one, train with training.pretrain"
            )
