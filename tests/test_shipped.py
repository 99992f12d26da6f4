"""The default model, in `models/` and in the package; the README's commands; the notebooks."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import torch
import transformers

from albert_serve.bundle.manifest import Bundle
from albert_serve.client import AlbertClient
from albert_serve.local import LocalTransport
from albert_serve.settings import RuntimeOptions, shipped_bundle
from albert_serve.tasks import TASKS
from scripts.notebooks import NOTEBOOKS, read_notebook, run_notebook
from tests.albert_serve.support import ROOT, running_service

pytestmark = pytest.mark.process

# A curl command of the README, and the reply that it says follows.
EXAMPLE = re.compile(
    r"curl \S+?/(?P<task>[a-z-]+) [^`]*?-d '(?P<body>[^`]*?)'\n```\n+```json\n(?P<reply>[^`]*)```"
)
METRIC = re.compile(r"^\| [^|]+ \| (?P<value>[\d.,]+) \| `(?P<name>\w+)` \|", re.M)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle.open(shipped_bundle())


def test_embeddings_equal_the_normalized_means_of_transformers(bundle: Bundle) -> None:
    texts = ["It rained, so we stayed in.", "He studied physics in Vienna, and moved to Berlin."]
    with AlbertClient.local(bundle.folder, num_threads=1) as albert:
        assert {task.name for task in albert.info().tasks} == {*TASKS} - {"token-classification"}
        embeddings = albert.feature_extraction(texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundle.folder)
    model = transformers.AutoModel.from_pretrained(bundle.folder).eval()
    for text, embedding in zip(texts, embeddings, strict=True):
        with torch.inference_mode():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        expected = torch.nn.functional.normalize(mean, dim=0)
        np.testing.assert_allclose(embedding, expected.numpy(), rtol=0, atol=1e-4)


def test_the_card_has_the_metrics_of_the_manifest(bundle: Bundle) -> None:
    card = (bundle.folder / "README.md").read_text(encoding="utf-8")
    metrics = {match["name"]: match["value"] for match in METRIC.finditer(card)}
    assert len(metrics) >= 5
    for name, text in metrics.items():
        num_decimals = len(text.partition(".")[2])
        assert f"{bundle.manifest.evaluation[name]:,.{num_decimals}f}" == text, name


def test_the_replies_in_the_readme_are_those_of_the_default_model(bundle: Bundle) -> None:
    examples = list(EXAMPLE.finditer((ROOT / "README.md").read_text(encoding="utf-8")))
    assert examples
    transport = LocalTransport(bundle.folder, RuntimeOptions(num_threads=1))
    with httpx.Client(transport=transport, base_url="http://local") as client:
        for example in examples:
            reply = client.post(f"/{example['task']}", json=json.loads(example["body"])).json()
            assert reply == pytest.approx(json.loads(example["reply"]), abs=5e-4)


PACKAGED = ROOT / "albert_serve/models/albert-small-en"


def python_with_lowest_versions(folder: Path, extras: str) -> Path:
    uv = [sys.executable, "-m", "uv", "--quiet", "--no-config"]
    python = folder / "bin/python"
    subprocess.run([*uv, "venv", "--python", sys.executable, str(folder)], check=True)
    install = ["pip", "install", "--resolution", "lowest-direct", "--python", str(python)]
    subprocess.run([*uv, *install, f"{ROOT}{extras}"], check=True)
    return python


def test_the_packaged_bundle_is_the_int8_version_of_the_default_model(bundle: Bundle) -> None:
    packaged = Bundle.open(PACKAGED).manifest
    assert packaged.precision == "int8"
    assert packaged.provenance["training"] == bundle.manifest.provenance["training"]
    assert packaged.evaluation == bundle.manifest.evaluation
    assert {*packaged.tasks} == {*bundle.manifest.tasks}
    assert sum(file.stat().st_size for file in PACKAGED.iterdir()) < 8_000_000
    assert sum(file.stat().st_size for file in PACKAGED.glob("*.onnx")) < 60_000


@pytest.mark.extended
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the lowest versions are for Python 3.11")
def test_service_and_client_run_with_the_lowest_declared_versions(tmp_path: Path) -> None:
    client = python_with_lowest_versions(tmp_path / "client", "")
    server = python_with_lowest_versions(tmp_path / "server", "[serve]")
    environment = {name: text for name, text in os.environ.items() if "ALBERT_SERVE" not in name}
    environment |= {"BENTOML_DO_NOT_TRACK": "True", "BENTOML_HOME": str(tmp_path / "home")}
    with running_service(environment, tmp_path, ("albert_serve", "serve"), server) as service:
        for script in ("fill_mask", "question_answering", "sentence_order", "batch_stream"):
            example = str(ROOT / f"examples/{script}.py")
            command_line = [str(client), "-W", "error", example, "--url", service.url]
            run = subprocess.run(command_line, capture_output=True, text=True, check=False)
            assert (run.stderr, run.returncode) == ("", 0)
            assert re.search(r"[01]\.\d{4}", run.stdout)
    assert "Warning" not in service.log


_FOLDERS: Final = ("models", "tests", "training", "export", "albert_serve", "examples")
# Options that the test appends for a shorter run. If an option occurs twice, the last one counts.
_SHORTER_RUN: Final = {
    "finetune": "--steps 12 --batch-size 16",
    "export": "--max-cost 20",  # after 12 steps, int8 costs more accuracy than the default limit
}


def printed_commands(program: str) -> list[str]:
    """Return the commands of the README's first shell block that has this program."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    block = next(block for block in blocks if program in block)
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.extended
def test_the_readmes_commands_train_and_serve_a_classifier(tmp_path: Path) -> None:
    """The commands run in a folder like a clone of the repository."""
    install, *commands, serve = printed_commands("--output runs/intents")
    assert install == "pip install '.[train]'"
    for name in _FOLDERS:
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "BENTOML_HOME": str(tmp_path / "home"), "PATH": path}
    variables = {**environment, "PYTHONPATH": str(tmp_path)}
    for command in commands:
        line = f"{command} {_SHORTER_RUN.get(command.split()[1], '')}"
        run = subprocess.run(line, shell=True, cwd=tmp_path, env=variables, capture_output=True)
        assert run.returncode == 0, (line, run.stdout, run.stderr)
    [curl] = printed_commands("card was stolen")
    body = json.loads(shlex.split(curl)[-1])
    serve_command = ("albert_serve", *shlex.split(serve)[1:])
    with running_service(environment, tmp_path, serve_command) as service:
        reply = httpx.post(f"{service.url}/text-classification", json=body, timeout=30).json()
    manifest = json.loads((tmp_path / "bundles/intents/manifest.json").read_text())
    labels = manifest["heads"]["text-classification"]["labels"]
    assert manifest["precision"] == "int8"
    assert reply[0][0]["label"] in labels
    assert len(labels) == 6


def output_types(notebook: Any) -> list[Any]:
    """Return the type of each output, with the formats of its data."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [(output.output_type, *sorted(output.get("data", ()))) for output in outputs]


@pytest.mark.extended
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_has_outputs_of_the_stored_types(name: str, tmp_path: Path) -> None:
    assert output_types(run_notebook(name, tmp_path)) == output_types(read_notebook(name))
