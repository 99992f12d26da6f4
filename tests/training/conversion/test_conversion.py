"""Checkpoints in every format, local or on the Hub, load as one format; bad files are rejected."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from albert_serve.bundle.sentence_vectors import (
    SentenceVectors,
    read_sentence_vectors,
    write_sentence_vectors,
)
from albert_serve.bundle.weights import WORDS
from albert_serve.settings import shipped_bundle
from albert_serve.tokenizer import AlbertTokenizer
from tests.training.conversion.formats import (
    FORMATS,
    Change,
    as_pickle,
    as_pickle_shards,
    assert_rejected,
    take_weights,
)
from tests.training.conversion.hub_server import Repository, serve
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
from training.commands import convert, finetune
from training.conversion.source import open_checkpoint
from training.conversion.tensor_bundle import TensorBundle
from training.conversion.weight_files import write_from_int8
from training.model.albert import ModelInputs
from training.model.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_config,
    read_weights,
    save_checkpoint,
)
from training.model.provenance import read_stages


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with the pretraining heads, written by `transformers`."""
    folder = tmp_path / "pretrained"
    hf_model(TINY, "AlbertForPreTraining").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("convert_to", FORMATS.values(), ids=FORMATS)
@torch.no_grad()
def test_every_format_loads_as_the_model_of_transformers(folder: Path, convert_to: Change) -> None:
    convert_to(folder)
    names = sorted(file.name for file in folder.iterdir())
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.folder != folder
        assert checkpoint.name == "pretrained"
        with open_checkpoint(checkpoint.folder) as standard:
            assert standard.folder == checkpoint.folder
        our_copy = load_checkpoint(checkpoint.folder).eval()
        hf_copy = hf_load("AlbertForPreTraining", checkpoint.folder)
    assert not checkpoint.folder.exists()
    assert sorted(file.name for file in folder.iterdir()) == names
    expected = hf_logits(hf_model(TINY, "AlbertForPreTraining").double(), ragged())
    assert_close(our_logits(our_copy.double(), ragged()), expected)
    assert_close(hf_logits(hf_copy.double(), ragged()), expected)


def test_bf16_becomes_fp32(tmp_path: Path) -> None:
    model = hf_model(TINY, "AlbertForMaskedLM").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        weights = load_file(checkpoint.folder / "model.safetensors")
        assert hf_load("AlbertForMaskedLM", checkpoint.folder).dtype == torch.float32
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    for name, tensor in model.state_dict().items():
        if not name.startswith("predictions.decoder"):
            assert torch.equal(weights[name], tensor.float())


class HarmfulObject:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_code_in_a_pickle_is_not_run(folder: Path, tmp_path: Path) -> None:
    file = folder / "pytorch_model.bin"
    (folder / "model.safetensors").unlink()
    torch.save({"albert.pooler.bias": HarmfulObject(tmp_path / "run")}, file)
    with pytest.raises(CheckpointError, match=r"without running code: GLOBAL posix\.mkdir"):
        open_checkpoint(folder).__enter__()
    assert not (tmp_path / "run").exists()
    torch.load(file, weights_only=False)  # runs the code
    assert (tmp_path / "run").exists()
    os.truncate(file, 100)
    with pytest.raises(
        CheckpointError, match=r"failed finding central directory\. Check that it is"
    ):
        open_checkpoint(folder).__enter__()


def write_pickle(content: Any, folder: Path) -> None:
    take_weights(folder)
    torch.save(content, folder / "pytorch_model.bin")


def write_index(file: str, folder: Path) -> None:
    """Write an index that names one file for all weights."""
    as_pickle_shards(folder)
    index = folder / "pytorch_model.bin.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, file)}))


def write_file(name: str, text: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_text(text)


def as_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


UNTIED = {WORDS: torch.zeros(3, 2), "predictions.decoder.weight": torch.ones(3, 2)}
INFINITE = {"x": torch.tensor([0.0, torch.inf])}
INTEGERS = {"x": torch.zeros(2, dtype=torch.int64)}
STATE = {"a": {"b": torch.zeros(2)}}
LFS, PAGE = "version https://git-lfs.github.com/spec/v1\n", "\n<!DOCTYPE html>"
FIRST_SHARD, INDEX_FILE = "pytorch_model-00001-of-00002.bin", "model.safetensors.index.json"
FAULTS: dict[str, tuple[Change, str]] = {
    "no weights": (take_weights, "does not contain weights: no model.safet"),
    "infinite weight": (partial(write_pickle, INFINITE), ".bin: x contains NaN"),
    "adapter": (as_adapter, r"is an adapter \(LoRA, PEFT\).*merge_and_unload"),
    "training state": (partial(write_pickle, STATE), "Save only the state_dict"),
    "integer weight": (partial(write_pickle, INTEGERS), ".bin: x is torch.int64, not floating"),
    "untied decoder": (partial(write_pickle, UNTIED), "differs from the word embeddings"),
    "truncated weights": (
        lambda f: os.truncate(f / "model.safetensors", 5000),
        "its header describes",
    ),
    "index of another folder": (partial(write_index, "/etc/passwd"), "'/etc/passwd', which is not"),
    "missing weight": (partial(write_index, FIRST_SHARD), "but none of its files contains it"),
    "missing shard": (partial(write_index, "pytorch_model-3.bin"), "model-3.bin does not exist"),
    "damaged index": (partial(write_file, INDEX_FILE, "[]"), "is not an index of weights"),
    "config of another kind": (partial(write_file, "config.json", "[]"), "is not a JSON object"),
    "Git LFS": (partial(write_file, "tokenizer.json", LFS), "not the file. Run git lfs pull"),
    "login page": (partial(write_file, "tokenizer.json", PAGE), "is a web page, such as the Hub's"),
}


@pytest.mark.parametrize(("damage", "message"), FAULTS.values(), ids=FAULTS)
def test_bad_checkpoints_are_rejected(folder: Path, damage: Change, message: str) -> None:
    damage(folder)
    assert_rejected(folder, message)


PAIR = ("It rained all night.", "The match was put off.")


@pytest.mark.parametrize(
    ("settings", "version", "last_type"),
    [
        ({"tokenizer_class": "AlbertTokenizer"}, transformers.__version__, 0),
        ({"tokenizer_class": "AlbertTokenizer"}, "4.57.0", 1),
        ({"model_input_names": ["input_ids", "token_type_ids"]}, "5.0.0", 1),
    ],
)
def test_the_types_of_pairs_follow_the_settings_of_the_folder(
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
    assert encoding.types == [last_type * token_type for token_type in expected.types]
    assert encoding.ids == expected.ids


def test_the_checkpoint_of_the_wheel_is_the_rounded_default_model(tmp_path: Path) -> None:
    write_from_int8(REPOSITORY / "albert_serve/models/albert-small-en", tmp_path / "checkpoint")
    with open_checkpoint(None) as default, open_checkpoint(tmp_path / "checkpoint") as packaged:
        assert default.folder == shipped_bundle()
        labels, expected = (read_config(c.folder)["id2label"] for c in (packaged, default))
        assert labels == expected
        exact, rounded = read_weights(default.folder), read_weights(packaged.folder)
        assert exact.keys() == rounded.keys()
        for name, weight in exact.items():
            step = float(weight.abs().max()) / 127
            # Two adjacent weights share a step, which at most doubles it. Smoothed matrices have
            # larger steps if an input is an outlier.
            max_steps = 5 if any(part in name for part in ("ffn", "pooler")) else 1.01
            torch.testing.assert_close(rounded[name], weight, rtol=0, atol=max_steps * step)


TENSORFLOW = REPOSITORY / "tests" / "data" / "albert_tensorflow"
INDEX = "model.ckpt-best.index"
DATA = "model.ckpt-best.data-00000-of-00001"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TENSORFLOW, tmp_path / "albert_base"))


@torch.no_grad()
def test_both_heads_compute_the_outputs_of_tensorflow() -> None:
    """TensorFlow wrote `tests/data/albert_tensorflow` (tests/data/README.md)."""
    arrays = np.load(TENSORFLOW / "outputs.npz")
    outputs = {name: torch.from_numpy(arrays[name]) for name in arrays}
    with open_checkpoint(TENSORFLOW) as checkpoint:
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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (INDEX, None, "the table's footer is missing"),
        (DATA, None, "00001 ends before "),
        ("albert_config.json", "{", "albert_config.json cannot be read"),
        ("albert_config.json", "[]", "albert_config.json is not a JSON object"),
        ("albert_config.json", '{"vocab_size": 0}', "albert_config.json: vocab_size"),
        ("second.index", "", "has the indices .*, not exactly one"),
    ],
)
def test_archives_with_a_truncated_damaged_or_second_file_are_rejected(
    name: str, content: str | None, message: str, archive: Path
) -> None:
    """Files without new content are truncated."""
    if content is None:
        os.truncate(archive / name, 2000)
    else:
        (archive / name).write_text(content)
    assert_rejected(archive, message)


def test_the_position_of_an_index_s_statistics_does_not_matter(archive: Path) -> None:
    content = bytearray((archive / INDEX).read_bytes())
    content[-48] = 0x80  # the lowest seven bits of the position
    (archive / INDEX).write_bytes(content)
    assert TensorBundle(archive / INDEX).entries == TensorBundle(TENSORFLOW / INDEX).entries


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_index_is_rejected_or_read_within_its_file(archive: Path, seed: int) -> None:
    """Random bytes of the index change."""
    generator = np.random.default_rng(seed)
    content = bytearray((archive / INDEX).read_bytes())
    for position in generator.integers(0, len(content), 1 + seed % 5):
        content[position] = generator.integers(256)
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


@pytest.mark.process
def test_a_run_starts_from_an_old_checkpoint_and_keeps_its_files(
    pretrained_run: Path, labelled_texts: Path, tmp_path: Path
) -> None:
    """The checkpoint is a sentence model in the old format: a pickle, and only `spiece.model`."""
    old_checkpoint = Path(shutil.copytree(pretrained_run / "checkpoint", tmp_path / "albert-old"))
    vectors = SentenceVectors(pooling="cls", normalize=True, max_length=20)
    write_sentence_vectors(vectors, old_checkpoint, hidden_size=32)
    as_pickle(old_checkpoint)
    (old_checkpoint / "tokenizer.json").unlink()
    options = ["--initialize-from", str(old_checkpoint)]
    options += ["--length", "32", "--device", "cpu", "--steps", "1"]
    options += ["--text-classification", str(labelled_texts), "--labels", "bad", "good"]
    for _ in range(2):  # the same command resumes, although the converted folder is new
        assert finetune.main([*options, "--output", str(tmp_path / "run")]) == 0
    checkpoint = tmp_path / "run/checkpoint"
    vocabulary = (old_checkpoint / "spiece.model").read_bytes()
    assert (checkpoint / "spiece.model").read_bytes() == vocabulary
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (checkpoint / name).is_file()
    assert convert.main([str(checkpoint), str(tmp_path / "converted")]) == 0
    for folder in (checkpoint, tmp_path / "converted"):
        assert read_sentence_vectors(folder) == vectors
        first, second = read_stages(folder)
        assert first["program"] == "albert-serve pretrain"
        assert "albert-old" in json.dumps(second)


@torch.no_grad()
def test_conversion_copies_weights_that_transformers_cannot_share(
    tmp_path: Path, vocab_dir: Path
) -> None:
    tasks = ("fill-mask", "sentence-order", "text-classification")
    model = our_model(replace(TINY, sharing="attention"), tasks)
    names = {"id2label": {"0": "bad", "1": "fair", "2": "good"}}
    save_checkpoint(model, tmp_path / "ours", tokenizer_from=vocab_dir, extra_config=names)
    folder = tmp_path / "new" / "converted"
    assert convert.main([str(tmp_path / "ours"), str(folder)]) == 0
    hf = hf_load("AlbertForSequenceClassification", folder).double()
    assert hf.config.num_hidden_groups == 4
    assert hf.config.id2label == {0: "bad", 1: "fair", 2: "good"}
    expected = hf_logits(hf, ragged())
    logits = our_logits(model.double(), ragged())
    assert_close({task: logits[task] for task in expected}, expected)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).is_file()
    assert list(folder.parent.iterdir()) == [folder]


# Opens each reference, and prints its result as a line of JSON.
OPEN_SCRIPT = """
import json, sys
from training.conversion.source import open_checkpoint
from albert_serve.errors import HubError
from training.model.checkpoint import CheckpointError, load_checkpoint
for reference in sys.argv[1:]:
    try:
        with open_checkpoint(reference) as checkpoint:
            model = load_checkpoint(checkpoint.folder)
            result = {"name": checkpoint.name, "bias": model.pooler.dense.bias[0].item()}
    except (CheckpointError, HubError) as error:
        result = {"error": str(error)}
    print(json.dumps(result))
"""


@pytest.mark.process
def test_hub_models_open_in_each_format_and_revision(tmp_path: Path) -> None:
    """Each file is downloaded once. If a model has both formats, the pickle is not downloaded."""
    for seed, name in enumerate(("both", "older", "pickles", "bert")):
        hf_model(TINY, "AlbertForPreTraining", seed).save_pretrained(tmp_path / name)
    (tmp_path / "bert/config.json").write_text('{"model_type": "bert"}')
    weights = {name: load_file(tmp_path / name / "model.safetensors") for name in ("both", "older")}
    torch.save(weights["both"], tmp_path / "both/pytorch_model.bin")
    weights["pickles"] = load_file(tmp_path / "pickles/model.safetensors")
    as_pickle_shards(tmp_path / "pickles")
    names = ("both", "pickles", "bert")
    repositories = {f"albert/{name}": Repository({"main": tmp_path / name}) for name in names}
    both = repositories["albert/both"]
    both.revisions["v1"] = tmp_path / "older"
    main, tag = both.commit("main"), both.commit("v1")
    opened = {
        "albert/both": (f"albert/both@{main}", "both"),
        "albert/both@v1": (f"albert/both@{tag}", "older"),
        "albert/pickles": (f"albert/pickles@{main}", "pickles"),
    }
    errors = {
        "./albert/both": "./albert/both is a local path, but there is no such folder. ",
        "albert/bert": "config.json of albert/bert: model_type is 'bert'; only 'albert'",
    }

    with serve(repositories) as hub:
        process = subprocess.run(
            [sys.executable, "-c", OPEN_SCRIPT, *opened, *errors],
            cwd=tmp_path,
            env=hub.environment(tmp_path / "cache"),
            capture_output=True,
            text=True,
            check=True,
        )

    results = [json.loads(line) for line in process.stdout.splitlines()]
    for result, (name, model) in zip(results[: len(opened)], opened.values(), strict=True):
        bias = weights[model]["albert.pooler.bias"][0].item()
        assert result == {"name": name, "bias": bias}
    for result, message in zip(results[len(opened) :], errors.values(), strict=True):
        assert message in result["error"]
        assert "\n" not in result["error"]
    assert len(hub.downloads) == len(set(hub.downloads))
    assert not any(path.endswith("/pytorch_model.bin") for path in hub.downloads)
