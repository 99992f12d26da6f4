"""Run the notebooks of `examples/`, and store them with their outputs: `make notebooks`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient

CLONE: Final = Path(__file__).parents[1]
NOTEBOOKS: Final = ("quickstart", "own_model")


def notebook_file(name: str) -> Path:
    """Return the file of a notebook."""
    return CLONE / "examples" / f"{name}.ipynb"


def read_notebook(name: str) -> Any:
    """Return the stored notebook."""
    return nbformat.read(notebook_file(name), as_version=4)  # type: ignore[no-untyped-call]


def run_notebook(name: str, folder: Path) -> Any:
    """Return a notebook with its outputs, without messages on stderr, which differ between runs.

    Args:
        folder: working directory, for the runs and the cache.
    """
    (folder / "tests").symlink_to(CLONE / "tests")
    os.environ |= {"PYTHONPATH": str(CLONE), "ALBERT_SERVE_CACHE": str(folder / "cache")}
    notebook = read_notebook(name)
    resources = {"metadata": {"path": folder}}
    NotebookClient(
        notebook, timeout=1200, resources=resources, record_timing=False, coalesce_streams=True
    ).execute()
    notebook.metadata.language_info = {"name": "python"}  # without this machine's version
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main() -> None:
    """Run all notebooks, or the notebooks named on the command line."""
    for name in sys.argv[1:] or NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            notebook = run_notebook(name, Path(folder))
        nbformat.write(notebook, notebook_file(name))  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
