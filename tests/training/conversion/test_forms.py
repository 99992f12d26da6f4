"""Checkpoints of every form come out as one, for every command; bad ones are refused."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from albert_serve.bundle.sentence_vectors import (
    SentenceVectors,
    read_sentence_vectors,
    write_sentence_vectors,
)
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
    written,
)
from tests.training.support import (
    REPOSITORY,
    TINY,
    assert_close,
    hf_load,
    hf_logits,
    hf_model,
    our_logits,
    our_model,
    ragged,
)
from training.commands import convert, finetune, pretrain
from training.conversion.source import open_checkpoint
from training.conversion.tensor_bundle import TensorBundle
from training.conversion.tensorflow import load_tensorflow_weights
from training.conversion.weight_files import write_from_int8
from training.loop.step import Run
from training.loop.trainer import Saver
from training.model.albert import ModelInputs
from training.model.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_config,
    read_weights,
    save_checkpoint,
)
from training.model.labels import read_labels
from training.model.provenance import read_stages


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
    with pytest.raises(CheckpointError, match=r"without running code: GLOBAL posix\.mkdir"):
        open_checkpoint(folder).__enter__()
    assert not (tmp_path / "run").exists()
    torch.load(file, weights_only=False)  # it would have been
    assert (tmp_path / "run").exists()


def write_pickle(content: Any) -> Damage:
    def write(folder: Path) -> None:
        take_weights(folder)
        torch.save(content, folder / "pytorch_model.bin")

    return write


def half_a_pickle(folder: Path) -> None:
    as_pickle(folder)
    os.truncate(folder / "pytorch_model.bin", 5000)


def change_index(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def write(folder: Path) -> None:
        as_pickles(folder)
        index = folder / "pytorch_model.bin.index.json"
        content = json.loads(index.read_text())
        index.write_text(json.dumps(change(content)))

    return write


def place_all(file: str) -> Damage:
    return change_index(lambda index: {"weight_map": dict.fromkeys(index["weight_map"], file)})


def as_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


WEIGHTS = "model.safetensors"
# Four bytes belong to no tensor.
GAP = json.dumps({"x": {"dtype": "F16", "shape": [2], "data_offsets": [4, 8]}}).encode()
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0"
TWICE = {"n.gamma": torch.zeros(3), "n.weight": torch.zeros(3)}
UNTIED = {
    "albert.embeddings.word_embeddings.weight": torch.zeros(3, 2),
    "predictions.decoder.weight": torch.ones(3, 2),
}
BAD: dict[str, tuple[Damage, str]] = {
    "no weights": (take_weights, "does not contain weights: no model.safet"),
    "a login page": (written(WEIGHTS, "\n<!DOCTYPE html>"), "s is a web page"),
    "a pointer": (written("spiece.model", POINTER), "spiece.model is a pointer of Git LFS"),
    "infinite": (write_pickle({"x": torch.tensor([0.0, torch.inf])}), ".bin: x contains NaN"),
    "an adapter": (as_adapter, r"is an adapter \(LoRA, PEFT\).*merge_and_unload"),
    "half a pickle": (half_a_pickle, "cannot be read without running code: .*complete"),
    "a training state": (write_pickle({"a": {"b": torch.zeros(2)}}), "Save only the state_dict"),
    "a list": (write_pickle([torch.zeros(2)]), "Save only the state_dict"),
    "whole numbers": (write_pickle({"x": torch.zeros(3).int()}), "not floating point"),
    "two of one": (write_pickle(TWICE), "two weights for n.weight"),
    "an untied decoder": (write_pickle(UNTIED), "differs from the word embeddings"),
    "a gap": (written(WEIGHTS, len(GAP).to_bytes(8, "little") + GAP + bytes(8)), "is damaged: .*"),
    "half of the weights": (truncated(WEIGHTS, 5000), "its header describes"),
    "a long header": (written(WEIGHTS, (2**40).to_bytes(8, "little")), f"has {2**40} bytes"),
    "a long index": (change_index(lambda _: " " * (16 << 20)), "is not an index of weights"),
    "another index": (change_index(lambda _: [1]), "is not an index of weights"),
    "an index of a secret": (
        place_all("/etc/passwd"),
        r"'/etc/passwd', which is not .* \.bin",
    ),
    "no shard": (place_all("pytorch_model-00003.bin"), "pytorch_model-00003.bin does not exist"),
    "no weight": (place_all("pytorch_model-00001-of-00002.bin"), "none of its files contains it"),
}


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=BAD)
def test_bad_checkpoints_are_refused(folder: Path, damage: Damage, message: str) -> None:
    damage(folder)
    assert_refused(folder, message)


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
    with pytest.raises(CheckpointError, match=r"bert/encoder/x+/bias and 1 more, which are"):
        load_tensorflow_weights(archive)


BAD_ARCHIVES: dict[str, tuple[Damage, str]] = {
    "no index": (lambda files: (files / INDEX).unlink(), "has the indices none, not exactly one"),
    "two": (
        lambda files: shutil.copy(files / INDEX, files / "model.ckpt-2.index"),
        "indices model.ckpt-2.index, model.ckpt-best.index",
    ),
    "half an index": (truncated(INDEX, 2000), "the table's footer is missing"),
    "no data": (lambda files: (files / DATA).unlink(), "00000-of-00001 does not exist"),
    "half the data": (truncated(DATA, 50000), "00001 ends before "),
    "no configuration": (written(CONFIG, "{"), "albert_config.json cannot be read"),
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


VECTORS = SentenceVectors(pooling="cls", normalize=True, max_length=20)


@pytest.fixture(scope="module")
def old(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of sentences as old ones are on the hub: a pickle, and `spiece.model` alone."""
    folder = tmp_path_factory.mktemp("hub") / "albert-old"
    shutil.copytree(pretrained / "checkpoint", folder)
    write_sentence_vectors(VECTORS, folder, hidden_size=32)
    as_pickle(folder)
    (folder / "tokenizer.json").unlink()
    return folder


@pytest.mark.process
def test_runs_begin_with_an_old_checkpoint_and_outlive_its_converted_folder(
    old: Path,
    labelled: Path,
    easy_corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As where something cleans the folder of temporary files during a long run."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    num_removed = 0

    def save(saver: Saver, run: Run) -> None:
        nonlocal num_removed
        for folder in (tmp_path / "temporary").glob("albert-*"):
            shutil.rmtree(folder)
            num_removed += 1
        save_run(saver, run)

    save_run = Saver.save
    monkeypatch.setattr(Saver, "save", save)
    given = ["--initialize-from", str(old), "--length", "32", "--device", "cpu", "--steps", "1"]
    texts = ["--text-classification", str(labelled), "--labels", "bad", "good"]
    corpus = ["--corpus", str(easy_corpus), "--batch-size", "4", "--no-compile"]
    assert pretrain.main([*given[2:], *corpus, "--output", str(tmp_path / "new")]) == 1
    assert "New weights need a --tokenizer" in capsys.readouterr().err
    for main, data in ((finetune.main, texts), (pretrain.main, corpus)):
        output = tmp_path / main.__module__
        for _ in range(2):  # the same command goes on, although the converted folder is another
            assert main([*given, *data, "--output", str(output)]) == 0
        checkpoint = output / "checkpoint"
        assert (checkpoint / "spiece.model").read_bytes() == (old / "spiece.model").read_bytes()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (checkpoint / name).is_file()
        assert convert.main([str(checkpoint), str(output / "converted")]) == 0
        for folder in (checkpoint, output / "converted"):
            assert read_sentence_vectors(folder) == VECTORS
            first, second = read_stages(folder)
            assert first["program"] == "albert-serve pretrain"
            assert "albert-old" in json.dumps(second)
    assert num_removed == 4


@torch.no_grad()
def test_conversion_repeats_what_transformers_cannot_share(tmp_path: Path, vocab_dir: Path) -> None:
    tasks = ("fill-mask", "sentence-order", "text-classification")
    ours = our_model(replace(TINY, sharing="attention"), tasks)
    names = {"id2label": {"0": "bad", "1": "fair", "2": "good"}}
    save_checkpoint(ours, tmp_path / "ours", tokenizer_from=vocab_dir, extra_config=names)
    assert convert.main([str(tmp_path / "ours"), str(tmp_path / "new" / "theirs")]) == 0
    theirs = hf_load("AlbertForSequenceClassification", tmp_path / "new" / "theirs").double()
    assert theirs.config.num_hidden_groups == 4
    assert theirs.config.id2label == {0: "bad", 1: "fair", 2: "good"}
    expected = hf_logits(theirs, ragged())
    logits = our_logits(ours.double(), ragged())
    assert_close({task: logits[task] for task in expected}, expected)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "new" / "theirs" / name).is_file()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["theirs"]


def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(our_model(TINY, ("fill-mask",)), tmp_path / "ours")
    assert convert.main([str(tmp_path / "ours"), str(tmp_path / "ours")]) == 1
    assert "ours already exists. Choose a new folder." in capsys.readouterr().err
    file = tmp_path / "ours" / "spiece.model"
    file.write_bytes(b"no vocabulary")
    assert convert.main([str(tmp_path / "ours"), str(tmp_path / "new")]) == 1
    assert f"{file} cannot be read as a SentencePiece model" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
