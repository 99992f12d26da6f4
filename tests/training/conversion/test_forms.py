"""Checkpoints of every form come out as one, TensorFlow's too, and bad ones are refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from albert_serve.errors import BundleCorruptError
from albert_serve.settings import shipped_bundle
from albert_serve.tokenizer import AlbertTokenizer
from tests.albert_serve.support import ROOT
from tests.training.conversion.forms import (
    FORMS,
    Damage,
    as_pickle,
    as_pickles,
    assert_refused,
    take_weights,
    truncated,
)
from tests.training.support import (
    REPOSITORY,
    TINY,
    assert_close,
    hf_load,
    hf_logits,
    hf_model,
    our_logits,
    ragged,
)
from training.conversion.source import open_checkpoint
from training.conversion.tensor_bundle import TensorBundle
from training.conversion.tensorflow import load_tensorflow_weights
from training.conversion.weight_files import write_from_int8
from training.model.albert import ModelInputs
from training.model.checkpoint import CheckpointError, load_checkpoint, read_config, read_weights
from training.model.labels import read_labels


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with the pretraining heads, as `transformers` writes it."""
    folder = tmp_path / "theirs"
    hf_model(TINY, "AlbertForPreTraining").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@torch.no_grad()
def test_every_form_is_the_model_that_transformers_reads(
    folder: Path, form: Callable[[Path], object]
) -> None:
    form(folder)
    before = sorted(file.name for file in folder.iterdir())
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.folder != folder
        assert checkpoint.name == "theirs"
        ours = load_checkpoint(checkpoint.folder).eval()
        theirs = hf_load("AlbertForPreTraining", checkpoint.folder)
    assert not checkpoint.folder.exists()
    assert sorted(file.name for file in folder.iterdir()) == before
    expected = hf_logits(hf_model(TINY, "AlbertForPreTraining").double(), ragged())
    assert_close(our_logits(ours.double(), ragged()), expected)
    assert_close(hf_logits(theirs.double(), ragged()), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_floating_point_becomes_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = hf_model(TINY, "AlbertForMaskedLM").to(dtype)
    theirs.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        weights = load_file(checkpoint.folder / "model.safetensors")
        config = json.loads((checkpoint.folder / "config.json").read_text())
        assert hf_load("AlbertForMaskedLM", checkpoint.folder).dtype == torch.float32
    assert config["dtype"] == "float32"
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    for name, tensor in theirs.state_dict().items():
        if not name.startswith("predictions.decoder"):
            assert torch.equal(weights[name], tensor.float())


@torch.no_grad()
def test_the_bias_of_the_decoder_is_the_one_that_transformers_adds(folder: Path) -> None:
    weights = take_weights(folder)
    weights["predictions.decoder.bias"] = weights["predictions.bias"] + torch.arange(50)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    theirs = hf_load("AlbertForPreTraining", folder)
    with open_checkpoint(folder) as checkpoint:
        ours = load_checkpoint(checkpoint.folder).eval()
    assert_close(our_logits(ours.double(), ragged()), hf_logits(theirs.double(), ragged()))


class Harmful:
    """Runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_in_a_pickle_is_not_run(folder: Path, tmp_path: Path, is_zip: bool) -> None:
    file = folder / "pytorch_model.bin"
    (folder / "model.safetensors").unlink()
    weights = {"albert.pooler.bias": Harmful(tmp_path / "run")}
    torch.save(weights, file, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match=r"so that no code is run: GLOBAL posix\.mkdir"):
        open_checkpoint(folder).__enter__()
    assert not (tmp_path / "run").exists()
    torch.load(file, weights_only=False)  # it would have been
    assert (tmp_path / "run").exists()


def write_pickle(content: Any) -> Damage:
    def write(folder: Path) -> None:
        take_weights(folder)
        torch.save(content, folder / "pytorch_model.bin")

    return write


def truncated_pickle(num_bytes: int) -> Damage:
    def cut(folder: Path) -> None:
        as_pickle(folder)
        truncated("pytorch_model.bin", num_bytes)(folder)

    return cut


def change_index(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def write(folder: Path) -> None:
        as_pickles(folder)
        index = folder / "pytorch_model.bin.index.json"
        content = json.loads(index.read_text())
        index.write_text(json.dumps(change(content)))

    return write


def place_all(file: str) -> Damage:
    return change_index(lambda index: {"weight_map": dict.fromkeys(index["weight_map"], file)})


def write_header(num_bytes: int, header: bytes) -> Damage:
    def write(folder: Path) -> None:
        content = num_bytes.to_bytes(8, "little") + header
        (folder / "model.safetensors").write_bytes(content)

    return write


def write_text(name: str, text: str) -> Damage:
    def write(folder: Path) -> None:
        (folder / name).write_text(text)

    return write


def as_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


# Four bytes belong to no tensor.
GAP = json.dumps({"x": {"dtype": "F16", "shape": [2], "data_offsets": [4, 8]}}).encode()
BAD: dict[str, tuple[Damage, str]] = {
    "no weights": (lambda folder: take_weights(folder) and None, "has no weights: no model.safet"),
    "a login page": (write_text("model.safetensors", "\n<!DOCTYPE html>"), "s is a web page"),
    "a pointer": (
        write_text("spiece.model", "version https://git-lfs.github.com/spec/v1\noid sha256:0"),
        "spiece.model is a pointer of Git LFS",
    ),
    "not a number": (write_pickle({"x": torch.tensor([0.0, torch.nan])}), ".bin: x holds NaN"),
    "an adapter": (as_adapter, r"is an adapter \(LoRA, PEFT\).*merge_and_unload"),
    "half a pickle": (truncated_pickle(5000), "cannot be read as weights alone.*complete"),
    "a training state": (
        write_pickle({"state_dict": {"a": torch.zeros(2)}, "step": 3}),
        "weights by name; save only the state_dict",
    ),
    "whole numbers": (write_pickle({"x": torch.zeros(3, dtype=torch.int8)}), "not floating point"),
    "two of one": (
        write_pickle({"n.gamma": torch.zeros(3), "n.weight": torch.zeros(3)}),
        "two weights that are n.weight",
    ),
    "an untied decoder": (
        write_pickle(
            {
                "albert.embeddings.word_embeddings.weight": torch.zeros(3, 2),
                "predictions.decoder.weight": torch.ones(3, 2),
            }
        ),
        "is not the word embeddings; ALBERT ties the two",
    ),
    "a gap between weights": (
        write_header(len(GAP), GAP + bytes(8)),
        "is damaged: .*; download it again",
    ),
    "an index of another kind": (change_index(lambda index: [1]), "is not an index of weights"),
    "an index of a secret": (place_all("/etc/passwd"), r"names '/etc/passwd'; it must be a \.bin"),
    "a shard that is missing": (place_all("pytorch_model-00003.bin"), "is missing; pytorch_mod"),
    "a weight that is missing": (
        place_all("pytorch_model-00001-of-00002.bin"),
        "names .*, which none of its files has",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=BAD)
def test_bad_checkpoints_are_refused(folder: Path, damage: Damage, message: str) -> None:
    damage(folder)
    assert_refused(folder, message)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated("model.safetensors", 5000), "its header describes"),
        (write_header(2**40, b"{}"), f"its header has {2**40} bytes"),
    ],
)
def test_bad_safetensors_are_refused(folder: Path, damage: Damage, message: str) -> None:
    damage(folder)
    assert_refused(folder, message, BundleCorruptError)


PAIR = ("It rained all night.", "The match was put off.")


@pytest.mark.parametrize(
    ("settings", "version", "last_type"),
    [
        ({"tokenizer_class": "AlbertTokenizer"}, transformers.__version__, 0),
        ({"tokenizer_class": "AlbertTokenizer"}, "4.57.0", 1),
        ({"tokenizer_class": "BertTokenizer"}, "5.0.0", 1),
        ({"model_input_names": ["input_ids", "attention_mask"]}, "4.57.0", 0),
        ({"model_input_names": ["input_ids", "token_type_ids"]}, "5.0.0", 1),
    ],
)
def test_pairs_have_the_types_of_the_folders_settings(
    vocab_dir: Path, tmp_path: Path, settings: dict[str, Any], version: str, last_type: int
) -> None:
    folder = tmp_path / "checkpoint"
    hf_model(TINY, "AlbertForSequenceClassification").save_pretrained(folder)
    shutil.copyfile(vocab_dir / "tokenizer.json", folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": version}))

    with open_checkpoint(folder) as opened:
        encoding = AlbertTokenizer.from_file(opened.folder / "tokenizer.json").encode(*PAIR)
    expected = AlbertTokenizer.from_file(folder / "tokenizer.json").encode(*PAIR)

    assert encoding.types[-1] == last_type
    assert encoding.types == [last_type * each for each in expected.types]
    assert encoding.ids == expected.ids


PACKAGED = ROOT / "albert_serve/models/albert-small-en"


def test_the_checkpoint_of_the_wheel_is_the_model_that_ships_but_for_rounding(
    tmp_path: Path,
) -> None:
    write_from_int8(PACKAGED, tmp_path / "checkpoint")
    with open_checkpoint(None) as shipped, open_checkpoint(tmp_path / "checkpoint") as packaged:
        assert shipped.folder == shipped_bundle()
        exact, rounded = read_weights(shipped.folder), read_weights(packaged.folder)
        assert exact.keys() == rounded.keys()
        for name, weight in exact.items():
            step = float(weight.abs().max()) / 127
            # Two adjacent weights share the steps, which doubles them at most. Smoothed matrices
            # have larger steps where an input is an outlier.
            worst = 5 if any(part in name for part in ("ffn", "pooler")) else 1.01
            torch.testing.assert_close(rounded[name], weight, rtol=0, atol=worst * step)
        configs = [read_config(each.folder) for each in (shipped, packaged)]
        labels = [read_labels(config, 2, "text-classification") for config in configs]
    assert labels[0] == labels[1]


THEIRS = REPOSITORY / "tests" / "data" / "albert_tensorflow"
CONFIG = "albert_config.json"
INDEX = "model.ckpt-best.index"
DATA = "model.ckpt-best.data-00000-of-00001"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return Path(shutil.copytree(THEIRS, tmp_path / "albert_base"))


@torch.no_grad()
def test_both_heads_compute_what_tensorflow_did() -> None:
    """TensorFlow wrote `tests/data/albert_tensorflow` (tests/data/README.md)."""
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
    archive: Path, vocab_dir: Path, tokenizer: AlbertTokenizer
) -> None:
    shutil.copyfile(vocab_dir / "spiece.model", archive / "30k-clean.model")
    with open_checkpoint(archive) as checkpoint:
        converted = AlbertTokenizer.from_file(checkpoint.folder / "tokenizer.json")
        assert (checkpoint.folder / "spiece.model").is_file()
    assert converted.encode("Its own weights.").ids == tokenizer.encode("Its own weights.").ids


def test_variables_that_no_albert_has_are_named(archive: Path) -> None:
    content = (archive / INDEX).read_bytes()
    (archive / INDEX).write_bytes(content.replace(b"embedding_hidden_mapping_in", b"x" * 27))
    with pytest.raises(CheckpointError, match=r"holds bert/encoder/x+/bias and 1 more, which no"):
        load_tensorflow_weights(archive)


BAD_ARCHIVES: dict[str, tuple[Damage, str]] = {
    "no index": (lambda files: (files / INDEX).unlink(), "must hold one TensorFlow checkp.*none"),
    "two": (
        lambda files: shutil.copy(files / INDEX, files / "model.ckpt-2.index"),
        "it holds model.ckpt-2.index, model.ckpt-best.index",
    ),
    "half an index": (truncated(INDEX, 2000), "does not end like a table; is it complete"),
    "no data": (lambda files: (files / DATA).unlink(), "00000-of-00001 is missing"),
    "half the data": (truncated(DATA, 50000), "is truncated: .* is not in it"),
    "no configuration": (write_text(CONFIG, "{"), "albert_config.json cannot be read"),
}


@pytest.mark.parametrize(("damage", "message"), BAD_ARCHIVES.values(), ids=BAD_ARCHIVES)
def test_bad_archives_are_refused(archive: Path, damage: Damage, message: str) -> None:
    damage(archive)
    assert_refused(archive, message)


@pytest.mark.parametrize("seed", range(20))
def test_no_damage_to_an_index_is_worse_than_an_error(archive: Path, seed: int) -> None:
    """Random bytes are changed; each tensor that can still be read lies in its file."""
    generator = np.random.default_rng(seed)
    content = bytearray((archive / INDEX).read_bytes())
    for place in generator.integers(0, len(content), 1 + seed % 5):
        content[place] = generator.integers(256)
    (archive / INDEX).write_bytes(content)
    try:
        bundle = TensorBundle(archive / INDEX)
    except CheckpointError:
        return
    for name in bundle.entries:
        try:
            assert bundle.read(name).nbytes <= (archive / DATA).stat().st_size
        except CheckpointError:
            continue
