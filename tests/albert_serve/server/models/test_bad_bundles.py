"""Bundles that cannot be served: named in the log, while the others start."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from albert_serve.errors import AlbertServeError
from albert_serve.server.models.registry import check_models
from tests.albert_serve.server.models.shelves import (
    damage,
    load,
    reloaded,
    settings_of,
    truncate,
)
from tests.albert_serve.support import (
    copy_with,
)


def link_outside(folder: Path) -> None:
    """The hash fits, and the runtime follows no link out of the folder."""
    weights = folder / "model.safetensors"
    shutil.move(weights, folder.parent.parent / "elsewhere.safetensors")
    weights.symlink_to(folder.parent.parent / "elsewhere.safetensors")


def leave_a_manifest(folder: Path) -> None:
    for file in folder.iterdir():
        if file.name != "manifest.json":
            file.unlink()


def nest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)


def make_a_pipe(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def misname(folder: Path) -> None:
    folder.rename(folder.with_name("a b"))


SPOILED = [link_outside, leave_a_manifest, nest, make_a_pipe, misname, damage, truncate]


@pytest.mark.parametrize("spoil", SPOILED)
def test_one_bad_bundle_of_a_folder_is_named_and_the_others_start(
    spoil: Callable[[Path], None], shelf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(shelf / "first")
    settings = settings_of(shelf)
    assert check_models(settings) == "second"
    name = "a b" if spoil is misname else "first"
    assert name in caplog.text
    models = load(settings)
    assert models.names == ["second"]
    reloaded(models)
    assert models.default.name == "second"


@pytest.mark.parametrize("spoil", SPOILED)
def test_without_a_bundle_that_can_be_served_there_is_no_start(
    spoil: Callable[[Path], None], shelf: Path
) -> None:
    shutil.rmtree(shelf / "second")
    spoil(shelf / "first")
    for start in (check_models, load):
        with pytest.raises(AlbertServeError) as caught:
            start(settings_of(shelf))
        assert "\n" not in str(caught.value)


def test_a_graph_that_loops_without_end_is_given_up(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("albert_serve.runtime.engine._WARM_UP_LIMIT_S", 0.5)
    graph = onnx.load(shelf / "first/sentence-order.onnx", load_external_data=False)
    endless = copy_with(
        shelf / "first", shelf / "endless", "sentence-order.onnx", loop_first(graph)
    )
    assert endless.is_dir()
    assert check_models(settings_of(shelf)) == "first"
    assert "model endless was not loaded" in caplog.text
    assert "not answered within 0.5 s" in caplog.text
    assert load(settings_of(shelf)).names == ["first", "second"]


def loop_first(model: onnx.ModelProto) -> bytes:
    """The graph with a loop in front that multiplies the hidden states by 1 for ever."""
    make, kind = onnx.helper.make_tensor_value_info, onnx.TensorProto
    body = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Identity", ["more"], ["again"]),
            onnx.helper.make_node("Mul", ["before", "one"], ["after"]),
        ],
        "body",
        [make("i", kind.INT64, []), make("more", kind.BOOL, []), make("before", kind.FLOAT, None)],
        [make("again", kind.BOOL, []), make("after", kind.FLOAT, None)],
        [onnx.helper.make_tensor("one", kind.FLOAT, [], [1.0])],
    )
    for node in model.graph.node:
        node.input[:] = ["looped" if name == "hidden_states" else name for name in node.input]
    loop = onnx.helper.make_node("Loop", ["", "always", "hidden_states"], ["looped"], body=body)
    model.graph.node.insert(0, loop)
    model.graph.initializer.append(onnx.helper.make_tensor("always", kind.BOOL, [], [True]))
    return model.SerializeToString()
