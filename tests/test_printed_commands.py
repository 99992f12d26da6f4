"""The commands of the documents, from training to a service, and the notebooks run as printed."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.notebooks import NOTEBOOKS, notebook_file, read_notebook, run_notebook
from tests.albert_serve.support import running_service
from tests.printed import printed_commands, run_printed

README, PRETRAINING, GUIDE = "README.md", "docs/pretraining.md", "docs/own-model.md"


@pytest.mark.parametrize(
    ("document", "program", "begins"),
    [
        (PRETRAINING, "serve vocab", ["vocab", "pretrain"]),
        (GUIDE, "serve finetune", []),
    ],
)
def test_a_document_leads_from_training_to_a_service(
    document: str, program: str, begins: list[str]
) -> None:
    activate, *commands = printed_commands(document, program)
    assert activate == "source .venv/bin/activate"
    verbs = [*begins, "finetune", "evaluate", "export"]
    assert [command.split()[:2] for command in commands[: len(verbs)]] == [
        ["albert-serve", verb] for verb in verbs
    ]
    assert commands[-1].startswith("albert-serve serve --bundle bundles/")


@pytest.mark.extended
@pytest.mark.process
def test_the_readmes_road_leads_from_a_csv_to_a_reply(tmp_path: Path) -> None:
    """With fewer steps, and in a folder of its own, from the model that ships."""
    install, *commands, serve = printed_commands(README, "--output runs/intents")
    assert install == "pip install '.[train]'"
    few = {
        "finetune": "--steps 12 --batch-size 16",
        "export": "--max-cost 20",  # int8 costs a model of 12 steps more
    }
    run_printed(commands, tmp_path, few)
    (curl,) = printed_commands(README, "card was stolen")
    body = json.loads(shlex.split(curl)[-1])
    environment = {**os.environ, "BENTOML_HOME": str(tmp_path / "home")}
    command = ("albert_serve", *shlex.split(serve)[1:])
    with running_service(environment, tmp_path, command) as service:
        reply = httpx.post(f"{service.url}/text-classification", json=body, timeout=30).json()
    manifest = json.loads((tmp_path / "bundles/intents/manifest.json").read_text())
    assert manifest["precision"] == "int8"
    assert reply[0][0]["label"] in manifest["heads"]["text-classification"]["labels"]
    assert len(manifest["heads"]["text-classification"]["labels"]) == 6


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_stored_with_outputs_that_name_no_machine(name: str) -> None:
    stored = json.dumps(outputs_of(read_notebook(name)))
    assert "stdout" in stored
    assert not re.search(r"stderr|(?<![\w.:/])/(home|root|tmp|usr|Users|opt|mnt)\b", stored)
    assert notebook_file(name).stat().st_size < 100_000


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_prints_what_is_stored(name: str, tmp_path: Path) -> None:
    kinds = [
        [(output.output_type, *sorted(output.get("data", ()))) for output in outputs_of(notebook)]
        for notebook in (run_notebook(name, tmp_path), read_notebook(name))
    ]
    assert kinds[0] == kinds[1]
