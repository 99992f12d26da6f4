"""Checkpoints of every form, local or on the Hub, come out as one; bad ones are refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
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
from albert_serve.settings import shipped_bundle
from albert_serve.tokenizer import AlbertTokenizer
from tests.training.conversion.forms import (
    FORMS,
    Damage,
    as_pickle,
    as_pickles,
    assert_refused,
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
    read_weights,
    save_checkpoint,
)
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


def test_bf16_becomes_fp32(tmp_path: Path) -> None:
    theirs = hf_model(TINY, "AlbertForMaskedLM").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        weights = load_file(checkpoint.folder / "model.safetensors")
        assert hf_load("AlbertForMaskedLM", checkpoint.folder).dtype == torch.float32
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    for name, tensor in theirs.state_dict().items():
        if not name.startswith("predictions.decoder"):
            assert torch.equal(weights[name], tensor.float())


class Harmful:
    """Runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def test_code_in_a_pickle_is_not_run(folder: Path, tmp_path: Path) -> None:
    file = folder / "pytorch_model.bin"
    (folder / "model.safetensors").unlink()
    torch.save({"albert.pooler.bias": Harmful(tmp_path / "run")}, file)
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


def place_all(file: str) -> Damage:
    """The index names one file for all weights."""

    def write(folder: Path) -> None:
        as_pickles(folder)
        index = folder / "pytorch_model.bin.index.json"
        weights = json.loads(index.read_text())["weight_map"]
        index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, file)}))

    return write


def as_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


UNTIED = {
    "albert.embeddings.word_embeddings.weight": torch.zeros(3, 2),
    "predictions.decoder.weight": torch.ones(3, 2),
}
BAD: dict[str, tuple[Damage, str]] = {
    "no weights": (take_weights, "does not contain weights: no model.safet"),
    "infinite": (write_pickle({"x": torch.tensor([0.0, torch.inf])}), ".bin: x contains NaN"),
    "an adapter": (as_adapter, r"is an adapter \(LoRA, PEFT\).*merge_and_unload"),
    "a training state": (write_pickle({"a": {"b": torch.zeros(2)}}), "Save only the state_dict"),
    "an untied decoder": (write_pickle(UNTIED), "differs from the word embeddings"),
    "half of the weights": (
        lambda folder: os.truncate(folder / "model.safetensors", 5000),
        "its header describes",
    ),
    "an index of a secret": (
        place_all("/etc/passwd"),
        r"'/etc/passwd', which is not .* \.bin",
    ),
    "no shard": (place_all("pytorch_model-00003.bin"), "pytorch_model-00003.bin does not exist"),
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


def test_the_checkpoint_of_the_wheel_is_the_model_that_ships_but_for_rounding(
    tmp_path: Path,
) -> None:
    write_from_int8(REPOSITORY / "albert_serve/models/albert-small-en", tmp_path / "checkpoint")
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


THEIRS = REPOSITORY / "tests" / "data" / "albert_tensorflow"
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


@pytest.mark.parametrize(
    ("name", "message"),
    [(INDEX, "the table's footer is missing"), (DATA, "00001 ends before ")],
)
def test_truncated_archives_are_refused(archive: Path, name: str, message: str) -> None:
    os.truncate(archive / name, 2000)
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
def test_a_run_begins_with_an_old_checkpoint_and_keeps_its_files(
    old: Path, labelled: Path, tmp_path: Path
) -> None:
    words = ["--initialize-from", str(old), "--length", "32", "--device", "cpu", "--steps", "1"]
    words += ["--text-classification", str(labelled), "--labels", "bad", "good"]
    for _ in range(2):  # the same command goes on, although the converted folder is another
        assert finetune.main([*words, "--output", str(tmp_path / "run")]) == 0
    checkpoint = tmp_path / "run/checkpoint"
    assert (checkpoint / "spiece.model").read_bytes() == (old / "spiece.model").read_bytes()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (checkpoint / name).is_file()
    assert convert.main([str(checkpoint), str(tmp_path / "converted")]) == 0
    for folder in (checkpoint, tmp_path / "converted"):
        assert read_sentence_vectors(folder) == VECTORS
        first, second = read_stages(folder)
        assert first["program"] == "albert-serve pretrain"
        assert "albert-old" in json.dumps(second)


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


# Opens each reference, and prints what came of it as a line of JSON.
OPEN = """
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
def test_models_of_the_hub_are_opened_in_each_form_and_revision(tmp_path: Path) -> None:
    """Each file is loaded once, and of a model with both forms of weights only one."""
    for seed, name in enumerate(("both", "older", "pickles", "bert")):
        hf_model(TINY, "AlbertForPreTraining", seed).save_pretrained(tmp_path / name)
    (tmp_path / "bert/config.json").write_text('{"model_type": "bert"}')
    weights = {name: load_file(tmp_path / name / "model.safetensors") for name in ("both", "older")}
    torch.save(weights["both"], tmp_path / "both/pytorch_model.bin")
    weights["pickles"] = load_file(tmp_path / "pickles/model.safetensors")
    as_pickles(tmp_path / "pickles")
    both = Repository({"main": tmp_path / "both", "v1": tmp_path / "older"})
    repositories = {"albert/both": both}
    for name in ("pickles", "bert"):
        repositories[f"albert/{name}"] = Repository({"main": tmp_path / name})
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
        ended = subprocess.run(
            [sys.executable, "-c", OPEN, *opened, *errors],
            cwd=tmp_path,
            env=hub.environment(tmp_path / "cache"),
            capture_output=True,
            text=True,
            check=True,
        )

    results = [json.loads(line) for line in ended.stdout.splitlines()]
    for result, (name, model) in zip(results, opened.values(), strict=False):
        bias = weights[model]["albert.pooler.bias"][0].item()
        assert result == {"name": name, "bias": bias}
    for result, message in zip(results[len(opened) :], errors.values(), strict=True):
        assert message in result["error"]
        assert "\n" not in result["error"]
    assert len(hub.downloads) == len(set(hub.downloads))
    assert not any(path.endswith("/pytorch_model.bin") for path in hub.downloads)


def test_a_folder_wins_over_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(our_model(TINY, ("sentence-order",)), tmp_path / "albert" / "both")
    monkeypatch.chdir(tmp_path)
    with open_checkpoint("albert/both") as checkpoint:
        assert (checkpoint.folder, checkpoint.name) == (Path("albert/both"), "both")
