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


def test_an_embedding_is_that_of_transformers(bundle: Bundle) -> None:
    """It is the mean of hidden states, of length 1."""
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


def test_the_readmes_replies_are_the_models(bundle: Bundle) -> None:
    examples = list(EXAMPLE.finditer((ROOT / "README.md").read_text(encoding="utf-8")))
    assert examples
    transport = LocalTransport(bundle.folder, RuntimeOptions(num_threads=1))
    with httpx.Client(transport=transport, base_url="http://local") as client:
        for example in examples:
            reply = client.post(f"/{example['task']}", json=json.loads(example["body"])).json()
            assert reply == pytest.approx(json.loads(example["reply"]), abs=5e-4)


PACKAGED = ROOT / "albert_serve/models/albert-small-en"


def clean_environment(folder: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if "ALBERT_SERVE" not in name},
        "BENTOML_DO_NOT_TRACK": "True",
        "BENTOML_HOME": str(folder / "home"),
    }


def python_with_lowest_versions(folder: Path, extras: str) -> Path:
    uv = [sys.executable, "-m", "uv", "--quiet", "--no-config"]
    python = folder / "bin/python"
    subprocess.run([*uv, "venv", "--python", sys.executable, str(folder)], check=True)
    install = ["pip", "install", "--resolution", "lowest-direct", "--python", str(python)]
    subprocess.run([*uv, *install, f"{ROOT}{extras}"], check=True)
    return python


def test_the_packaged_bundle_is_the_int8_version_of_the_one_in_models() -> None:
    packaged, shipped = Bundle.open(PACKAGED).manifest, Bundle.open(shipped_bundle()).manifest
    assert packaged.precision == "int8"
    assert packaged.provenance["training"] == shipped.provenance["training"]
    assert packaged.evaluation == shipped.evaluation
    assert {*packaged.tasks} == {*shipped.tasks}
    assert sum(file.stat().st_size for file in PACKAGED.iterdir()) < 8_000_000
    assert sum(file.stat().st_size for file in PACKAGED.glob("*.onnx")) < 60_000


@pytest.mark.extended
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the lowest versions are for Python 3.11")
def test_service_and_client_run_with_the_lowest_declared_versions(tmp_path: Path) -> None:
    client = python_with_lowest_versions(tmp_path / "client", "")
    server = python_with_lowest_versions(tmp_path / "server", "[serve]")
    command = ("albert_serve", "serve")
    with running_service(clean_environment(tmp_path), tmp_path, command, server) as service:
        for script in ("fill_mask", "question_answering", "sentence_order", "batch_stream"):
            example = str(ROOT / f"examples/{script}.py")
            run = [str(client), "-W", "error", example, "--url", service.url]
            done = subprocess.run(run, capture_output=True, text=True, check=False)
            assert (done.stderr, done.returncode) == ("", 0)
            assert re.search(r"[01]\.\d{4}", done.stdout)
    assert "Warning" not in service.log


_FOLDERS: Final = ("models", "tests", "training", "export", "albert_serve", "examples")
# A test appends smaller sizes; if an option is given twice, the last one counts.
_SMALLER: Final = {
    "finetune": "--steps 12 --batch-size 16",
    "export": "--max-cost 20",  # int8 costs a model of 12 steps more
}


def printed_commands(program: str) -> list[str]:
    """Return the commands of the README's first shell block that has this program."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = next(
        block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if program in block
    )
    lines = (line for line in block.splitlines() if not line.startswith("#"))
    commands = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [command for command in commands if command.strip()]


@pytest.mark.extended
def test_the_readmes_commands_lead_from_a_csv_to_a_reply(tmp_path: Path) -> None:
    """They run in a folder like a clone of the repository."""
    install, *commands, serve = printed_commands("--output runs/intents")
    assert install == "pip install '.[train]'"
    for name in _FOLDERS:
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "BENTOML_HOME": str(tmp_path / "home"), "PATH": path}
    for command in commands:
        line = f"{command} {_SMALLER.get(command.split()[1], '')}"
        here = {**environment, "PYTHONPATH": str(tmp_path)}
        run = subprocess.run(line, shell=True, cwd=tmp_path, env=here, capture_output=True)
        assert run.returncode == 0, (line, run.stdout, run.stderr)
    [curl] = printed_commands("card was stolen")
    body = json.loads(shlex.split(curl)[-1])
    with running_service(
        environment, tmp_path, ("albert_serve", *shlex.split(serve)[1:])
    ) as service:
        reply = httpx.post(f"{service.url}/text-classification", json=body, timeout=30).json()
    manifest = json.loads((tmp_path / "bundles/intents/manifest.json").read_text())
    assert manifest["precision"] == "int8"
    assert reply[0][0]["label"] in manifest["heads"]["text-classification"]["labels"]
    assert len(manifest["heads"]["text-classification"]["labels"]) == 6


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


@pytest.mark.extended
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_prints_what_is_stored(name: str, tmp_path: Path) -> None:
    kinds = [
        [(output.output_type, *sorted(output.get("data", ()))) for output in outputs_of(notebook)]
        for notebook in (run_notebook(name, tmp_path), read_notebook(name))
    ]
    assert kinds[0] == kinds[1]
