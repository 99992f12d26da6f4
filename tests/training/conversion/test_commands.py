"""Each command that takes a checkpoint takes one in a form that has to be converted."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from albert_serve.bundle.sentence_vectors import (
    SentenceVectors,
    read_sentence_vectors,
    write_sentence_vectors,
)
from tests.training.conversion.forms import as_pickle
from tests.training.support import (
    TINY,
    assert_close,
    hf_load,
    hf_logits,
    our_logits,
    our_model,
    ragged,
)
from training.commands import convert, finetune, pretrain
from training.loop.step import Run
from training.loop.trainer import Saver
from training.model.checkpoint import load_checkpoint, save_checkpoint
from training.model.provenance import read_stages

pytestmark = pytest.mark.process


VECTORS = SentenceVectors(pooling="cls", normalize=True, max_length=20)


@pytest.fixture(scope="module")
def old(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model as old ones are on the hub: a pickle, and `spiece.model` alone.

    It is one of sentences.
    """
    folder = tmp_path_factory.mktemp("hub") / "albert-old"
    shutil.copytree(pretrained / "checkpoint", folder)
    write_sentence_vectors(VECTORS, folder, hidden_size=32)
    as_pickle(folder)
    (folder / "tokenizer.json").unlink()
    return folder


def test_finetuned_checkpoints_are_whole_after_the_converted_folder_is_gone(
    old: Path, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where something cleans the folder of temporary files during a long run."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    removed = []

    def save(saver: Saver, run: Run) -> None:
        for folder in temporary.glob("albert-*"):
            shutil.rmtree(folder)
            removed.append(folder)
        save_run(saver, run)

    save_run = Saver.save
    monkeypatch.setattr(Saver, "save", save)
    data = ["--text-classification", str(labelled), "--labels", "bad", "good", "--length", "32"]
    given = ["--initialize-from", str(old), *data, "--steps", "2", "--device", "cpu"]
    assert finetune.main([*given, "--output", str(tmp_path / "run")]) == 0
    assert len(removed) == 1
    checkpoint = tmp_path / "run" / "checkpoint"
    assert load_checkpoint(checkpoint).tasks["text-classification"] == 2
    for name in ("tokenizer.json", "spiece.model", "tokenizer_config.json"):
        assert (checkpoint / name).is_file()
    assert (checkpoint / "spiece.model").read_bytes() == (old / "spiece.model").read_bytes()
    first, second = read_stages(checkpoint)
    assert first["program"] == "albert-serve pretrain"
    assert second["settings"]["initialize_from"] == ["albert-old"]
    # The same command goes on, although the converted folder is another one.
    assert finetune.main([*given, "--output", str(tmp_path / "run")]) == 0
    assert convert.main([str(checkpoint), str(tmp_path / "converted")]) == 0
    for folder in (checkpoint, tmp_path / "converted"):
        assert read_sentence_vectors(folder) == VECTORS


def test_pretraining_goes_on_with_the_checkpoints_own_tokenizer(
    old: Path, easy_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--corpus", str(easy_corpus), "--length", "32", "--batch-size", "4", "--steps", "1"]
    given += ["--no-compile", "--device", "cpu", "--output", str(tmp_path)]
    assert pretrain.main(given) == 1
    assert "error: new weights need a --tokenizer" in capsys.readouterr().err
    assert pretrain.main([*given, "--initialize-from", str(old)]) == 0
    assert (tmp_path / "checkpoint" / "tokenizer.json").is_file()
    assert read_stages(tmp_path / "checkpoint")[-1]["initialize_from"] == "albert-old"


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
    assert "ours is there already; name a new folder" in capsys.readouterr().err
    file = tmp_path / "ours" / "spiece.model"
    file.write_bytes(b"no vocabulary")
    assert convert.main([str(tmp_path / "ours"), str(tmp_path / "new")]) == 1
    assert f"{file} cannot be read as a SentencePiece model" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
