"""The tasks of a finetuning run: their configurations and their data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from albert_serve.bundle.manifest import DEFAULT_HEAD
from albert_serve.bundle.weights import CLASSIFICATION, TOKENS, named_head
from albert_serve.tokenizer import AlbertTokenizer
from training.data.labelled.rows import collecting, raise_listed
from training.errors import RunError
from training.finetuning.classifiers import ClassifierConfig
from training.finetuning.config import FinetuneConfig
from training.finetuning.model import Start
from training.glue.tasks import TASKS
from training.loop.distributed import World
from training.model.heads import MULTIPLE_CHOICE, Task
from training.model.labels import default_name
from training.options.config import should_compile
from training.tasks.base import TrainingSetup, TrainingTask
from training.tasks.classification.loss import ClassificationConfig, read_classification
from training.tasks.embeddings.loss import EmbeddingConfig, read_vectors
from training.tasks.multiple_choice.loss import ChoiceConfig, read_questions
from training.tasks.pretraining.loss import PretrainingConfig, read_text
from training.tasks.question_answering.loss import QuestionConfig, read_spans
from training.tasks.token_classification.loss import TokenConfig, read_tokens

# Continued pretraining predicts the paper's fraction of tokens, cuts a fraction of the documents
# into shorter examples, and makes pairs of two or more sentences per side.
_MASK_RATE: Final = 0.15
_SHORT_RATE: Final = 0.1
_ORDER_SENTENCES: Final = 2


class _Kind(NamedTuple):
    """A task before its data is read, and its name for --weights and --batch-size."""

    name: str
    read: Callable[[TrainingSetup, int], TrainingTask]


def _configured_tasks(config: FinetuneConfig, start: Start) -> list[_Kind]:
    """Return the tasks for which the configuration has data, in the order of --weights."""
    split = config.validation_split if config.splits_validation else 0.0
    kinds = [
        _Kind(head, partial(read_classification, _classification(head, texts, split)))
        for head, texts in _classifier_heads(config, start)
    ]
    validation = config.files.validation
    if config.has_choices:
        choices = ChoiceConfig(
            files=config.files.train,
            validation=validation,
            columns=config.columns,
            choice_columns=config.choice_columns,
            metric=config.metric,
        )
        kinds.append(_Kind(MULTIPLE_CHOICE, partial(read_questions, choices)))
    if config.token_classification:
        tokens = TokenConfig(
            files=config.token_classification,
            validation=validation,
            validation_split=split,
            metric=config.metric,
        )
        kinds.append(_Kind(TOKENS, partial(read_tokens, tokens)))
    if config.question_answering:
        questions = QuestionConfig(
            files=config.question_answering,
            validation=validation if config.validates_questions else (),
            length=config.question_length or config.length,
            metric=config.metric,
        )
        kinds.append(_Kind("question-answering", partial(read_spans, questions)))
    if config.embeddings:
        vectors = EmbeddingConfig(
            files=config.embeddings,
            validation=validation if config.has_held_out_vectors else (),
            columns=config.embedding_columns,
        )
        kinds.append(_Kind("embeddings", partial(read_vectors, vectors)))
    if config.pretraining:
        kinds.append(_Kind("pretraining", partial(read_text, _pretraining(config, start))))
    return kinds


def _classification(head: Task, texts: ClassifierConfig, split: float) -> ClassificationConfig:
    return ClassificationConfig(
        head=head,
        name=texts.head,
        files=texts.files.train,
        validation=texts.files.validation,
        validation_split=split,
        task=None if texts.task is None else TASKS[texts.task],
        problem=texts.problem,
        columns=texts.columns,
        labels=texts.labels,
        class_weights=texts.class_weights,
        metric=texts.metric,
    )


def _pretraining(config: FinetuneConfig, start: Start) -> PretrainingConfig:
    short_rate = config.order_short_rate
    return PretrainingConfig(
        files=config.pretraining,
        tokenizer_file=start.folder / "tokenizer.json",
        shards=config.output / "shards",
        sentence_task="nsp" if start.hf.get("albert_sentence_task") == "nsp" else "sop",
        mask_rate=_MASK_RATE if config.mask_rate is None else config.mask_rate,
        short_rate=_SHORT_RATE,
        has_pairs=bool(config.order_share),
        order_length=config.order_length,
        order_short_rate=_SHORT_RATE if short_rate is None else short_rate,
        order_sentences=config.order_sentences or _ORDER_SENTENCES,
    )


def _classifier_heads(config: FinetuneConfig, start: Start) -> list[tuple[Task, ClassifierConfig]]:
    """Return the classifiers to train, in the order of --weights.

    Data before `--head` belongs to the default classifier, which `transformers` reads. If neither
    such data nor the checkpoint defines one, it is the head named `default`, or the first head.
    """
    heads = config.heads
    classifier_heads: list[tuple[Task, ClassifierConfig]] = (
        [(CLASSIFICATION, config)] if config.has_texts else []
    )
    default = default_name(start.hf) or DEFAULT_HEAD
    if heads and not classifier_heads and CLASSIFICATION not in start.heads:
        names = [head.head for head in heads if head.head is not None]
        default = DEFAULT_HEAD if DEFAULT_HEAD in names else names[0]
    for head in heads:
        assert head.head is not None
        if head.head == DEFAULT_HEAD != default:
            raise RunError(
                f"--head {DEFAULT_HEAD} is named {default} in the checkpoint. Use that name."
            )
        task = CLASSIFICATION if head.head == default else named_head(head.head)
        if task == CLASSIFICATION and config.has_texts:
            raise RunError(
                f"--head {head.head} names the default classifier, which has data before --head. "
                "Use another name."
            )
        classifier_heads.append((task, head))
    return classifier_heads


def setup_of(config: FinetuneConfig, start: Start, world: World) -> TrainingSetup:
    """Return the settings by which the run's tasks read their data."""
    return TrainingSetup(
        tokenizer=AlbertTokenizer.from_file(start.folder / "tokenizer.json"),
        architecture=start.architecture,
        world=world,
        seed=config.seed,
        length=config.length,
        truncation=config.truncation,
        micro_batch_size=config.micro_batch_size,
        compiles=should_compile(config.compile, world.device),
    )


def read_tasks(config: FinetuneConfig, start: Start, setup: TrainingSetup) -> list[TrainingTask]:
    """Read the data of all tasks of a run, and list all errors in it."""
    kinds = _configured_tasks(config, start)
    if not kinds:
        raise RunError(
            "There is nothing to train. Use --text-classification, --multiple-choice, --task, "
            "--head, --token-classification, --question-answering, --embeddings or --pretraining."
        )
    tasks: list[TrainingTask] = []
    errors: list[str] = []
    for kind, size in zip(kinds, _batch_sizes(config, kinds), strict=True):
        if kind.name == "pretraining":
            raise_listed(errors)  # raised before texts are prepared, which takes long
        with collecting(errors):
            tasks.append(kind.read(setup, size))
    raise_listed(errors)
    return tasks


def _batch_sizes(config: FinetuneConfig, kinds: Sequence[_Kind]) -> Sequence[int]:
    """Return the number of examples per step of each task."""
    sizes = config.batch_size
    if len(sizes) == 1:
        return sizes * len(kinds)
    if len(sizes) != len(kinds):
        raise RunError(
            f"--batch-size {' '.join(map(str, sizes))} is not one number per task. Use one number, "
            f"or one for each of {', '.join(kind.name for kind in kinds)}."
        )
    return sizes
