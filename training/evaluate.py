"""Evaluate a checkpoint on held-out data, each task by its own metric.

Prints a table and writes `evaluation.json` into the checkpoint's folder, where `export` reads it.
Questions are answered by the serving code.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

from albert_serve.bundle.weights import CLASSIFICATION
from albert_serve.files import write_atomically
from albert_serve.progress import progress
from albert_serve.tasks.question_answering.task import DEFAULT_MAX_SEQ_LEN
from albert_serve.tokenizer import AlbertTokenizer
from training.conversion.source import REFERENCE_HELP, open_checkpoint
from training.data.examples import MIN_LENGTH, ExampleSettings, SentenceTask
from training.data.labelled.choices import read_choices
from training.data.labelled.folders import CHOICES, labelled_files
from training.data.labelled.race import RACE, race_files
from training.data.labelled.texts import read_labelled
from training.data.masking import NgramMasking, word_starts
from training.data.questions import read_squad
from training.data.shards import Shards
from training.errors import EvaluationError, report_errors
from training.evaluation.choices import PREFIX as CHOICE_PREFIX
from training.evaluation.choices import ChoicePredictions, choose
from training.evaluation.classification import TextPredictions, classify, head_figure
from training.evaluation.glue import classify_task, task_figures
from training.evaluation.prediction_files import write_choices, write_glue, write_squad
from training.evaluation.questions import (
    BEST_F1_THRESHOLD,
    MAX_ANSWER_LENGTH,
    AnsweredQuestion,
    answer_questions,
    describe_threshold,
    may_be_empty,
    question_figures,
    request_parameters,
)
from training.evaluation.report import Evaluation, write_report
from training.evaluation.sentence_order import order_figures
from training.evaluation.validation import held_out, measure, unigram_entropy
from training.glue.files import dev_files, read_task, read_test
from training.glue.tasks import TASKS
from training.losses import Objective
from training.model.checkpoint import load_checkpoint, read_config
from training.model.heads import AlbertForTasks, Task
from training.model.labels import find_head, read_labels
from training.model.resizing import with_layers
from training.prepare import prepare
from training.run.heads import (
    add_heads,
    add_text_classification,
    each_head,
    head_parser,
    parse_with_heads,
)
from training.run.options import (
    add_choices,
    add_columns,
    add_device,
    add_task,
    columns_of,
    parse_count,
    parse_finite,
    with_task_data,
)
from training.system.command_line import make_parser
from training.system.precision import PrecisionName, precision

_EXAMPLES: Final = r"""examples:
  python -m training.evaluate runs/base/checkpoint --pretraining wiki/validation.jsonl.xz
  python -m training.evaluate runs/tasks/checkpoint --text-classification sst2/dev.tsv \
      --question-answering squad/dev-v1.1.json --output figures.json
  python -m training.evaluate runs/rte/best --task RTE --data glue/RTE
  python -m training.evaluate runs/both/best --text-classification sst2/dev.tsv \
      --head topic --text-classification news/test.csv --label-column category
  python -m training.evaluate runs/race/best --multiple-choice RACE/test --truncation
  python -m training.evaluate textattack/albert-base-v2-SST-2 --text-classification sst2/dev.tsv
"""

# Suffix of the file of all errors of the data, where they are more than are printed.
_ERRORS: Final = ".errors.txt"
# The one split of the user's own files.
_ONLY: Final = "data"


def evaluate_pretraining(
    model: AlbertForTasks,
    shards: Shards,
    masking: NgramMasking,
    settings: ExampleSettings,
    products: PrecisionName = "auto",
) -> dict[str, float]:
    """Evaluate masked tokens (loss in nats, accuracy) and the sentence task; nan without any.

    Next sentences are among masked tokens, as they are learnt. The order of segments is asked for
    without masks, in both orders, and masked tokens then stand in texts of one segment, as the
    service fills them: a model that learnt order in steps of its own saw no masks in pairs.

    `unigram_entropy` is the loss of a model that has learnt the token frequencies of this text
    and nothing else.
    """
    device = next(model.parameters()).device
    tasks: tuple[Task, ...] = ("fill-mask",)
    masked_settings = replace(settings, sentence_task="none")
    if settings.sentence_task == "nsp":
        tasks, masked_settings = ("fill-mask", "sentence-order"), settings
    batches = list(held_out(shards, masking, masked_settings))
    shown = progress(batches, title="validation", unit="batches")
    tallies = measure(Objective(model, device), shown, tasks, device, products)
    assert tallies is not None
    masked = tallies["fill-mask"]
    figures = {
        "masked_loss": masked.loss,
        "masked_accuracy": masked.accuracy,
        "masked_tokens": masked.count,
        "unigram_entropy": unigram_entropy(shards, model.config.vocab_size),
    }
    if settings.sentence_task == "nsp":
        order = tallies["sentence-order"]
        figures |= {
            "next_sentence_loss": order.loss,
            "next_sentence_accuracy": order.accuracy,
            "next_sentence_pairs": order.count,
        }
    if settings.sentence_task == "sop":
        figures |= order_figures(model, shards, settings, products)
    return figures


def evaluate(options: argparse.Namespace) -> Evaluation:
    """Return the figures and answers of every kind of data that is given.

    Raises:
        EvaluationError: none is given, the checkpoint has no head for it, or options contradict.
        RunError: as `with_task_data`.
    """
    options = with_task_data(options)
    options.heads = list(each_head(options))
    num_texts = len(options.heads) + bool(options.text_classification or options.task in TASKS)
    has_choices = bool(options.multiple_choice or options.task == RACE)
    if not (options.pretraining or num_texts or has_choices or options.question_answering):
        raise EvaluationError(
            "nothing to measure: give --pretraining, --text-classification, --multiple-choice, "
            "--task, --head or --question-answering"
        )
    kinds = [num_texts > 0, has_choices, bool(options.question_answering)]
    if options.predictions is not None and sum(kinds) != 1:
        raise EvaluationError(
            "--predictions writes those of texts, of multiple choice or of questions; give the "
            "data of one of them"
        )
    with (
        open_checkpoint(options.checkpoint) as checkpoint,
        with_layers(checkpoint.folder, options.layers) as folder,
        precision(options.device, options.precision),
    ):
        return _evaluate(options, folder)


def _evaluate(options: argparse.Namespace, folder: Path) -> Evaluation:
    model = load_checkpoint(folder).to(options.device).eval()
    tokenizer = AlbertTokenizer.from_file(folder / "tokenizer.json")
    figures: dict[str, Any] = {} if options.layers is None else {"layers": options.layers}
    classified: dict[str, TextPredictions] = {}
    chosen: ChoicePredictions | None = None
    answered: list[AnsweredQuestion] = []
    if options.pretraining:
        _need(model, "fill-mask")
        figures |= _held_out_figures(options, folder, model, tokenizer)
    if options.multiple_choice or options.task == RACE:
        _need(model, "multiple-choice")
        if options.task == RACE:
            figures[f"{CHOICE_PREFIX}_task"] = RACE.upper()
        chosen = _choose(options, model, tokenizer)
        figures |= chosen.figures()
    for head, own in _classifiers(options, folder, model).items():
        answers = _classify(own, folder, model, tokenizer, head)
        task = TASKS.get(own.task)
        of_head = answers[_ONLY].figures() if task is None else task_figures(task, answers)
        _, _, name = head.partition("/")
        if name:
            answers = {f"{name}-{split}": each for split, each in answers.items()}
            of_head = {head_figure(name, figure): value for figure, value in of_head.items()}
        classified |= answers
        figures |= of_head
    if options.question_answering:
        _need(model, "question-answering")
        answered = _answer(options, model, tokenizer)
        figures |= question_figures(answered, options.null_score_diff_threshold)
        figures["question_answering_parameters"] = request_parameters(
            answered,
            options.null_score_diff_threshold,
            max_positions=model.config.max_positions,
            max_answer_length=options.max_answer_length,
            length=options.max_seq_length,
        )
        _warn_of_threshold(answered, figures)
    return Evaluation(
        figures={
            name: figure
            for name, figure in figures.items()
            if not isinstance(figure, float) or math.isfinite(figure)
        },
        texts=classified,
        choices=chosen,
        questions=answered,
        threshold=options.null_score_diff_threshold,
    )


def _answer(
    options: argparse.Namespace, model: AlbertForTasks, tokenizer: AlbertTokenizer
) -> list[AnsweredQuestion]:
    if options.max_seq_length is not None:
        _check_length("--max-seq-length", options.max_seq_length, model)
    answered = answer_questions(
        model,
        tokenizer,
        read_squad(options.question_answering),
        max_answer_length=options.max_answer_length,
        length=options.max_seq_length,
    )
    if options.predictions is not None:
        threshold = options.null_score_diff_threshold if may_be_empty(answered) else None
        files = write_squad(answered, options.predictions, threshold)
        print(f"{len(answered):,} answers in {', '.join(map(str, files))}")
    return answered


def _choose(
    options: argparse.Namespace, model: AlbertForTasks, tokenizer: AlbertTokenizer
) -> ChoicePredictions:
    is_race = options.task == RACE
    paths = race_files(options.data, "dev") if is_race else options.multiple_choice
    files = labelled_files(paths, "test", "validation", suffixes=CHOICES)
    questions = read_choices(files, columns_of(options), options.choice_columns)
    # RACE's passages are cut in all published figures.
    chosen = choose(model, tokenizer, questions, truncation=options.truncation or is_race)
    if options.predictions is not None:
        write_choices(chosen, options.predictions)
    return chosen


def _warn_of_threshold(answered: Sequence[AnsweredQuestion], figures: Mapping[str, float]) -> None:
    threshold = figures.get(BEST_F1_THRESHOLD)
    warning = None if threshold is None else describe_threshold(answered, threshold)
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr)


def _classifiers(
    options: argparse.Namespace, folder: Path, model: AlbertForTasks
) -> dict[Task, argparse.Namespace]:
    """Return the options of each classifier that is measured.

    Raises:
        EvaluationError, CheckpointError: the model has none, or one is given twice.
    """
    given: dict[Task, argparse.Namespace] = {}
    if options.text_classification or options.task not in (None, RACE):
        _need(model, CLASSIFICATION)
        given[CLASSIFICATION] = options
    for own in options.heads:
        head = find_head(read_config(folder), model.tasks, own.head)
        if head in given:
            raise EvaluationError(
                f"--head {own.head} is the default classifier, whose data stands before --head "
                "already; give one of the two"
            )
        given[head] = own
    return given


def _classify(
    options: argparse.Namespace,
    folder: Path,
    model: AlbertForTasks,
    tokenizer: AlbertTokenizer,
    head: Task,
) -> dict[str, TextPredictions]:
    names, problem = read_labels(read_config(folder), model.tasks[head], head)
    task = TASKS.get(options.task)
    if task is None:
        files = labelled_files(options.text_classification, "test", "validation")
        texts, _ = read_labelled(files, names, columns_of(options), problem)
        answers = classify(
            model, tokenizer, texts, names, problem, truncation=options.truncation, head=head
        )
        classified = {_ONLY: answers}
    else:
        texts_of = {
            split: read_task(task, {split: files}).texts[split]
            for split, files in dev_files(task, options.data).items()
        }
        classified = classify_task(
            model, tokenizer, task, names, texts_of, truncation=options.truncation, head=head
        )
    if options.predictions is not None:
        submitted = classified
        if task is not None and (tests := read_test(task, options.data)):
            submitted = classify_task(
                model, tokenizer, task, names, tests, truncation=options.truncation, head=head
            )
        write_glue(submitted, _of_head(options.predictions, head), task)
    return classified


def _of_head(file: Path, head: Task) -> Path:
    """Return the file of a classifier's predictions, of a further one with its name at the end."""
    _, _, name = head.partition("/")
    return file.with_name(f"{file.stem}-{name}{file.suffix}") if name else file


def _held_out_figures(
    options: argparse.Namespace, folder: Path, model: AlbertForTasks, tokenizer: AlbertTokenizer
) -> dict[str, float]:
    _check_length("--length", options.length, model)
    masking = NgramMasking(word_starts=word_starts(tokenizer))
    with tempfile.TemporaryDirectory() as scratch:
        shards = prepare(options.pretraining, folder / "tokenizer.json", Path(scratch) / "shards")
        settings = ExampleSettings(
            length=options.length, sentence_task=_sentence_task(folder, model)
        )
        return evaluate_pretraining(model, shards, masking, settings, options.precision)


def _check_length(option: str, length: int, model: AlbertForTasks) -> None:
    if not MIN_LENGTH <= length <= model.config.max_positions:
        raise EvaluationError(
            f"{option} {length}: a sequence has from {MIN_LENGTH} tokens to the model's "
            f"{model.config.max_positions} positions"
        )


def _sentence_task(folder: Path, model: AlbertForTasks) -> SentenceTask:
    """Return the task that the checkpoint's sentence head was trained on."""
    if "sentence-order" not in model.tasks:
        return "none"
    return "nsp" if read_config(folder).get("albert_sentence_task") == "nsp" else "sop"


def _need(model: AlbertForTasks, *tasks: str) -> None:
    missing = [task for task in tasks if task not in model.tasks]
    if missing:
        raise EvaluationError(
            f"the checkpoint has no head for {', '.join(missing)}; it has {', '.join(model.tasks)}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = parse_with_heads(_parser(), head_parser(), arguments)
    figures = _figures_file(options)
    errors = figures.with_name(figures.name.removesuffix(".json") + _ERRORS)
    return report_errors(lambda: _run(options), errors)


def _figures_file(options: argparse.Namespace) -> Path:
    """Return the file of the figures; of a model of the Hub, where it would be in this folder."""
    folder = Path(options.checkpoint)
    return options.output or (folder if folder.is_dir() else Path()) / "evaluation.json"


def _run(options: argparse.Namespace) -> int:
    results = evaluate(options)
    figures = results.figures
    width = max(map(len, figures))
    for name, value in figures.items():
        if isinstance(value, float):
            print(f"{name:{width}} {value:12,.4f}")
        elif isinstance(value, int):
            print(f"{name:{width}} {value:12,}")
    for name, rows in figures.items():
        if name.endswith("_classes") and len(rows) > 2:
            _print_classes(rows)
        if name.endswith(("_by_layer", "_by_patience")):
            _print_depths(rows)
    folder = Path(options.checkpoint)
    is_whole = folder.is_dir() and options.layers is None
    file = options.output or (folder / "evaluation.json" if is_whole else None)
    if file is not None:
        content = json.dumps(dict(figures), indent=2, allow_nan=False) + "\n"
        write_atomically(file, content.encode())
    if options.report is not None:
        print(f"report in {write_report(results, folder.resolve().name, options.report)}")
    if file is not None:
        print(f"written to {file}")
    else:
        print("not written to a file, which --output names for a model of the Hub or --layers")
    return 0


def _print_classes(classes: Mapping[str, Mapping[str, float]]) -> None:
    width = max(map(len, (*classes, "class")))
    print(f"\n{'class':{width}}  precision  recall      f1   texts")
    for name, figures in classes.items():
        shown = " ".join(f"{figures[key]:8.4f}" for key in ("precision", "recall", "f1"))
        print(f"{name:{width}}  {shown} {figures['texts']:7,}")
    print()


def _print_depths(rows: Sequence[Mapping[str, float]]) -> None:
    print("\n" + "  ".join(f"{name:>11}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{v:11.4f}" if isinstance(v, float) else f"{v:11}" for v in row.values()))
    print()


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("training.evaluate", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help=REFERENCE_HELP)
    add("--pretraining", nargs="+", type=Path, help="held-out text")
    add_text_classification(parser)
    add_heads(parser)
    add_task(parser)
    add_columns(parser)
    add_choices(parser)
    add(
        "--truncation",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="cut longer texts to the model's positions, as those of --task RACE always are; "
        "otherwise they are an error",
    )
    add("--question-answering", nargs="+", type=Path, help="SQuAD files")
    add(
        "--max-seq-length",
        type=parse_count,
        help="maximum tokens of a question with a window of its context "
        f"({DEFAULT_MAX_SEQ_LEN}, or the model's positions)",
    )
    add(
        "--max-answer-length",
        type=parse_count,
        default=MAX_ANSWER_LENGTH,
        help="maximum tokens of an answer (%(default)s)",
    )
    add(
        "--null-score-diff-threshold",
        type=parse_finite,
        default=0.0,
        metavar="LOGITS",
        help="where some questions have no answer: by how much the logit of no answer must be over "
        "that of the best answer to win (%(default)s); the best value is among the figures",
    )
    add(
        "--predictions",
        type=Path,
        metavar="FILE",
        help="write the predictions in the official form: of --task a TSV file, for the test file "
        "if the folder has one; of questions a JSON file, and others beside it with the best "
        "answers and the null scores; of multiple choice a JSON file with a letter for each "
        "question",
    )
    add(
        "--report",
        type=Path,
        metavar="FOLDER",
        help="write report.md with confusion, calibration and the worst examples",
    )
    add(
        "--layers",
        type=parse_count,
        metavar="NUMBER",
        help="apply only so many layers of a model whose layers share all weights",
    )
    add("--length", type=parse_count, default=128, help="tokens per row of held-out text (128)")
    add("--output", type=Path, help="output file (evaluation.json in the checkpoint's folder)")
    add_device(parser)
    add(
        "--precision",
        choices=get_args(PrecisionName),
        default="fp32",
        help="of matrix products; auto takes the faster one (%(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
