"""Pretraining learns, and a run that was stopped anywhere ends as one that was not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers

from tests.training.support import REPOSITORY, hf_load, read_metrics, same_weights, stop_at
from training.checkpoint import load_checkpoint
from training.evaluate import unigram_entropy
from training.loop import Run
from training.pretrain import main
from training.shards import Shards

Capture = pytest.CaptureFixture[str]


def run(options: list[str], folder: Path, *more: str) -> int:
    return main([*options, "--output", str(folder), *more])


def test_the_loss_falls_below_the_unigram_entropy(pretrained: Path) -> None:
    entropy = unigram_entropy(Shards.open(pretrained / "shards"), 800)
    metrics = read_metrics(pretrained)
    assert [line["step"] for line in metrics] == list(range(5, 81, 5))
    assert metrics[0]["fill-mask/loss"] > 0.9 * entropy
    assert sum(line["fill-mask/loss"] for line in metrics[-5:]) / 5 < 0.9 * entropy
    assert metrics[-1]["fill-mask/accuracy"] > 0.2
    assert metrics[-1]["tokens"] > metrics[0]["tokens"] > 0
    assert all(line["tokens_per_s"] > 0 for line in metrics)
    assert metrics[0]["lr_factor"] == pytest.approx(1.0)
    assert 0 < metrics[-1]["lr_factor"] < 0.3


def test_the_checkpoint_is_one_of_transformers(pretrained: Path) -> None:
    folder = pretrained / "checkpoint"
    model = hf_load("AlbertForPreTraining", folder)
    inputs = transformers.AutoTokenizer.from_pretrained(folder)("The school", return_tensors="pt")
    with torch.no_grad():
        assert model(**inputs).prediction_logits.isfinite().all()
    assert load_checkpoint(folder).tasks == {"fill-mask": 800, "sentence-order": 2}


def test_the_checkpoint_says_where_it_comes_from(pretrained: Path) -> None:
    (stage,) = json.loads((pretrained / "checkpoint" / "training.json").read_text())["stages"]
    assert stage["program"] == "training.pretrain"
    assert stage["corpus"] == ["easy.txt"]
    assert (stage["steps"], stage["settings"]["batch_size"]) == (80, 16)
    assert stage["tokens"] == read_metrics(pretrained)[-1]["tokens"]
    assert str(REPOSITORY) not in json.dumps(stage)


def test_a_run_that_is_stopped_goes_on_to_the_same_weights(
    pretrained: Path,
    pretrain_options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """Its model has dropout in the sentence-order head, so that random states count, too."""
    with monkeypatch.context() as patch:
        stop_at(patch, 37, signal.SIGINT)
        assert run(pretrain_options, tmp_path) == 128 + signal.SIGINT
    assert "stopped at 46.2%; the same command goes on" in capsys.readouterr().out
    assert not same_weights(tmp_path, pretrained)
    assert run(pretrain_options, tmp_path) == 0
    assert "going on from step 37" in capsys.readouterr().out
    assert same_weights(tmp_path, pretrained)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(5, 81, 5))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_stopped_goes_on_to_the_same_weights(
    pretrained: Path, pretrain_options: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "training.pretrain", *pretrain_options]
    command += ["--output", str(tmp_path), "--save-every", "0.1s"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment) as process:
        while not (tmp_path / "state.pt").is_file():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
    assert process.returncode == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    assert run(pretrain_options, tmp_path) == 0
    assert same_weights(tmp_path, pretrained)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(5, 81, 5))


def test_a_second_signal_ends_at_once(
    pretrain_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(_: Run) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("still there")

    monkeypatch.setattr(Run, "step", step)
    with pytest.raises(SystemExit, match="143"):
        run(pretrain_options, tmp_path)


def test_a_run_that_is_done_stays_as_it_is(
    pretrained: Path, pretrain_options: list[str], tmp_path: Path
) -> None:
    shutil.copytree(pretrained, tmp_path / "run")
    assert run(pretrain_options, tmp_path / "run") == 0
    assert same_weights(tmp_path / "run", pretrained)
    assert read_metrics(tmp_path / "run") == read_metrics(pretrained)


def test_a_state_of_an_early_version_goes_on(
    pretrained: Path, pretrain_options: list[str], tmp_path: Path
) -> None:
    """Without random state, count of batches or names of files."""
    shutil.copytree(pretrained, tmp_path / "run")
    file = tmp_path / "run" / "state.pt"
    state = torch.load(file, weights_only=True)
    early = {key: state[key] for key in ("model", "optimizers", "elapsed_s", "tokens")}
    torch.save({**early, "step": 78}, file)
    note = tmp_path / "run" / "run.json"
    known = json.loads(note.read_text())
    del known["corpus"]
    note.write_text(json.dumps(known))
    assert run(pretrain_options, tmp_path / "run") == 0
    assert torch.load(file, weights_only=True)["num_batches"] == {"pretraining": 80}


def test_a_budget_ends_a_run(pretrain_options: list[str], tmp_path: Path) -> None:
    """And its seconds are counted on over an interruption."""
    assert run(pretrain_options, tmp_path, "--budget", "0.3s") == 0
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert 0 < state["step"] <= 80
    assert state["step"] == 80 or state["elapsed_s"] >= 0.3
    assert run(pretrain_options, tmp_path, "--budget", "0.3s") == 0
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] <= state["step"] + 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--batch-size", "8"], "batch_size 16, not 8"),
        (["--seed", "1"], "seed 0, not 1"),
        (["--layers", "3"], "num_hidden_layers 2, not 3"),
        (["--sharing", "ffn"], "albert_sharing 'all', not 'ffn'"),
    ],
)
def test_other_options_on_a_run_are_refused(
    pretrained: Path, pretrain_options: list[str], changes: list[str], message: str, capsys: Capture
) -> None:
    before = (pretrained / "state.pt").read_bytes()
    assert run(pretrain_options, pretrained, *changes) == 1
    assert capsys.readouterr().err == (
        f"error: {pretrained} holds a run with {message}. "
        "Give the same options to go on with it, or another --output\n"
    )
    assert (pretrained / "state.pt").read_bytes() == before


def test_another_corpus_on_a_run_is_refused_before_it_is_tokenised(
    pretrained: Path, pretrain_options: list[str], tmp_path: Path, capsys: Capture
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Another text.")
    shards = (pretrained / "shards" / "tokens.npy").read_bytes()
    assert run(pretrain_options, pretrained, "--corpus", str(other)) == 1
    assert "holds a run with corpus [['easy.txt'," in capsys.readouterr().err
    assert (pretrained / "shards" / "tokens.npy").read_bytes() == shards


def last(options: list[str], **changes: str) -> list[str]:
    """Options given again; the last counts."""
    return [*options, *(part for name, value in changes.items() for part in (f"--{name}", value))]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus": "none.txt"}, "none.txt does not exist"),
        ({"tokenizer": "nowhere"}, "nowhere/tokenizer.json cannot be read: No such file"),
        ({"batch-size": "100000"}, "less than one batch of 100000; give more text or a smaller"),
        ({"length": "65"}, "--length 65: a sequence has from 8 tokens to the model's 64 positions"),
        ({"length": "7"}, "--length 7: a sequence has from 8"),
        ({"heads": "5"}, "hidden_size 32 is not a multiple of num_heads 5"),
        ({"groups": "3"}, "num_groups 3 is over num_layers 2"),
    ],
)
def test_what_cannot_be_is_one_line_and_no_run(
    pretrain_options: list[str],
    tmp_path: Path,
    changes: dict[str, str],
    message: str,
    capsys: Capture,
) -> None:
    folder = tmp_path / "run"
    assert run(last(pretrain_options, **changes), folder) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in error
    assert not (folder / "run.json").exists()


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_an_empty_corpus(
    pretrain_options: list[str], tmp_path: Path, content: str, capsys: Capture
) -> None:
    corpus = tmp_path / "empty.txt"
    corpus.write_text(content)
    assert run(last(pretrain_options, corpus=str(corpus)), tmp_path / "run") == 1
    assert "error: the corpus holds no sentence\n" in capsys.readouterr().err


def test_a_run_without_an_end(pretrain_options: list[str], tmp_path: Path, capsys: Capture) -> None:
    at = pretrain_options.index("--steps")
    assert run(pretrain_options[:at] + pretrain_options[at + 2 :], tmp_path / "run") == 1
    assert capsys.readouterr().err == "error: a run needs an end: give --steps or --budget\n"


def test_an_output_that_is_a_file(
    pretrain_options: list[str], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "run").write_text("")
    assert run(pretrain_options, tmp_path / "run") == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_a_damaged_state_is_refused(
    pretrained: Path, pretrain_options: list[str], tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(pretrained, tmp_path / "run")
    os.truncate(tmp_path / "run" / "state.pt", 1000)
    assert run(pretrain_options, tmp_path / "run") == 1
    assert f"error: {tmp_path}/run/state.pt cannot be read" in capsys.readouterr().err


def test_a_gradient_that_is_not_finite_ends_the_run_and_keeps_the_checkpoint(
    pretrained: Path, pretrain_options: list[str], tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(pretrained, tmp_path / "run")
    file = tmp_path / "run" / "state.pt"
    state = torch.load(file, weights_only=True)
    state["step"], state["num_batches"] = 70, {"pretraining": 70}
    state["model"]["albert.embeddings.norm.weight"][0] = float("nan")
    torch.save(state, file)
    assert run(pretrain_options, tmp_path / "run") == 1
    assert "error: the gradient of step 70 has norm nan" in capsys.readouterr().err
    for kept in ("model.safetensors", "config.json"):
        ours, theirs = (f / "checkpoint" / kept for f in (tmp_path / "run", pretrained))
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(("sharing", "start"), [("attention", "random"), ("none", "local")])
def test_every_model_trains(
    pretrain_options: list[str], tmp_path: Path, sharing: str, start: str
) -> None:
    options = last(pretrain_options, sharing=sharing, steps="3", start=start)
    assert run(options, tmp_path) == 0
    model = load_checkpoint(tmp_path / "checkpoint")
    assert model.config.sharing == sharing
    assert len(model.albert.encoder.ffns) == 2


@pytest.mark.parametrize("program", ["vocab", "pretrain", "finetune", "evaluate"])
def test_help_shows_examples(program: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        import_module(f"training.{program}").main(["--help"])
    assert f"examples:\n  python -m training.{program} " in capsys.readouterr().out
