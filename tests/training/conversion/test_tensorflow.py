"""Checkpoints that TensorFlow wrote, against what TensorFlow computed and `transformers` does.

TensorFlow wrote `tests/data/albert_tensorflow` (tests/data/README.md).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.conversion.forms import Damage, assert_refused, truncated
from tests.training.support import REPOSITORY
from training.conversion.source import open_checkpoint
from training.conversion.tensor_bundle import TensorBundle
from training.conversion.tensorflow import load_tensorflow_weights
from training.model.albert import ModelInputs
from training.model.checkpoint import CheckpointError, load_checkpoint

THEIRS = REPOSITORY / "tests" / "data" / "albert_tensorflow"
CONFIG = "albert_config.json"
INDEX = "model.ckpt-best.index"
DATA = "model.ckpt-best.data-00000-of-00001"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(THEIRS, tmp_path / "albert_base"))


@torch.no_grad()
def test_both_heads_compute_what_tensorflow_did() -> None:
    """Log probabilities that TensorFlow computed."""
    outputs = {
        name: torch.from_numpy(each) for name, each in np.load(THEIRS / "outputs.npz").items()
    }
    with open_checkpoint(THEIRS) as checkpoint:
        model = load_checkpoint(checkpoint.folder).eval()
    assert model.tasks == {"fill-mask": 600, "sentence-order": 2}
    hidden = model(ModelInputs(ids=outputs["ids"], types=outputs["types"]))
    tokens = model.logits("fill-mask", hidden).log_softmax(-1)[:, ::4]
    order = model.logits("sentence-order", hidden[:, 0]).log_softmax(-1)
    torch.testing.assert_close(tokens, outputs["tokens"], atol=1e-5, rtol=0)
    torch.testing.assert_close(order, outputs["order"], atol=1e-6, rtol=0)


def test_the_vocabulary_of_the_archive_becomes_the_tokenizer(
    folder: Path, vocab_dir: Path, tokenizer: AlbertTokenizer
) -> None:
    shutil.copyfile(vocab_dir / "spiece.model", folder / "30k-clean.model")
    with open_checkpoint(folder) as checkpoint:
        converted = AlbertTokenizer.from_file(checkpoint.folder / "tokenizer.json")
        assert (checkpoint.folder / "spiece.model").is_file()
    assert converted.encode("Its own weights.").ids == tokenizer.encode("Its own weights.").ids


def test_variables_that_no_albert_has_are_named(folder: Path) -> None:
    content = (folder / INDEX).read_bytes()
    (folder / INDEX).write_bytes(content.replace(b"embedding_hidden_mapping_in", b"x" * 27))
    with pytest.raises(CheckpointError, match=r"holds bert/encoder/x+/bias and 1 more, which no"):
        load_tensorflow_weights(folder)


BAD: dict[str, tuple[Damage, str]] = {
    "no index": (lambda folder: (folder / INDEX).unlink(), "must hold one TensorFlow checkp.*none"),
    "two": (
        lambda folder: shutil.copy(folder / INDEX, folder / "model.ckpt-2.index"),
        "it holds model.ckpt-2.index, model.ckpt-best.index",
    ),
    "half an index": (truncated(INDEX, 2000), "does not end like a table; is it complete"),
    "no data": (lambda folder: (folder / DATA).unlink(), "00000-of-00001 is missing"),
    "half the data": (truncated(DATA, 50000), "is truncated: .* is not in it"),
    "no configuration": (
        lambda folder: (folder / CONFIG).write_text("{"),
        "albert_config.json cannot be read",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=BAD)
def test_bad_checkpoints_are_refused(folder: Path, damage: Damage, message: str) -> None:
    damage(folder)
    assert_refused(folder, message)


@pytest.mark.parametrize("seed", range(20))
def test_no_damage_to_an_index_is_worse_than_an_error(folder: Path, seed: int) -> None:
    """Random bytes are changed; each tensor that can still be read lies in its file."""
    generator = np.random.default_rng(seed)
    content = bytearray((folder / INDEX).read_bytes())
    for place in generator.integers(0, len(content), 1 + seed % 5):
        content[place] = generator.integers(256)
    (folder / INDEX).write_bytes(content)
    try:
        bundle = TensorBundle(folder / INDEX)
    except CheckpointError:
        return
    for name in bundle.entries:
        try:
            assert bundle.read(name).nbytes <= (folder / DATA).stat().st_size
        except CheckpointError:
            continue
