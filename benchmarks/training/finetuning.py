"""The finetuning that both sides run: one classifier from the default model, on the same texts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from albert_serve.bundle.weights import CLASSIFICATION
from albert_serve.settings import shipped_bundle
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.training.case import LR, HfRow
from training.finetuning.config import FinetuneConfig
from training.finetuning.model import Start, labels_of, load_start
from training.finetuning.plan import plan_of
from training.finetuning.recipes import DEFAULTS, hyperparameters_of
from training.finetuning.tasks import read_tasks, setup_of
from training.loop.distributed import World
from training.loop.driver import build_run
from training.loop.step import Run
from training.tasks.classification.files import labelled_examples, read_splits


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuningCase:
    """A file of labelled texts, and the number of texts per step.

    Attributes:
        examples: examples of the texts for `transformers`, made by `make_case`.
    """

    texts: Path
    num_rows: int
    length: int
    num_labels: int
    examples: Sequence[HfRow]

    @property
    def padded_length(self) -> None:
        """No fixed length: `transformers` pads the rows of a batch to its longest row."""
        return

    def build_ours(self, device: torch.device, *, compiles: bool) -> Run:
        """Return the run of this package, with the settings of both sides."""
        config = FinetuneConfig(
            output=Path("unused"),
            text_classification=(self.texts,),
            validation_split=0.0,
            batch_size=(self.num_rows,),
            length=self.length,
            steps=sys.maxsize,
            lr=LR,
            device=device,
            compile=compiles,
        )
        world, folder = World(device=device), shipped_bundle()
        hyperparameters = hyperparameters_of(config, folder)
        start = Start.open(folder, config)
        tasks = read_tasks(config, start, setup_of(config, start, world))
        plan = plan_of(tasks, config, hyperparameters.loss_weights)
        return build_run(
            load_start(start, [CLASSIFICATION], labels_of(tasks)),
            plan.mixture,
            {name: loss for task in tasks for name, loss in task.losses.items()},
            hyperparameters,
            progress=plan.progress,
            world=world,
            precision="auto",
        )

    def make_hf_model(self, attention: str) -> Any:
        """Return the default model in `transformers`, with a new classifier."""
        import transformers  # imported here, so that our own process does not load it

        return transformers.AutoModelForSequenceClassification.from_pretrained(
            shipped_bundle(),
            num_labels=self.num_labels,
            attn_implementation=attention,
            ignore_mismatched_sizes=True,
        )


def make_case(texts: Path, *, length: int) -> FinetuningCase:
    """Read and tokenise a file of labelled texts."""
    splits = read_splits({"training": [texts]})
    tokenizer = AlbertTokenizer.from_file(shipped_bundle() / "tokenizer.json")
    examples, _ = labelled_examples(
        splits.texts["training"], tokenizer, length=length, truncation=True
    )
    rows: list[HfRow] = [
        {"input_ids": example.ids, "token_type_ids": example.types, "labels": example.target}
        for example in examples
    ]
    return FinetuningCase(
        texts=texts,
        num_rows=DEFAULTS["batch_size"][0],
        length=length,
        num_labels=len(splits.names),
        examples=rows,
    )
