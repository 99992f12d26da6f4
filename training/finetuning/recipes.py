"""Hyperparameters of finetuning: the package's own, and the paper's for each task."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from training.data.labelled.race import RACE
from training.data.questions import some_unanswerable
from training.glue.tasks import TASKS
from training.loop.progress import RunError

# By the names of the options.
DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "length": 128,
        "batch_size": [32],
        "optimizer": "muon",
        "lr": 5e-4,
        "adamw_lr": 3e-4,
        "weight_decay": 0.01,
        "schedule": "wsd",
        "warmup": 0.05,
        "decay": 0.6,
        "sentence_weight": 0.1,
        "clip_norm": 1.0,
        "seed": 0,
    }
)
_ENDS: Final = ("steps", "epochs", "budget")
# Names of recipes: of questions that all have an answer, and of those of which some have none.
SQUAD_1: Final = "squad1"
SQUAD_2: Final = "squad2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The hyperparameters of a task in the paper (arXiv 1909.11942, table 14).

    Attributes:
        lr: peak learning rate of all parameters.
        dropout: of hidden states and attention.
        length: maximum tokens of a text.
    """

    lr: float
    batch_size: int
    dropout: float
    num_steps: int
    warmup_steps: int
    classifier_dropout: float = 0.1
    length: int = 512

    @property
    def options(self) -> dict[str, Any]:
        """The values by the names of the options, with those of the original's `run_classifier`."""
        return {
            "length": self.length,
            "batch_size": [self.batch_size],
            "steps": self.num_steps,
            "warmup": self.warmup_steps / self.num_steps,
            "dropout": self.dropout,
            "classifier_dropout": self.classifier_dropout,
            "lr": self.lr,
            "optimizer": "adamw",
            "schedule": "linear",
            "weight_decay": 0.01,
            "clip_norm": 1.0,
        }


PAPER: Final[Mapping[str, Recipe]] = MappingProxyType(
    {
        "cola": Recipe(lr=1e-5, batch_size=16, dropout=0.0, num_steps=5336, warmup_steps=320),
        "stsb": Recipe(lr=2e-5, batch_size=16, dropout=0.0, num_steps=3598, warmup_steps=214),
        "sst2": Recipe(lr=1e-5, batch_size=32, dropout=0.0, num_steps=20935, warmup_steps=1256),
        "mnli": Recipe(lr=3e-5, batch_size=128, dropout=0.0, num_steps=10000, warmup_steps=1000),
        "qnli": Recipe(lr=1e-5, batch_size=32, dropout=0.0, num_steps=33112, warmup_steps=1986),
        "qqp": Recipe(lr=5e-5, batch_size=128, dropout=0.1, num_steps=14000, warmup_steps=1000),
        "rte": Recipe(lr=3e-5, batch_size=32, dropout=0.1, num_steps=800, warmup_steps=200),
        "mrpc": Recipe(lr=2e-5, batch_size=32, dropout=0.0, num_steps=800, warmup_steps=200),
        RACE: Recipe(lr=2e-5, batch_size=32, dropout=0.1, num_steps=12000, warmup_steps=1000),
        "wnli": Recipe(lr=2e-5, batch_size=16, dropout=0.1, num_steps=2000, warmup_steps=250),
        SQUAD_1: Recipe(
            lr=5e-5, batch_size=48, dropout=0.0, num_steps=3649, warmup_steps=365, length=384
        ),
        SQUAD_2: Recipe(lr=3e-5, batch_size=48, dropout=0.0, num_steps=8144, warmup_steps=814),
    }
)
assert PAPER.keys() == TASKS.keys() | {RACE, SQUAD_1, SQUAD_2}


def with_defaults(options: Namespace) -> Namespace:
    """Return the options with the values of the recipe in place of those that are None.

    The recipe's number of steps counts only if no end of the run is given. With questions,
    `question_length` is the length that is given or the recipe's; None if there is neither.

    Raises:
        RunError: a recipe is given for other data than a task's, or questions alone.
    """
    values = dict(DEFAULTS)
    if options.order_share:
        # The default is for one label a sequence among its masked tokens.
        values["sentence_weight"] = 1.0
    length = options.length
    if options.recipe is not None:
        values |= PAPER[_recipe_name(options)].options
        length = length or values["length"]
        if any(getattr(options, end) is not None for end in _ENDS):
            del values["steps"]
    missing = {name: value for name, value in values.items() if getattr(options, name) is None}
    windows = {"question_length": length} if options.question_answering else {}
    return Namespace(**{**vars(options), **missing, **windows})


def has_questions_alone(options: Namespace) -> bool:
    """Whether a run's only data are questions."""
    others = (
        *(options.text_classification, options.multiple_choice, options.pretraining),
        options.heads,
    )
    return bool(options.question_answering) and not any(others)


def _recipe_name(options: Namespace) -> str:
    if options.task is not None:
        task: str = options.task
        return task
    if has_questions_alone(options):
        return SQUAD_2 if some_unanswerable(options.question_answering) else SQUAD_1
    raise RunError(
        f"--recipe {options.recipe} differs from task to task; give --task, or "
        "--question-answering alone"
    )
