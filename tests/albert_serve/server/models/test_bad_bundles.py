"""Bundles that cannot be served: named in the log, while the others start."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

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
def test_a_bad_bundle_is_named_while_others_start_and_alone_it_is_no_start(
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
    shutil.rmtree(shelf / "second")
    for start in (check_models, load):
        with pytest.raises(AlbertServeError) as caught:
            start(settings)
        assert "\n" not in str(caught.value)
