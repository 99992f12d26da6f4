"""The tasks of a finetuning run, a class each: data that is read, losses and validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from albert_serve.bundle.manifest import DEFAULT_HEAD
from albert_serve.bundle.weights import CLASSIFICATION, further_head
from training.data.labelled.errors import collecting, raise_listed
from training.errors import RunError
from training.finetuning.choices import MultipleChoice
from training.finetuning.classification import Classification, ClassifierHead
from training.finetuning.config import FinetuneConfig
from training.finetuning.embeddings import Embeddings
from training.finetuning.pretraining import ContinuedPretraining
from training.finetuning.questions import Questions
from training.finetuning.start import Start
from training.finetuning.tokens import TokenTags
from training.loop.distributed import World
from training.model.heads import Task
from training.model.labels import default_name

# The tasks that may have held-out data.
ValidatedTask: TypeAlias = Classification | MultipleChoice | TokenTags | Questions | Embeddings
# The tasks whose texts are truncated.
TextTask: TypeAlias = Classification | MultipleChoice | Embeddings
FinetuningTask: TypeAlias = ValidatedTask | ContinuedPretraining


class _Kind(NamedTuple):
    """A task before its data is read, and its name for --weights and --batch-size."""

    name: str
    read: Callable[[FinetuneConfig, Start, World, int], FinetuningTask]


def _trained(config: FinetuneConfig, start: Start) -> list[_Kind]:
    """Return the tasks that the configuration has data of, in the order of --weights."""
    heads = _trained_heads(config, start)
    kinds = [_Kind(head.task, partial(Classification.read, head)) for head in heads]
    if config.multiple_choice:
        kinds.append(_Kind(MultipleChoice.name, MultipleChoice.read))
    if config.token_classification:
        kinds.append(_Kind(TokenTags.name, TokenTags.read))
    if config.question_answering:
        kinds.append(_Kind(Questions.name, Questions.read))
    if config.embeddings:
        kinds.append(_Kind(Embeddings.name, Embeddings.read))
    if config.pretraining:
        kinds.append(_Kind(ContinuedPretraining.name, ContinuedPretraining.read))
    return kinds


def _trained_heads(config: FinetuneConfig, start: Start) -> list[ClassifierHead]:
    """Return the classifiers that are trained, in the order of --weights.

    Data before `--head` is the default classifier's, which `transformers` reads. Without, and in a
    checkpoint that has none, the default is the head of that name, or else the first.

    Raises:
        RunError: two classifiers have one name, or options do not go together.
    """
    heads = config.heads
    trained = [ClassifierHead(CLASSIFICATION, config)] if config.text_classification else []
    default = default_name(start.hf) or DEFAULT_HEAD
    if heads and not trained and CLASSIFICATION not in start.heads:
        names = [head.head for head in heads if head.head is not None]
        default = DEFAULT_HEAD if DEFAULT_HEAD in names else names[0]
    for head in heads:
        assert head.head is not None
        if head.head == DEFAULT_HEAD != default:
            raise RunError(f"--head {DEFAULT_HEAD}: the default classifier is named {default}")
        task = CLASSIFICATION if head.head == default else further_head(head.head)
        if task == CLASSIFICATION and config.text_classification:
            raise RunError(
                f"--head {head.head} names the default classifier, whose data stands before --head "
                "already; give another name"
            )
        trained.append(ClassifierHead(task, head))
    return trained


def labelled_of(tasks: Sequence[FinetuningTask]) -> dict[Task, Classification | TokenTags]:
    """Return the tasks whose heads' outputs have names, by their heads in the model."""
    return {task.name: task for task in tasks if isinstance(task, Classification | TokenTags)}


def heads_of(tasks: Sequence[FinetuningTask]) -> list[Task]:
    """Return the heads that the tasks train."""
    return [head for task in tasks for stream in task.streams for head in stream.tasks]


def read_tasks(config: FinetuneConfig, start: Start, world: World) -> list[FinetuningTask]:
    """Read the data of all tasks of a run.

    Raises:
        CorpusError: data is broken; all of it is listed.
        RunError: there is none, or options do not go together.
    """
    kinds = _trained(config, start)
    if not kinds:
        raise RunError(
            "nothing to train: give --text-classification, --multiple-choice, --task, --head, "
            "--token-classification, --question-answering, --embeddings or --pretraining"
        )
    tasks: list[FinetuningTask] = []
    errors: list[str] = []
    for kind, size in zip(kinds, _batch_sizes(config, kinds), strict=True):
        if kind.name == ContinuedPretraining.name:
            raise_listed(errors)  # now, since text takes long to prepare
        with collecting(errors):
            tasks.append(kind.read(config, start, world, size))
    raise_listed(errors)
    return tasks


def _batch_sizes(config: FinetuneConfig, kinds: Sequence[_Kind]) -> Sequence[int]:
    """Return the examples a step of each task."""
    sizes = config.batch_size
    if len(sizes) == 1:
        return sizes * len(kinds)
    if len(sizes) != len(kinds):
        raise RunError(
            f"--batch-size {' '.join(map(str, sizes))}: give one number, or one for each of "
            + ", ".join(kind.name for kind in kinds)
        )
    return sizes
