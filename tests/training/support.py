"""Small models of ours and of `transformers`, and what both compute."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from torch import Tensor, nn

from albert_serve.config import AlbertConfig
from training.heads import AlbertForTasks, Task
from training.loop import Run, Step
from training.model import Batch

REPOSITORY: Final = Path(__file__).parents[2]
WIKI: Final = REPOSITORY / "tests" / "data" / "wiki.jsonl"
SQUAD: Final = REPOSITORY / "tests" / "data" / "squad.json"

TINY: Final = AlbertConfig(
    vocab_size=50,
    embedding_size=12,
    hidden_size=24,
    num_layers=4,
    num_heads=3,
    ffn_size=40,
    max_positions=16,
    classifier_dropout=0.0,
)
# The class of `transformers` for each set of heads that it has a class for.
HF_CLASSES: Final[dict[str, tuple[Task, ...]]] = {
    "AlbertForPreTraining": ("fill-mask", "sentence-order"),
    "AlbertForMaskedLM": ("fill-mask",),
    "AlbertForSequenceClassification": ("text-classification",),
    "AlbertForQuestionAnswering": ("question-answering",),
    "AlbertForMultipleChoice": ("multiple-choice",),
}
SIZES: Final[dict[Task, int]] = {
    "fill-mask": TINY.vocab_size,
    "sentence-order": 2,
    "text-classification": 3,
    "question-answering": 2,
    "multiple-choice": 1,
}


def sizes(tasks: tuple[Task, ...]) -> dict[Task, int]:
    return {task: SIZES[task] for task in tasks}


def our_model(config: AlbertConfig, tasks: tuple[Task, ...], seed: int = 0) -> AlbertForTasks:
    """A model in fp32 with weights that make every bias and norm matter."""
    model = AlbertForTasks(config, sizes(tasks))
    randomize(model, seed)
    return model.eval()


def hf_model(config: AlbertConfig, class_name: str, seed: int = 1) -> Any:
    """The same architecture of `transformers`, in fp32."""
    labels = 3 if class_name == "AlbertForSequenceClassification" else 2
    hf_config = transformers.AlbertConfig.from_dict({**config.to_hf(), "num_labels": labels})
    model = getattr(transformers, class_name)(hf_config)
    randomize(model, seed)
    return model.eval()


def hf_load(class_name: str, folder: Path, **changes: Any) -> Any:
    """Loads, and sees that `transformers` found every weight that it has a place for."""
    model, report = getattr(transformers, class_name).from_pretrained(
        folder, output_loading_info=True, **changes
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    return model.eval()


def randomize(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3, generator=generator)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1.0)


def ragged(lengths: tuple[int, ...] = (5, 16, 1, 9), seed: int = 2) -> Batch:
    """Right-padded sequences; pad ids stand in the padding only."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    is_real = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    return Batch(
        ids=torch.randint(1, TINY.vocab_size, shape, generator=generator) * is_real,
        types=torch.randint(0, 2, shape, generator=generator) * is_real,
        lengths=torch.tensor(lengths),
    )


def is_real(batch: Batch) -> Tensor:
    """True where a token is no padding, (B, S)."""
    assert batch.lengths is not None
    return torch.arange(batch.ids.shape[1]) < batch.lengths[:, None]


def our_logits(model: AlbertForTasks, batch: Batch) -> dict[Task, Tensor]:
    """The logits of each head: of all real rows, or of the [CLS] rows."""
    hidden = model(batch)
    rows: dict[bool, Tensor] = {True: hidden[is_real(batch)], False: hidden[:, 0]}
    return {
        task: model.logits(task, rows[task in ("fill-mask", "question-answering")])
        for task in model.tasks
    }


def hf_logits(model: Any, batch: Batch) -> dict[Task, Tensor]:
    """The same of a model of `transformers`."""
    real = is_real(batch)
    inputs = {
        "input_ids": batch.ids,
        "token_type_ids": batch.types,
        "attention_mask": real.long(),
    }
    name = type(model).__name__
    if name == "AlbertForMultipleChoice":
        out = model(**{key: value[None] for key, value in inputs.items()})
        return {"multiple-choice": out.logits.T}
    out = model(**inputs)
    if name == "AlbertForPreTraining":
        return {"fill-mask": out.prediction_logits[real], "sentence-order": out.sop_logits}
    if name == "AlbertForQuestionAnswering":
        both = torch.stack([out.start_logits, out.end_logits], -1)
        return {"question-answering": both[real]}
    return {HF_CLASSES[name][0]: out.logits[real] if name == "AlbertForMaskedLM" else out.logits}


def assert_close(
    ours: Mapping[Any, Tensor], theirs: Mapping[Any, Tensor], limit: float = 1e-10
) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape, name
        assert (tensor - theirs[name]).abs().max() < limit, name


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of a run's `metrics.jsonl`."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def same_weights(one: Path, other: Path) -> bool:
    """Whether two runs have the same checkpoint to the bit, and the same optimizers."""
    states = [torch.load(folder / "state.pt", weights_only=True) for folder in (one, other)]
    files = [(folder / "checkpoint" / "model.safetensors").read_bytes() for folder in (one, other)]
    keys = ("optimizers", "random", "num_batches", "tokens", "step")
    return files[0] == files[1] and all(equal(states[0][key], states[1][key]) for key in keys)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def stop_at(patch: pytest.MonkeyPatch, num_steps: int, number: signal.Signals) -> None:
    """Send this process the signal during its step of that number."""
    original = Run.step

    def step(run: Run) -> Step:
        if run.progress.step + 1 == num_steps:
            os.kill(os.getpid(), number)
        return original(run)

    patch.setattr(Run, "step", step)
