"""Evaluation of a checkpoint on held-out data, each task by its own metric."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from albert_serve.api.embeddings import FEATURE_EXTRACTION
from albert_serve.bundle.sentence_vectors import SentenceVectors, read_sentence_vectors
from albert_serve.bundle.weights import TOKENS, name_of
from albert_serve.errors import listed
from albert_serve.tasks.base import TaskSetup
from albert_serve.tasks.text_length import describe_long_texts, text_length
from albert_serve.tokenizer import AlbertTokenizer
from training.conversion.source import open_checkpoint
from training.data.examples import check_length
from training.data.labelled.folders import CHOICES, RACE, labelled_files, race_files
from training.errors import EvaluationError
from training.evaluation.classifiers import (
    HeldOutTexts,
    classifier_data,
    read_held_out,
    task_metrics,
)
from training.evaluation.config import EvaluateConfig
from training.evaluation.prediction_files import write_glue, write_squad
from training.model.checkpoint import load_checkpoint, read_config
from training.model.heads import AlbertForTasks, Task
from training.model.labels import read_labels, read_temperature
from training.model.provenance import file_names, read_stages
from training.options.labelled import LabelledTexts
from training.system.precision import precision
from training.tasks.classification.files import read_test
from training.tasks.classification.metrics import PREFIX as TEXT_PREFIX
from training.tasks.classification.metrics import TextPredictions, head_metric_name
from training.tasks.embeddings.files import SimilarTexts, TextKind, read_similar
from training.tasks.embeddings.metrics import Embedder, retrieval_metrics, similarity_metrics
from training.tasks.engine import TorchEngine
from training.tasks.multiple_choice.files import read_choices
from training.tasks.multiple_choice.metrics import PREFIX as CHOICE_PREFIX
from training.tasks.multiple_choice.metrics import choose
from training.tasks.pretraining.metrics import evaluate_text
from training.tasks.question_answering.files import read_squad
from training.tasks.question_answering.metrics import (
    BEST_F1_THRESHOLD,
    AnsweredQuestion,
    answer_questions,
    describe_threshold,
    may_be_empty,
    question_metrics,
    question_parameters,
)
from training.tasks.token_classification.files import read_tagged
from training.tasks.token_classification.metrics import PREFIX as TOKEN_PREFIX
from training.tasks.token_classification.metrics import evaluate_entities

_SHOWN_FILES: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    """An open checkpoint.

    Attributes:
        hf: content of `config.json`.
        notes: lines about truncated texts.
    """

    folder: Path
    hf: Mapping[str, Any]
    model: AlbertForTasks
    tokenizer: AlbertTokenizer
    notes: list[str] = field(default_factory=list)

    def text_length(self, head: str) -> int:
        """Return the maximum number of tokens in a text."""
        training = {"stages": read_stages(self.folder)}
        return text_length(head, training, self.model.config.max_positions)

    def note_truncated(self, num_truncated: int, num_texts: int, length: int) -> None:
        """Note how many texts were truncated, if any."""
        if num_truncated:
            note = describe_long_texts(num_truncated, num_texts, length, truncation=True)
            self.notes.append(note)

    def require_head(self, task: str) -> None:
        tasks = self.model.tasks
        if task not in tasks:
            raise EvaluationError(
                f"The checkpoint has no head for {task}. Its heads are {', '.join(tasks)}."
            )


class Evaluation(NamedTuple):
    """The results of an evaluation.

    Attributes:
        metrics: metrics of all data, by name.
        notes: lines about truncated texts.
    """

    metrics: dict[str, Any]
    notes: list[str]


def evaluate(config: EvaluateConfig) -> Evaluation:
    """Evaluate a checkpoint on every kind of data.

    Raises:
        EvaluationError: the checkpoint has no head for some data.
    """
    with (
        open_checkpoint(config.checkpoint) as checkpoint,
        precision(config.device, config.precision),
    ):
        folder = checkpoint.folder
        model = load_checkpoint(folder).to(config.device).eval()
        tokenizer = AlbertTokenizer.from_file(folder / "tokenizer.json")
        hf = read_config(folder)
        opened = _Opened(folder=folder, hf=hf, model=model, tokenizer=tokenizer)
        return Evaluation(_evaluate(config, opened), opened.notes)


def _evaluate(config: EvaluateConfig, opened: _Opened) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    if config.pretraining:
        opened.require_head("fill-mask")
        check_length("--length", config.length, opened.model.config.max_positions)
        metrics |= evaluate_text(
            opened.model,
            opened.folder,
            config.pretraining,
            length=config.length,
            products=config.precision,
        )
        metrics |= _data("masked", config.pretraining)
        if "sentence_order_accuracy" in metrics:
            metrics |= _data("sentence_order", config.pretraining)
    if config.has_choices:
        metrics |= {f"{CHOICE_PREFIX}_task": RACE.upper()} if config.task == RACE else {}
        metrics |= _choice_metrics(config, opened)
        metrics |= _data(CHOICE_PREFIX, config.multiple_choice)
    metrics |= _text_metrics(config, opened)
    if config.question_answering:
        metrics |= _question_metrics(config, _answer(config, opened), opened.model)
        metrics |= _data("question_answering", config.question_answering)
    if config.token_classification:
        metrics |= _entity_metrics(config, opened)
    metrics |= _embedding_metrics(config, opened)
    return {
        name: value
        for name, value in metrics.items()
        if not isinstance(value, float) or math.isfinite(value)
    }


def _entity_metrics(config: EvaluateConfig, opened: _Opened) -> dict[str, Any]:
    opened.require_head(TOKENS)
    model, files = opened.model, config.token_classification
    names, _ = read_labels(opened.hf, model.tasks[TOKENS], TOKENS)
    metrics = evaluate_entities(model, opened.tokenizer, read_tagged(files), names)
    return metrics | _data(TOKEN_PREFIX, files)


def _embedding_metrics(config: EvaluateConfig, opened: _Opened) -> dict[str, Any]:
    setup = TaskSetup(
        tokenizer=opened.tokenizer,
        max_positions=opened.text_length(FEATURE_EXTRACTION),
        hidden_size=opened.model.config.hidden_size,
        sentence_vectors=read_sentence_vectors(opened.folder) or SentenceVectors(),
    )
    engine = TorchEngine(opened.model)
    embed = Embedder(runner=engine, setup=setup, truncation=config.truncation)
    metrics: dict[str, Any] = {}
    if config.similarity:
        metrics |= similarity_metrics(
            _read_pairs(config, config.similarity, ["scored pairs"]), embed
        )
    if config.retrieval:
        metrics |= retrieval_metrics(
            _read_pairs(config, config.retrieval, ["pairs", "triplets"]), embed
        )
    opened.note_truncated(embed.num_truncated, embed.num_texts, embed.max_length)
    return metrics


def _read_pairs(
    config: EvaluateConfig, files: Sequence[Path], kinds: Sequence[TextKind]
) -> list[SimilarTexts]:
    pairs = read_similar(
        labelled_files(files, "test", "validation"), config.embedding_columns, config.delimiter
    )
    if pairs[0].kind not in kinds:
        raise EvaluationError(
            f"{pairs[0].location} has {pairs[0].kind}, not {' or '.join(kinds)}. "
            "Use --embedding-columns to name the columns."
        )
    return pairs


def _data(prefix: str, files: Sequence[Path]) -> dict[str, str]:
    """Return the entry that names the data of a task's metrics, or nothing without files."""
    names, num_hidden = file_names(files)[:_SHOWN_FILES], len(files) - _SHOWN_FILES
    if num_hidden > 0:
        names = [*names, f"{num_hidden} more"]
    return {f"{prefix}_data": ", ".join(names)} if names else {}


def _choice_metrics(config: EvaluateConfig, opened: _Opened) -> dict[str, Any]:
    opened.require_head("multiple-choice")
    paths: Sequence[Path] = config.multiple_choice
    if config.task == RACE and config.data is not None:
        paths = race_files(config.data, "dev")
    files = labelled_files(paths, "test", "validation", suffixes=CHOICES)
    questions = read_choices(files, config.columns, config.choice_columns)
    length = opened.text_length("multiple-choice")
    choices = choose(
        opened.model, opened.tokenizer, questions, length=length, truncation=config.truncation
    )
    opened.note_truncated(choices.num_truncated, len(questions), length)
    return choices.figures()


def _text_metrics(config: EvaluateConfig, opened: _Opened) -> dict[str, Any]:
    """Return the metrics of all classifiers."""
    metrics: dict[str, Any] = {}
    data = classifier_data(config, config.heads, opened.model.tasks, opened.hf)
    for head, texts in data.items():
        opened.require_head(head)
        names, problem = read_labels(opened.hf, opened.model.tasks[head], head)
        held_out = read_held_out(texts, head, names, problem)
        if held_out.are_numbered:
            numbers = listed([f"{index} {name}" for index, name in enumerate(names)])
            print(f"The labels are numbers in this order: {numbers}.", file=sys.stderr)
        splits = _classify(config, texts, held_out, opened)
        head_metrics = task_metrics(held_out.task, splits)
        head_metrics |= _data(TEXT_PREFIX, texts.text_classification)
        if name := name_of(head):
            head_metrics = {
                head_metric_name(name, key): value for key, value in head_metrics.items()
            }
        metrics |= head_metrics
    return metrics


def _classify(
    config: EvaluateConfig, texts: LabelledTexts, held_out: HeldOutTexts, opened: _Opened
) -> dict[str, TextPredictions]:
    """Return the predictions of each split, and write the requested prediction files."""
    head, task, length = held_out.head, held_out.task, opened.text_length(held_out.head)
    run = partial(
        held_out.classify,
        TorchEngine(opened.model),
        opened.tokenizer,
        length=length,
        truncation=config.truncation,
    )
    splits = submitted = run(held_out.splits)
    if config.predictions is not None:
        if task is not None and texts.task_folder is not None:
            tests = read_test(task, texts.task_folder)
            submitted = run(tests) if tests else splits
        write_glue(submitted, _predictions_file(config.predictions, head), task)
    opened.note_truncated(
        sum(split.num_truncated for split in splits.values()),
        sum(len(split.texts) for split in splits.values()),
        length,
    )
    temperature = read_temperature(opened.hf, head)
    return {name: replace(split, temperature=temperature) for name, split in splits.items()}


def _predictions_file(file: Path, head: Task) -> Path:
    """Return the file of a classifier's predictions, with the name of a named classifier added."""
    name = name_of(head)
    return file.with_name(f"{file.stem}-{name}{file.suffix}") if name else file


def _answer(config: EvaluateConfig, opened: _Opened) -> list[AnsweredQuestion]:
    opened.require_head("question-answering")
    if config.max_seq_length is not None:
        max_positions = opened.model.config.max_positions
        check_length("--max-seq-length", config.max_seq_length, max_positions)
    answers = answer_questions(
        opened.model,
        opened.tokenizer,
        read_squad(config.question_answering),
        max_answer_length=config.max_answer_length,
        length=config.max_seq_length,
    )
    if config.predictions is not None:
        threshold = config.null_score_diff_threshold if may_be_empty(answers) else None
        files = write_squad(answers, config.predictions, threshold)
        print(f"{len(answers):,} answers in {', '.join(map(str, files))}.")
    return answers


def _question_metrics(
    config: EvaluateConfig, answers: Sequence[AnsweredQuestion], model: AlbertForTasks
) -> dict[str, Any]:
    metrics: dict[str, Any] = question_metrics(answers, config.null_score_diff_threshold)
    best = metrics.get(BEST_F1_THRESHOLD)
    if best is not None and (warning := describe_threshold(answers, best)):
        print(f"warning: {warning}", file=sys.stderr)
        del metrics[BEST_F1_THRESHOLD]
    parameters = question_parameters(
        model.config.max_positions,
        may_be_empty=may_be_empty(answers),
        max_answer_length=config.max_answer_length,
        length=config.max_seq_length,
    )
    if parameters.handle_impossible_answer:
        threshold = {"null_score_diff_threshold": config.null_score_diff_threshold}
        parameters = parameters.model_copy(update=threshold)
    recorded = parameters.model_dump(exclude_defaults=True)
    return {**metrics, "question_answering_parameters": recorded}
