"""Finetune a classifier of `transformers`, a teacher for `albert-serve finetune --teacher`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers

from training.data.corpus import CorpusError
from training.data.labelled.texts import LabelledText, read_labelled
from training.distillation.teacher import load_encoder, num_positions
from training.errors import report_errors
from training.system.command_line import make_parser

_EXAMPLES: Final = r"""examples:
  python -m recipes.albert_small_en.finetune_teacher sentence-transformers/all-MiniLM-L6-v2 \
      --train SST-2/train.tsv --dev SST-2/dev.tsv --labels negative positive \
      --output runs/teacher
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    texts, names = read_labelled(options.train, options.labels)
    dev, _ = read_labelled(options.dev, names)
    if len(names) < 2:
        # `transformers` takes a single label for a regression.
        raise CorpusError(f"all texts have the label {names[0]!r}; a classifier needs two labels")
    transformers.set_seed(options.seed)
    model, tokenizer = load_encoder(
        options.model,
        "AutoModelForSequenceClassification",
        optional=("classifier", "pooler"),
        id2label=dict(enumerate(names)),
        label2id={name: index for index, name in enumerate(names)},
    )
    with tempfile.TemporaryDirectory() as scratch:
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(
                output_dir=scratch,
                num_train_epochs=options.epochs,
                learning_rate=options.lr,
                warmup_steps=0.06,
                per_device_train_batch_size=options.batch_size,
                per_device_eval_batch_size=options.batch_size,
                train_sampling_strategy="group_by_length",
                seed=options.seed,
                save_strategy="no",
                dataloader_pin_memory=torch.cuda.is_available(),
                report_to=[],
            ),
            train_dataset=_examples(options.model, model, tokenizer, texts),
            eval_dataset=_examples(options.model, model, tokenizer, dev),
            processing_class=tokenizer,
            compute_metrics=_accuracy,
        )
        trainer.train()
        figures = trainer.evaluate()
    print(f"{options.model}: {figures['eval_accuracy']:.1%} of {len(dev):,} held-out texts")
    trainer.save_model(options.output)
    return 0


def _examples(
    name: str, model: Any, tokenizer: Any, texts: Sequence[LabelledText]
) -> list[dict[str, Any]]:
    encoded = tokenizer(
        [each.text for each in texts],
        [each.pair for each in texts] if texts[0].pair is not None else None,
        truncation=True,
        max_length=num_positions(model.config),
    )
    num_cut = sum(bool(each.overflowing) for each in encoded.encodings)
    if num_cut:
        print(f"{num_cut:,} of {len(texts):,} texts are cut to what {name} reads")
    return [
        {**{name: column[index] for name, column in encoded.items()}, "labels": each.label}
        for index, each in enumerate(texts)
    ]


def _accuracy(predicted: transformers.EvalPrediction) -> dict[str, float]:
    labels = np.asarray(predicted.predictions).argmax(-1)
    return {"accuracy": float(np.mean(labels == predicted.label_ids))}


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m recipes.albert_small_en.finetune_teacher", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("model", help="an encoder: a folder, or its name on the Hugging Face hub")
    add("--train", type=Path, nargs="+", required=True, help="labelled texts: CSV, TSV or JSONL")
    add("--dev", type=Path, nargs="+", required=True, help="held-out texts")
    add("--labels", nargs="+", help="names of the labels 0, 1, ... of those files")
    add("--output", type=Path, required=True, help="folder of the classifier")
    add("--epochs", type=float, default=1.0, help="passes over the texts (%(default)s)")
    add("--batch-size", type=int, default=32, help="texts per step (%(default)s)")
    add("--lr", type=float, default=1e-4, help="peak learning rate (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
