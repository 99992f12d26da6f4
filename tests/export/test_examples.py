"""Examples for the page go into the manifest, and only those that the task would take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from albert_serve.bundle.manifest import Bundle, TaskExample
from export.__main__ import main
from export.errors import ExportError
from export.examples import read_examples
from tests.export.exporting import write_checkpoint


def test_they_go_into_the_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "checkpoint", tasks=("fill-mask",))
    arguments = [str(tmp_path / "checkpoint"), str(tmp_path / "bundle"), "--no-quality"]
    file = tmp_path / "examples.json"
    file.write_text('{"text-classification": [{"inputs": "a"}]}')
    assert main([*arguments, "--examples", str(file)]) == 1
    assert "there are examples of text-classification" in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()
    file.write_text('{"fill-mask": [{"inputs": "a [MASK]", "label": "One", "expected": ["b"]}]}')
    assert main([*arguments, "--examples", str(file)]) == 0
    manifest = Bundle.open(tmp_path / "bundle").manifest
    assert manifest.examples == {"fill-mask": [TaskExample(inputs="a [MASK]", label="One")]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"translation": [{"inputs": "a"}]},
            "translation is no task with examples; there are fill-mask",
        ),
        ({"fill-mask": []}, "must be a list of 1 to 20 examples"),
        ({"fill-mask": [{"label": "a"}]}, r"fill-mask\[0\]: inputs is missing"),
        ({"fill-mask": [{"inputs": 3}]}, r"fill-mask\[0\]: inputs must be a valid string"),
        ({"fill-mask": [{"inputs": ["a"]}]}, r"fill-mask\[0\]: inputs is a list"),
        (
            {"question-answering": [{"inputs": {"question": "a"}}]},
            r"question-answering\[0\]: inputs.context is missing",
        ),
    ],
)
def test_what_the_task_would_refuse_is_named(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "examples.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ExportError, match=message):
        read_examples(file)
