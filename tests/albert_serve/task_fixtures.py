"""The small model's tokenizer, and an engine in torch to run its tasks with."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from albert_serve.api.embeddings import FEATURE_EXTRACTION
from albert_serve.bundle.manifest import HeadEntry
from albert_serve.tasks import EncoderInput, Logits, Prepared, TaskSetup
from albert_serve.tokenizer import AlbertTokenizer
from training.model.albert import ModelInputs
from training.model.checkpoint import load_checkpoint
from training.model.heads import AlbertForTasks

ARTICLES = Path(__file__).resolve().parents[1] / "data/wiki.jsonl"


class TorchEngine:
    """Runs inputs one by one, unpadded: the numbers that any other engine should give."""

    def __init__(self, model: AlbertForTasks, max_batch_tokens: int = 512) -> None:
        self.model = model.eval()
        self.max_batch_tokens = max_batch_tokens

    @torch.inference_mode()
    def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        return [self._run_one(item) for item in inputs]

    def _run_one(self, item: EncoderInput) -> Logits:
        batch = ModelInputs(ids=torch.tensor([item.ids]), types=torch.tensor([item.types]))
        hidden = self.model(batch)[0]
        rows = hidden if item.rows is None else hidden[item.rows]
        if item.task != FEATURE_EXTRACTION:
            rows = self.model.heads[item.task](rows)
        if item.reduction == "mean":
            rows = rows.mean(0, keepdim=True)
        if item.reduction == "max":
            rows = rows.amax(0, keepdim=True)
        logits: Logits = rows.numpy().astype(np.float32)
        return logits


Answerer = Callable[[Prepared[Any]], Any]


@pytest.fixture(scope="session")
def tokenizer(checkpoint_dir: Path) -> AlbertTokenizer:
    return AlbertTokenizer.from_file(checkpoint_dir / "tokenizer.json")


@pytest.fixture(scope="session")
def engine(checkpoint_dir: Path) -> TorchEngine:
    return TorchEngine(load_checkpoint(checkpoint_dir))


@pytest.fixture(scope="session")
def answer(engine: TorchEngine) -> Answerer:
    """Runs what a task prepared, and gives the answer."""

    def run(prepared: Prepared[Any]) -> Any:
        return prepared.finish(engine.run(prepared.inputs))

    return run


@pytest.fixture(scope="session")
def task_setup(tokenizer: AlbertTokenizer, engine: TorchEngine) -> TaskSetup:
    entry = HeadEntry(graph="a.onnx", num_outputs=2, labels=["negative", "positive"])
    return TaskSetup(
        tokenizer=tokenizer,
        max_positions=engine.model.config.max_positions,
        hidden_size=engine.model.config.hidden_size,
        heads={"text-classification": entry},
    )


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """Sentences of Wikipedia, short and long."""
    with ARTICLES.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    paragraphs = [line for text in texts for line in text.splitlines() if len(line) > 40]
    return [paragraph[:150] for paragraph in paragraphs[::7]][:12]
