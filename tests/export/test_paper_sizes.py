"""The paper's larger models, from random weights over export to an answer by HTTP."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest
import torch

from albert_serve.config import preset
from albert_serve.settings import shipped_bundle
from albert_serve.tokenizer import AlbertTokenizer
from tests.albert_serve.support import served
from tests.export.exporting import export_bundle
from training.model.albert import ModelInputs
from training.model.checkpoint import save_checkpoint
from training.model.heads import AlbertForTasks, head_sizes

TASK = "text-classification"
TEXT = "The river rises in the mountains and flows through three countries to the sea."
LABELS = {"0": "negative", "1": "positive"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["large", "xlarge", "xxlarge"])
def test_a_size_of_the_paper_is_exported_and_served(name: str, tmp_path: Path) -> None:
    """With its weights in one file, and the answer of torch."""
    checkpoint, bundle = tmp_path / "checkpoint", tmp_path / "bundle"
    expected = make_model(name, checkpoint)
    export_bundle(checkpoint, bundle)
    weights = bundle / "model.safetensors"
    files = [file for file in bundle.iterdir() if file.is_file()]
    assert os.path.samefile(weights, checkpoint / "model.safetensors")
    assert sum(file.stat().st_size for file in files if file != weights) < 3e6
    with served(bundle, tmp_path) as service:
        reply = httpx.post(f"{service.url}/{TASK}", json={"inputs": TEXT}, timeout=300)
    assert reply.status_code == 200, reply.text
    scores = {each["label"]: each["score"] for each in reply.json()[0]}
    assert scores == pytest.approx(expected, abs=1e-4)


def make_model(name: str, folder: Path) -> dict[str, float]:
    """Write a checkpoint with random weights; return torch's probabilities for the text."""
    torch.manual_seed(0)
    # With a standard deviation of 0.02 the answer would hardly depend on the text.
    config = preset(name, initializer_range=preset(name).hidden_size ** -0.5)
    model = AlbertForTasks(config, head_sizes(config, (TASK,))).eval()
    save_checkpoint(
        model, folder, tokenizer_from=shipped_bundle(), extra_config={"id2label": LABELS}
    )
    tokenizer = AlbertTokenizer.from_file(folder / "tokenizer.json")
    ids = torch.tensor([tokenizer.encode(TEXT).ids])
    with torch.inference_mode():
        hidden_BSH = model.albert(ModelInputs(ids=ids, types=torch.zeros_like(ids)))
        probabilities = model.logits(TASK, hidden_BSH[:, 0]).softmax(-1)[0].tolist()
    return dict(zip(LABELS.values(), probabilities, strict=True))
