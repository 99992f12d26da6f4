"""Metrics are read back whole, by JSON and by TensorBoard, also after a crash."""

from __future__ import annotations

import gc
import json
import logging
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from tests.training.support import REPOSITORY, limited_file_size, read_metrics
from training.loop.metrics import Metrics
from training.model.similarity import LayerSimilarity

LAYERS = LayerSimilarity(distance=(1.23456789, 2.0), angle_degrees=(30.0, 44.4444444))


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's steps and values of a run, by tag."""
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_figures_are_lines_of_rounded_numbers(tmp_path: Path) -> None:
    with Metrics(tmp_path / "runs" / "new", step=0) as metrics:
        metrics.write(step=1, tokens=1_234_567_891, **{"fill-mask/loss": 1.23456789})
        counted: dict[str, Any] = {"tokens": np.int64(5), "lr_factor": np.float32(0.1)}
        metrics.write(step=12_345_678, **counted, norm=1e-9)
    assert (tmp_path / "runs" / "new" / "metrics.jsonl").read_text() == (
        '{"step": 1, "tokens": 1234567891, "fill-mask/loss": 1.23457}\n'
        '{"step": 12345678, "tokens": 5, "lr_factor": 0.1, "norm": 1e-09}\n'
    )


def test_tensorboard_has_the_same_figures(tmp_path: Path) -> None:
    with Metrics(tmp_path, step=0) as metrics:
        metrics.write(step=5, tokens=640, **{"fill-mask/loss": 9.5})
        metrics.write(step=10, tokens=1280, **{"fill-mask/loss": 8.25})
        metrics.write(step=10, **{"validation/fill-mask/loss": 8.5})
        assert events(tmp_path)["fill-mask/loss"] == [(5, 9.5), (10, 8.25)]  # at once
    assert events(tmp_path) == {
        "tokens": [(5, 640), (10, 1280)],
        "fill-mask/loss": [(5, 9.5), (10, 8.25)],
        "validation/fill-mask/loss": [(10, 8.5)],
    }


def test_layers_have_a_file_of_their_own(tmp_path: Path) -> None:
    with Metrics(tmp_path, step=0) as metrics:
        metrics.write_layers(step=7, layers=LAYERS)
    assert (tmp_path / "layers.jsonl").read_text() == (
        '{"step": 7, "distance": [1.23457, 2.0], "angle_degrees": [30.0, 44.4444]}\n'
    )
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_resumed_run_replaces_the_lines_of_lost_steps(tmp_path: Path) -> None:
    with Metrics(tmp_path, step=0) as metrics:
        for step in (10, 20, 30, 40):
            metrics.write(step=step, loss=float(step))
            metrics.write_layers(step=step, layers=LAYERS)
    with Metrics(tmp_path, step=20) as metrics:
        metrics.write(step=25, loss=25.5)
        metrics.write_layers(step=25, layers=LAYERS)
    with Metrics(tmp_path, step=25) as metrics:
        metrics.write(step=30, loss=30.5)
    expected = [(10, 10.0), (20, 20.0), (25, 25.5), (30, 30.5)]
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == expected
    assert events(tmp_path) == {"loss": expected}
    layers = (tmp_path / "layers.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in layers] == [10, 20, 25]


def test_a_run_without_a_state_begins_anew(tmp_path: Path) -> None:
    with Metrics(tmp_path, step=0) as metrics:
        for step in (0, 10):
            metrics.write(step=step, loss=9.0)
            metrics.write_layers(step=step, layers=LAYERS)
    with Metrics(tmp_path, step=0) as metrics:
        metrics.write(step=0, loss=8.0)
    assert read_metrics(tmp_path) == [{"step": 0, "loss": 8.0}]
    assert events(tmp_path) == {"loss": [(0, 8.0)]}
    assert (tmp_path / "layers.jsonl").read_text() == ""


@pytest.mark.parametrize(
    "damage",
    ['{"st', '{"step": 3, "loss": 0.5', "\x00\x00\x00", "[3]", "3", "{}", '{"step": null}', "\n"],
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "layers.jsonl"])
def test_a_truncated_line_is_removed(tmp_path: Path, name: str, damage: str) -> None:
    (tmp_path / name).write_text('{"step": 1}\n{"step": 2}\n' + damage)
    with Metrics(tmp_path, step=5) as metrics:
        metrics.write(step=6)
        metrics.write_layers(step=6, layers=LAYERS)
    lines = (tmp_path / name).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 6]


def test_bytes_that_are_no_text_are_taken_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe{')
    with Metrics(tmp_path, step=5) as metrics:
        metrics.write(step=6)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 6]


def test_a_line_that_lacks_its_end_alone_is_kept(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    with Metrics(tmp_path, step=2) as metrics:
        metrics.write(step=3)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_every_figure_is_one_line_of_strict_json(tmp_path: Path) -> None:
    with without_tensorboard():
        metrics = Metrics(tmp_path, step=0)
    names = st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: name != "step")

    @given(st.dictionaries(names, st.floats() | st.integers(-(2**53), 2**53)))
    @example({"self": 1.0, "NaN": math.nan, "line\nfeed": math.inf})
    def check(figures: dict[str, float]) -> None:
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        metrics.write(step=1, **figures)
        content = (tmp_path / "metrics.jsonl").read_text()
        assert content.count("\n") == 1
        line = json.loads(content, parse_constant=pytest.fail)
        assert line.keys() == {"step", *figures}
        for name, value in figures.items():
            is_finite = math.isfinite(value)
            expected = pytest.approx(value, rel=1e-5, abs=1e-300) if is_finite else None
            assert line[name] == expected

    check()


def test_figures_that_are_not_finite_are_null(tmp_path: Path) -> None:
    with Metrics(tmp_path, step=0) as metrics:
        metrics.write(step=1, loss=math.nan, norm=math.inf, tensor=torch.tensor(0.5).item())
        metrics.write_layers(step=1, layers=LayerSimilarity(distance=(math.nan,), angle_degrees=()))
    assert read_metrics(tmp_path) == [{"step": 1, "loss": None, "norm": None, "tensor": 0.5}]
    assert events(tmp_path) == {"tensor": [(1, 0.5)]}
    assert json.loads((tmp_path / "layers.jsonl").read_text())["distance"] == [None]


@contextmanager
def without_tensorboard() -> Iterator[None]:
    """As where it is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "tensorboard", None)
        yield


def test_without_tensorboard_the_lines_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with without_tensorboard(), Metrics(tmp_path, step=0) as metrics:
        metrics.write(step=1, loss=0.5)
        metrics.write(step=2, loss=0.25)
        metrics.write_layers(step=2, layers=LAYERS)
    assert [line["loss"] for line in read_metrics(tmp_path)] == [0.5, 0.25]
    assert not (tmp_path / "tensorboard").exists()
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert "metrics.jsonl alone is written" in caplog.text
    assert "tensorboard" in caplog.text


def test_the_import_leaves_tensorboard_alone() -> None:
    code = "import sys, training.loop.metrics; print('tensorboard' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_a_run_that_is_killed_keeps_every_line(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from itertools import count;"
        "from training.loop.metrics import Metrics;"
        "metrics = Metrics(Path(sys.argv[1]), step=0);"
        "[(metrics.write(step=n, loss=1 / n), print(n, flush=True)) for n in count(1)]"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        steps = [int(process.stdout.readline()) for _ in range(50)]
        process.send_signal(signal.SIGKILL)
        steps += [int(line) for line in process.stdout if line.endswith(b"\n")]
    with Metrics(tmp_path, step=steps[-1]):
        assert [line["step"] for line in read_metrics(tmp_path)] == steps
    assert [step for step, _ in events(tmp_path)["loss"]][: len(steps)] == steps


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, step=0)
    metrics.write(step=1, loss=0.5)
    with (
        limited_file_size((tmp_path / "metrics.jsonl").stat().st_size),
        pytest.raises(OSError, match=r"File too large: '.*metrics\.jsonl'"),
    ):
        metrics.write(step=2, loss=0.5)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.5}]
    metrics.close()


def test_a_full_disk_names_the_file_of_layers(tmp_path: Path) -> None:
    with (
        without_tensorboard(),
        Metrics(tmp_path, step=0) as metrics,
        limited_file_size(10),
        pytest.raises(OSError, match=r"File too large: '.*layers\.jsonl'"),
    ):
        metrics.write_layers(step=2, layers=LAYERS)


def test_lines_survive_a_disk_that_is_full_when_a_run_goes_on(tmp_path: Path) -> None:
    content = '{"step": 1}\n{"step": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(content)
    with (
        limited_file_size(4),
        pytest.raises(OSError, match=r"File too large: '.*metrics\.jsonl'"),
    ):
        Metrics(tmp_path, step=2)
    assert (tmp_path / "metrics.jsonl").read_text() == content


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_names_the_folder_of_tensorboard(tmp_path: Path) -> None:
    """TensorBoard writes in a thread of its own, which also ends with the error."""
    others = set(threading.enumerate())
    metrics = Metrics(tmp_path, step=0)
    size = max(file.stat().st_size for file in (tmp_path / "tensorboard").iterdir())
    (tmp_path / "metrics.jsonl").symlink_to("/dev/null")
    with limited_file_size(size), pytest.raises(OSError, match=r"File too large: '.*tensorboard'"):
        metrics.write(step=1, loss=0.5)
    with pytest.raises(OSError, match="tensorboard"):
        metrics.close()
    for thread in set(threading.enumerate()) - others:
        thread.join()
    gc.collect()  # here, where the thread's error is expected


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    blocked: dict[str, Any] = {"metrics.jsonl": Path.mkdir, "tensorboard": Path.touch}
    blocked[name](tmp_path / name)
    with pytest.raises(OSError, match=name), Metrics(tmp_path, step=0) as metrics:
        metrics.write(step=1)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(FileExistsError, match="run"):
        Metrics(tmp_path / "run", step=0)
