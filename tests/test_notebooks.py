"""The notebooks of examples/ run from top to bottom, and are stored without outputs."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.parametrize("name", ["quickstart", "own_model"])
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").symlink_to(EXAMPLES.parent / "tests")
    monkeypatch.setenv("PYTHONPATH", os.fspath(EXAMPLES.parent))
    monkeypatch.setenv("ALBERT_SERVE_CACHE", os.fspath(tmp_path / "cache"))
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in cells for output in cell.outputs]
    assert {"quickstart": "image/png", "own_model": "text/html"}[name] in {
        kind for output in outputs for kind in output.get("data", ())
    }
