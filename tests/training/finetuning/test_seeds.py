"""Runs of several seeds are those of each seed, and the best of them is the result."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
from collections.abc import Container, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from training.finetuning.seeds import Trained, train_seeds

from tests.training.processes import before_step, die, get_signals, run_in_process, spoil
from tests.training.support import refusal, run_command, same_weights, stop_at
from training.finetune import main
from training.loop.progress import DivergedError, RunError
from training.loop.selection import Selection
from training.loop.step import Run
from training.loop.trainer import Saver

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)


@pytest.fixture
def start(pretrained: Path, labelled: Path) -> list[str]:
    """A run of 20 steps with two validations, which gets better than chance."""
    return [
        *("--initialize-from", str(pretrained / "checkpoint"), "--length", "64"),
        *("--text-classification", str(labelled), "--validation", str(labelled)),
        *("--batch-size", "20", "--steps", "20", "--lr", "5e-3", "--adamw-lr", "1e-2"),
        *("--precision", "fp32", "--device", "cpu", "--validate-every", "10", "--metric", "loss"),
    ]


def results(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "seeds.json").read_text())
    return content


def test_each_run_is_that_of_its_seed_and_the_best_is_linked(
    start: list[str], tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "several"
    assert run(start, folder, "--seeds", "3", "--seed", "5") == 0
    content = results(folder)
    values = {each["seed"]: each["value"] for each in content["runs"]}
    assert list(values) == [5, 6, 7]
    assert content["median"] == statistics.median(values.values())
    assert content["standard_deviation"] == statistics.stdev(values.values())
    assert content["best_seed"] == min(values, key=values.__getitem__)
    assert (folder / "best").resolve().is_relative_to(folder / f"seed-{content['best_seed']}")
    assert f"median {content['median']:.4f} of 3 runs" in capsys.readouterr().out
    assert run(start, tmp_path / "alone", "--seed", "6") == 0
    assert same_weights(tmp_path / "alone", folder / "seed-6")
    record = (tmp_path / "alone" / "run.json").read_text()
    assert record == (folder / "seed-6" / "run.json").read_text()
    # The same command changes nothing; with more seeds, only those are trained.
    before = (folder / "seeds.json").read_bytes()
    assert run(start, folder, "--seeds", "5", "6", "7") == 0
    assert (folder / "seeds.json").read_bytes() == before


def test_a_stopped_run_is_resumed_as_a_whole(
    start: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run(start, whole, "--seeds", "2") == 0
    assert run(start, stopped, "--seeds", "1") == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGTERM)
        assert run(start, stopped, "--seeds", "2") == 143
    assert [each["seed"] for each in results(stopped)["runs"]] == [0]
    assert run(start, stopped, "--seeds", "2") == 0
    assert results(stopped) == results(whole)
    assert all(same_weights(whole / name, stopped / name) for name in ("seed-0", "seed-1"))


def test_a_killed_run_is_resumed_as_a_whole(start: list[str], tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(start, whole, "--seeds", "2") == 0
    kill = partial(before_step, 4, die)
    for _ in range(2):  # in the first seed's run, then in the second's
        ended = run_in_process(
            [*start, "--seeds", "2"], killed, fate=kill, program="training.finetune"
        )
        assert ended.status == -signal.SIGKILL
        assert run(start, killed, "--seeds", "1") == 0
    assert run(start, killed, "--seeds", "2") == 0
    assert results(killed) == results(whole)
    assert all(same_weights(whole / name, killed / name) for name in ("seed-0", "seed-1"))


def trained(
    values: Mapping[int, float], stops: int | None = None, diverges: Container[int] = ()
) -> Any:
    """A trainer of runs whose best accuracies are these, by seed; it notes what it trained."""

    def train(options: argparse.Namespace) -> Trained:
        train.seeds.append(options.seed)  # type: ignore[attr-defined]
        selection = Selection(figure="accuracy", chance=0.5)
        selection.take(1, {"accuracy": values[options.seed]})
        if options.seed in diverges:
            return Trained(1, selection, "fp32", DivergedError("its gradient is not finite"))
        return Trained(143 if options.seed == stops else 0, selection, "fp32")

    train.seeds = []  # type: ignore[attr-defined]
    return train


def options_of(folder: Path, *seeds: int) -> argparse.Namespace:
    return argparse.Namespace(
        seeds=list(seeds), seed=0, output=folder, validation=["x"], heads=[], precision="auto"
    )


def test_collapsed_runs_are_replaced_once(tmp_path: Path, capsys: Capture) -> None:
    """And one that collapses in place of another does not count either."""
    train = trained({0: 0.5, 1: 0.8, 2: 0.4, 3: 0.9, 4: 0.45})
    assert train_seeds(options_of(tmp_path, 3), train) == 0
    assert train.seeds == [0, 3, 1, 2, 4]
    content = results(tmp_path)
    assert [(each["seed"], each["in_place_of"]) for each in content["runs"]] == [
        *((0, None), (3, 0), (1, None), (2, None), (4, 2)),
    ]
    assert [each["has_collapsed"] for each in content["runs"]] == [True, False, False, True, True]
    assert (content["min"], content["max"]) == (0.8, 0.9)
    assert content["median"] == pytest.approx(0.85)
    assert (content["count"], content["best_seed"], content["chance"]) == (2, 3, 0.5)
    out = capsys.readouterr().out
    assert "seed 0 has collapsed; seed 3 replaces it\n" in out
    assert "seed 4: accuracy 0.4500 at step 1, in place of seed 2, collapsed\n" in out


def test_a_run_that_diverges_counts_as_collapsed(tmp_path: Path, capsys: Capture) -> None:
    train = trained({0: 0.9, 1: 0.8, 2: 0.7}, diverges={0})
    assert train_seeds(options_of(tmp_path, 2), train) == 0
    assert train.seeds == [0, 2, 1]
    content = results(tmp_path)
    first, second, _ = content["runs"]
    assert first == {
        "seed": 0,
        "value": None,
        "step": None,
        "has_collapsed": True,
        "in_place_of": None,
        "has_diverged": True,
    }
    assert (second["in_place_of"], second["has_diverged"]) == (0, False)
    assert (content["count"], content["max"]) == (2, 0.8)
    out = capsys.readouterr().out
    assert "seed 0 has diverged: its gradient is not finite\n" in out
    assert "seed 0 has diverged; seed 2 replaces it\n" in out
    assert "seed 0: accuracy none, diverged\n" in out


def test_a_gradient_that_stays_not_finite_ends_one_seed_alone(
    start: list[str], tmp_path: Path
) -> None:
    """The steps of five returns to the first checkpoint; without --seeds they end the command."""
    apart = partial(run_in_process, program="training.finetune", fate=partial(spoil, range(1, 26)))
    assert apart([*start, "--seeds", "1"], tmp_path / "seeds").status == 0
    runs = results(tmp_path / "seeds")["runs"]
    assert [(each["seed"], each["has_diverged"]) for each in runs] == [(0, True), (1, False)]
    assert (tmp_path / "seeds/best").resolve().is_relative_to(tmp_path / "seeds/seed-1")
    alone = apart(start, tmp_path / "alone")
    assert alone.status == 1
    assert alone.err.startswith("error: the gradient is not finite, and was not after 4 returns")


@pytest.mark.parametrize("diverges", [(), (0, 1, 2, 3)])
def test_runs_that_all_collapse_are_an_error(tmp_path: Path, diverges: tuple[int, ...]) -> None:
    train = trained({0: 0.5, 1: 0.5, 2: 0.4, 3: 0.4}, diverges=diverges)
    with pytest.raises(RunError, match=r"all 4 runs have collapsed or diverged \(.*seeds\.json\)"):
        train_seeds(options_of(tmp_path, 2), train)
    assert (results(tmp_path)["count"], len(results(tmp_path)["runs"])) == (0, 4)
    assert not (tmp_path / "best").exists()
    assert train_seeds(options_of(tmp_path, 2), train, is_main=False) == 1


def test_no_further_seed_is_trained_after_a_signal(tmp_path: Path) -> None:
    train = trained({0: 0.9, 1: 0.9, 2: 0.9}, stops=1)
    assert train_seeds(options_of(tmp_path, 3), train) == 143
    assert train.seeds == [0, 1]


def test_no_further_seed_is_trained_after_a_signal_at_the_end_of_a_run(
    start: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that is done: it came after the last validation, while the best was saved."""
    signals, original = [signal.SIGTERM], Saver.save

    def save(saver: Saver, run: Run) -> None:
        if run.validated_step == 20:
            get_signals(*signals)
            signals.clear()
        original(saver, run)

    with monkeypatch.context() as patch:
        patch.setattr(Saver, "save", save)
        assert run(start, tmp_path / "run", "--seeds", "2") == 143
    assert [each["seed"] for each in results(tmp_path / "run")["runs"]] == [0]
    assert not (tmp_path / "run/seed-1").exists()
    assert run(start, tmp_path / "run", "--seeds", "2") == 0
    assert [each["seed"] for each in results(tmp_path / "run")["runs"]] == [0, 1]


def test_a_signal_at_the_end_of_the_last_run_comes_too_late(tmp_path: Path) -> None:
    def train(options: argparse.Namespace) -> Trained:
        return Trained(
            0, Selection(figure="accuracy", best=0.9, best_step=1), "fp32", signal=signal.SIGTERM
        )

    assert train_seeds(options_of(tmp_path, 1), train) == 0


def test_runs_at_the_level_of_chance_are_said_to_have_collapsed(
    start: list[str], labelled: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Of a file with one label, one answer for all texts is right."""
    glad = tmp_path / "glad.tsv"
    rows = labelled.read_text().splitlines()
    glad.write_text("\n".join(row for row in rows if not row.endswith("\t0")))
    options = [*start[:-2], "--validation", str(glad), "--metric", "accuracy"]
    assert run(options, tmp_path / "run", "--seeds", "1") == 1
    assert [each["seed"] for each in results(tmp_path / "run")["runs"]] == [0, 1]
    said = capsys.readouterr()
    assert "error: all 2 runs have collapsed or diverged" in said.err
    assert "the run has collapsed: its accuracy is not better than 1.0000" in said.out + said.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seeds", "0"], "--seeds 0: give a number of runs, or two seeds or more"),
        (["--seeds", "1", "1"], "--seeds 1 1: give each seed once"),
        (["--seeds", "1", "2", "--seed", "3"], "--seed 3 is the first of a number of --seeds"),
    ],
)
def test_seeds_that_contradict(
    start: list[str], tmp_path: Path, more: list[str], message: str, capsys: Capture
) -> None:
    assert run(start, tmp_path / "run", *more) == 1
    assert message in refusal(capsys, tmp_path / "run")


def test_seeds_need_validation(tmp_path: Path) -> None:
    options = options_of(tmp_path, 3)
    options.validation = None
    with pytest.raises(RunError, match="--seeds compares runs by their validation; give --valid"):
        train_seeds(options, trained({}))


def test_a_folder_is_of_one_run_or_of_several(
    start: list[str], tmp_path: Path, capsys: Capture
) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    assert run(start, one, "--steps", "1") == 0
    assert run(start, one, "--seeds", "2") == 1
    assert f"{one} holds a run without --seeds; give another --output" in capsys.readouterr().err
    run(start, several, "--seeds", "1", "--steps", "1")
    assert run(start, several) == 1
    assert f"{several} holds runs of several seeds; give --seeds" in capsys.readouterr().err
