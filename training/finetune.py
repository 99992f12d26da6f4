"""Finetuning of several tasks into one set of weights.

Each step trains one task, drawn by its --weights. `--pretraining` continues masked tokens and
sentence order, so that these tasks keep their accuracy while the shared layer changes. Writes
`checkpoints/`, of which `checkpoint` is the newest, `metrics.jsonl` and `tensorboard/` into the
output folder; the same command resumes a run that was stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tqdm import tqdm

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from training.conversion.source import REFERENCE_HELP, open_initial
from training.data.batch import TokenisedExample
from training.data.collate import Collator, Slicing
from training.data.datasets import read_labelled, read_squad, read_texts
from training.data.examples import MIN_LENGTH, ExampleSettings
from training.data.feeds import BatchFeed, Feed, PlannedFeed, example_feed, labelled_examples
from training.data.masking import NgramMasking, word_starts
from training.data.packing import Plan
from training.data.windows import span_examples
from training.errors import report_errors
from training.loop.checkpointing import Checkpoints
from training.loop.distributed import World, join_world
from training.loop.metrics import Metrics
from training.loop.progress import Progress, RunError, is_known_run, record_run
from training.loop.provenance import file_names
from training.loop.step import Run
from training.loop.trainer import Saver, Trainer
from training.losses import LOSS_OF, LossFunction, Objective
from training.model.checkpoint import cut_positions, label_keys, load_checkpoint, read_config
from training.model.heads import head_sizes
from training.optim.optimizers import OptimizerSettings, Schedule, build_optimizers
from training.options import add_end, add_optimization, add_reports, parse_count, parse_positive
from training.prepare import prepare

_EXAMPLES: Final = r"""examples:
  python -m training.finetune --initialize-from runs/base/checkpoint --output runs/sentiment \
      --text-classification sst2/train.tsv --labels negative positive --steps 20000
  python -m training.finetune --initialize-from runs/base/checkpoint --output runs/tasks \
      --text-classification sst2/train.tsv --labels negative positive \
      --question-answering squad/train-v1.1.json --pretraining wiki/*.jsonl.xz \
      --weights 1 2 1 --budget 30m
  python -m training.finetune --initialize-from albert/albert-base-v2 --output runs/mood \
      --text-classification mood.tsv --labels bad good --steps 5000
"""
# Options that do not affect the results.
_NOT_RECORDED: Final = frozenset({"output", "device", "save_every", "report_every", "keep"})
_DEFAULTS: Final[dict[str, float | str]] = {
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


def _build(options: argparse.Namespace) -> tuple[Run, dict[str, Any]]:
    """Build the run, and the keys of config.json that name its labels."""
    hf = read_config(options.initialize_from)
    config = AlbertConfig.from_hf(hf)
    _check_length(options.length, options.max_positions or config.max_positions)
    progress = Progress(num_steps=options.steps, budget_s=options.budget)
    feeds, labels, loss_of = _feeds(options)
    torch.manual_seed(options.seed)
    heads = load_checkpoint(options.initialize_from).tasks
    tasks = tuple(task for feed in feeds for task in feed.tasks)
    sizes = {**heads, **head_sizes(config, tasks, len(labels.get("id2label", ())))}
    model = load_checkpoint(options.initialize_from, sizes)
    if options.max_positions:
        model = cut_positions(model, options.max_positions)
    model.to(options.device)
    run = Run(
        model=model,
        objective=Objective(model, options.device, loss_of),
        optimizers=build_optimizers(
            model,
            OptimizerSettings(
                name=options.optimizer,
                lr=options.lr,
                adamw_lr=options.adamw_lr,
                pooled_factor=1.0,
                weight_decay=options.weight_decay,
            ),
        ),
        schedule=Schedule(kind=options.schedule, warmup=options.warmup, decay=options.decay),
        feeds=feeds,
        weights=_weights(options, feeds),
        loss_weights={"sentence-order": options.sentence_weight},
        clip_norm=options.clip_norm,
        seed=options.seed,
        world=World(device=options.device),
        progress=progress,
    )
    kept = {key: hf[key] for key in label_keys([]) if key in hf and "text-classification" in sizes}
    task = {key: hf[key] for key in ("albert_sentence_task",) if key in hf}
    return run, {**task, **(labels or kept)}


def _check_length(length: int, max_positions: int) -> None:
    if not MIN_LENGTH <= length <= max_positions:
        raise RunError(
            f"--length {length}: a sequence has from {MIN_LENGTH} tokens to the model's "
            f"{max_positions} positions"
        )


def _feeds(
    options: argparse.Namespace,
) -> tuple[list[Feed], dict[str, Any], dict[str, LossFunction]]:
    """Return the task streams in the order of --weights, config.json's label keys, and losses."""
    tokenizer = AlbertTokenizer.from_file(options.initialize_from / "tokenizer.json")
    feeds: list[Feed] = []
    labels: dict[str, Any] = {}
    loss_of = dict(LOSS_OF)
    if options.teacher is not None and not options.text_classification:
        raise RunError("--teacher labels texts; give them with --text-classification")
    if options.text_classification:
        examples, labels, loss_of["text-classification"] = _classification(options, tokenizer)
        feeds.append(
            example_feed(
                "text-classification",
                examples,
                tokens_a_batch=options.classification_tokens,
                seed=options.seed,
            )
        )
    if options.question_answering:
        feeds.append(_question_answering(options, tokenizer))
    if options.pretraining:
        feeds.append(_pretraining(options, tokenizer))
    if not feeds:
        raise RunError(
            "nothing to train: give --text-classification, --question-answering or --pretraining"
        )
    return feeds, labels, loss_of


def _weights(options: argparse.Namespace, feeds: Sequence[Feed]) -> list[float]:
    weights = options.weights or [1.0] * len(feeds)
    if len(weights) != len(feeds):
        names = ", ".join(feed.name for feed in feeds)
        raise RunError(f"--weights {weights}: give one for each of {names}")
    return list(weights)


def _classification(
    options: argparse.Namespace, tokenizer: AlbertTokenizer
) -> tuple[Sequence[TokenisedExample], dict[str, Any], LossFunction]:
    """Return the examples of text classification, the label keys, and the loss function."""
    if options.teacher is not None:
        return _taught_classification(options, tokenizer)
    texts, names = read_labelled(options.text_classification, options.labels)
    if len(names) < 2:
        raise RunError(f"all texts have the label {names[0]}; a classifier needs two or more")
    examples, num_long = labelled_examples(texts, tokenizer, length=options.length)
    if num_long:
        print(f"{num_long} of {len(texts)} texts are over {options.length} tokens: left out")
    if not examples:
        raise RunError(f"no text fits into {options.length} tokens; give a larger --length")
    return examples, label_keys(names), LOSS_OF["text-classification"]


def _taught_classification(
    options: argparse.Namespace, tokenizer: AlbertTokenizer
) -> tuple[Sequence[TokenisedExample], dict[str, Any], LossFunction]:
    """Return the same of texts with a teacher's logits as labels."""
    # Imported here, since only a teacher needs transformers.
    from training.distillation.pseudo_labels import (
        PseudoLabelLoss,
        pseudo_label,
        pseudo_labelled_examples,
    )

    if options.labels:
        raise RunError("--labels goes with labelled texts; with --teacher the labels are its own")
    texts = read_texts(options.text_classification)
    labels = pseudo_label(texts, options.teacher, options.device, options.output)
    examples = pseudo_labelled_examples(texts, labels, tokenizer, length=options.length)
    loss = PseudoLabelLoss(problem=labels.problem, temperature=options.temperature)
    return examples, label_keys(labels.names, multi_label=labels.problem == "multi_label"), loss


def _question_answering(options: argparse.Namespace, tokenizer: AlbertTokenizer) -> BatchFeed:
    questions = read_squad(options.question_answering)
    examples = [
        example
        for question in tqdm(questions, desc="tokenising questions", disable=None)
        for example in span_examples(question, tokenizer, length=options.length)
    ]
    return example_feed(
        "question-answering", examples, tokens_a_batch=options.batch_tokens, seed=options.seed
    )


def _pretraining(options: argparse.Namespace, tokenizer: AlbertTokenizer) -> PlannedFeed:
    tokenizer_file = options.initialize_from / "tokenizer.json"
    shards = prepare(options.pretraining, tokenizer_file, options.output / "shards")
    masking = NgramMasking(word_starts=word_starts(tokenizer))
    num_rows = max(1, options.batch_tokens // options.length)
    return PlannedFeed(
        plan=Plan(shards=shards, settings=_example_settings(options), seed=options.seed),
        collate=Collator(shards=shards, masking=masking, length=options.length, seed=options.seed),
        slicing=Slicing(num_rows=num_rows, rows_a_batch=num_rows),
    )


def _example_settings(options: argparse.Namespace) -> ExampleSettings:
    """Return the settings with the sentence task of the checkpoint's pretraining."""
    task = read_config(options.initialize_from).get("albert_sentence_task")
    return ExampleSettings(length=options.length, sentence_task="nsp" if task == "nsp" else "sop")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    settings = {
        name: str(value) for name, value in vars(options).items() if name not in _NOT_RECORDED
    }
    with join_world(options.device) as world:
        if world.size > 1:
            raise RunError("finetuning runs in one process; begin it without torchrun")
        with open_initial(options) as local:
            return _train(local, settings)


def _train(options: argparse.Namespace, settings: Mapping[str, str]) -> int:
    is_known = is_known_run(options.output, settings)
    checkpoints = Checkpoints(folder=options.output, num_kept=options.keep)
    run, extra_config = _build(options)
    if not is_known:
        record_run(options.output, settings)
    saver = Saver(
        folder=options.output,
        checkpoints=checkpoints,
        tokenizer_from=options.initialize_from,
        every_s=options.save_every,
        program="training.finetune",
        stage={"settings": {**settings, **_data_names(options)}},
        initialized_from=options.initialize_from,
        extra_config=extra_config,
    )
    if saver.resume(run):
        print(f"going on from step {run.progress.step:,}")
    trainer = Trainer(
        run=run,
        saver=saver,
        metrics=Metrics(options.output, step=run.progress.step),
        report_every=options.report_every,
    )
    status = trainer.train()
    batches = ", ".join(f"{count:,} of {name}" for name, count in run.num_steps.items())
    print(f"{options.output / 'checkpoint'}: {run.progress.step:,} steps ({batches})")
    return status


def _data_names(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the names of the data files without their folders."""
    return {
        "initialize_from": [options.initial_name],
        "text_classification": file_names(options.text_classification),
        "question_answering": file_names(options.question_answering),
        "pretraining": file_names(options.pretraining),
        "teacher": [] if options.teacher is None else file_names([Path(options.teacher)]),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.finetune",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--initialize-from", required=True, metavar="CHECKPOINT", help=REFERENCE_HELP)
    add("--output", type=Path, required=True, help="the run's folder")
    data = parser.add_argument_group("data (at least one)")
    data.add_argument("--text-classification", nargs="+", type=Path, help="TSV, CSV or JSONL files")
    data.add_argument("--labels", nargs="+", help="names of the labels 0, 1, ... of those files")
    data.add_argument(
        "--teacher",
        help="a finetuned encoder of transformers, a folder or a name on the hub, whose logits "
        "replace the labels; --text-classification may then be .txt files, one text per line",
    )
    data.add_argument(
        "--temperature",
        type=parse_positive,
        default=2.0,
        help="of the teacher's and the student's probabilities (%(default)s)",
    )
    data.add_argument("--question-answering", nargs="+", type=Path, help="SQuAD files")
    data.add_argument("--pretraining", nargs="+", type=Path, help="text for continued pretraining")
    data.add_argument(
        "--weights",
        nargs="+",
        type=parse_positive,
        help="relative frequency of each task, in that order (1)",
    )
    add_end(parser)
    how = parser.add_argument_group("training")
    how.add_argument(
        "--max-positions", type=parse_count, help="drop positions that pretraining never used"
    )
    how.add_argument(
        "--length", type=parse_count, default=128, help="maximum tokens of a sequence (128)"
    )
    how.add_argument(
        "--batch-tokens", type=parse_count, default=4096, help="tokens per step (4096)"
    )
    how.add_argument(
        "--classification-tokens",
        type=parse_count,
        default=2048,
        help="tokens per step of classification (2048)",
    )
    add_optimization(how, _DEFAULTS)
    add_reports(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
