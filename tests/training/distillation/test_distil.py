"""A student learns from its teacher, and a command that cannot be is one line and no run."""

from __future__ import annotations

import json
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import transformers

from tests.training.distillation.teachers import change_weights, make_albert, make_bert
from tests.training.support import (
    REPOSITORY,
    read_metrics,
    refusal,
    run_command,
    same_weights,
    stop_at,
)
from training.commands.distil import main
from training.model.checkpoint import load_checkpoint, read_weights

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)


def mean(metrics: list[dict[str, float]], name: str) -> float:
    return sum(line[name] for line in metrics) / len(metrics)


def test_the_student_approaches_its_teacher(distilled: Path) -> None:
    metrics = read_metrics(distilled)
    assert [line["step"] for line in metrics] == list(range(5, 61, 5))
    hidden = [line["hidden-states/loss"] for line in metrics]
    assert mean(metrics[-3:], "hidden-states/loss") < 0.4 * hidden[0]
    assert hidden[-1] < 0.8
    assert mean(metrics[-3:], "fill-mask/loss") < metrics[0]["fill-mask/loss"] - 0.3
    for line in metrics:
        assert line["hidden-states/accuracy"] == pytest.approx(
            1 - line["hidden-states/loss"], abs=2e-4
        )
        assert "sentence-order/loss" not in line


def test_the_checkpoint_has_its_teachers_sizes_and_names_no_folder(
    distilled: Path, teacher_dir: Path
) -> None:
    ours = load_checkpoint(distilled / "checkpoint")
    assert ours.tasks == {"fill-mask": 800}
    assert (ours.config.hidden_size, ours.config.num_layers, ours.config.ffn_size) == (32, 3, 64)
    assert (ours.config.activation, ours.config.max_positions) == ("gelu", 64)
    (stage,) = json.loads((distilled / "checkpoint" / "training.json").read_text())["stages"]
    assert stage["program"] == "albert-serve distil"
    assert stage["corpus"] == ["easy.txt"]
    settings = stage["settings"]
    assert settings["teacher"] == "tiny-bert"
    assert len(settings["teacher_sha256"]) == 64
    assert settings["start_layers"] == [2]
    assert settings["hidden_layers"] == [[1, 1], [2, 2], [3, 3]]
    assert settings["loss_weights"] == {"masked": 1.0, "hidden": 3.0}
    for folder in (REPOSITORY, teacher_dir.parent):
        assert str(folder) not in json.dumps(stage)
        assert str(folder) not in (distilled / "run.json").read_text()


def test_a_run_is_known_by_its_teachers_weights_and_options(
    distilled: Path, distil_options: list[str], tmp_path: Path, capsys: Capture
) -> None:
    """Wherever the teacher is."""
    copy = Path(shutil.copytree(distilled, tmp_path / "run", symlinks=True))
    folder = make_bert(tmp_path / "tiny-bert")
    assert run(distil_options, copy, "--teacher", str(folder)) == 0
    assert same_weights(copy, distilled)
    assert run(distil_options, copy, "--hidden-layers", "3:3") == 1
    assert "hidden_layers [[1, 1], [2, 2], [3, 3]], not [[3, 3]]" in capsys.readouterr().err
    change_weights(folder, lambda weights: weights["embeddings.LayerNorm.bias"].add_(1))
    assert run(distil_options, copy, "--teacher", str(folder)) == 1
    assert f"error: {copy} holds a run with teacher_sha256 '" in capsys.readouterr().err


def test_a_run_with_steps_on_pairs_that_is_stopped_goes_on_to_the_same_weights(
    distil_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = ("--order-share", "0.5", "--order-length", "64")
    options = [*distil_options, *share, "--steps", "16", "--report-every", "1"]
    assert run(options, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 9, signal.SIGINT)
        assert run(options, tmp_path / "stopped") == 128 + signal.SIGINT
    assert run(options, tmp_path / "stopped") == 0
    assert same_weights(tmp_path / "stopped", tmp_path / "whole")
    metrics = read_metrics(tmp_path / "whole")
    has_order = ["paired-order/loss" in line for line in metrics]
    assert 3 < sum(has_order) < 13
    assert [("fill-mask/loss" in line) for line in metrics] == [not each for each in has_order]


def test_a_student_goes_on_from_a_checkpoint(
    distilled: Path, distil_options: list[str], tmp_path: Path
) -> None:
    """With its own weights, and not the teacher's."""
    more = ("--initialize-from", str(distilled / "checkpoint"), "--steps", "2", "--keep", "9")
    assert run(distil_options, tmp_path, *more) == 0
    first = tmp_path / "checkpoints" / "step-00000000"
    weights = read_weights(distilled / "checkpoint")
    for name, tensor in read_weights(first).items():
        assert tensor.equal(weights[name]), name
    stages = json.loads((tmp_path / "checkpoint" / "training.json").read_text())["stages"]
    assert [stage["steps"] for stage in stages] == [60, 2]


def test_teachers_of_other_architectures_teach(
    distil_options: list[str], vocab_dir: Path, tmp_path: Path
) -> None:
    """An ALBERT by its own hidden states; a DistilBERT, whose config has names of its own."""
    albert = make_albert(tmp_path / "albert", vocab_dir)
    distilbert = make_bert(tmp_path / "distilbert")
    vocab_size = len(transformers.AutoTokenizer.from_pretrained(distilbert))
    hf = transformers.DistilBertConfig(
        vocab_size=vocab_size, dim=32, n_layers=2, n_heads=4, hidden_dim=64
    )
    transformers.DistilBertModel(hf).save_pretrained(distilbert)
    sizes = ("--preset", "small", "--hidden-size", "32", "--heads", "4", "--max-positions", "64")
    for folder, more in ((albert, ()), (distilbert, sizes)):
        options = ("--teacher", str(folder), "--start", "local", "--steps", "2", *more)
        assert run(distil_options, tmp_path / f"{folder.name}-run", *options) == 0


@pytest.fixture(scope="module")
def greek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("greek") / "teacher", text="αβγ δεζ ηθι .")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--teacher /nowhere/else", "teacher /nowhere/else cannot be loaded: "),
        ("--teacher {greek}", "does the teacher read another language?"),
        ("--start local --hidden-size 16", "cannot be matched; give --hidden-size 32"),
        ("--hidden-layers 1:1 4:3", "4:3: the student has layers 1 to 3, {teacher} 1 to 3"),
        ("--ffn-size 32", "ffn_size is 64 in {teacher} and 32 in the student"),
        ("--embedding-size 64", "embedding_size 64: --start teacher allows at most 32"),
        ("--start-layers 4", "--start-layers 4: the teacher has 1 to 3"),
        ("--start-layers 1 2", "--start-layers names 2 layers of the teacher"),
        ("--start-layers 1 --start local", "--start-layers requires --start teacher and new weig"),
    ],
)
def test_impossible_options_are_one_line_and_no_run(
    distil_options: list[str],
    teacher_dir: Path,
    greek: Path,
    tmp_path: Path,
    words: str,
    message: str,
    capsys: Capture,
) -> None:
    folder = tmp_path / "run"
    assert run(distil_options, folder, *words.format(greek=greek).split()) == 1
    assert message.format(teacher=teacher_dir) in refusal(capsys, folder)
