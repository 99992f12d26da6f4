"""The default model, in `models/` and in the package: card, metrics, examples and versions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import transformers

from albert_serve.api.schemas import Answer
from albert_serve.bundle.manifest import Bundle
from albert_serve.client import AlbertClient
from albert_serve.local import LocalTransport
from albert_serve.settings import RuntimeOptions, shipped_bundle
from albert_serve.tasks import TASKS
from tests.albert_serve.support import running_service

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
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


def test_the_packaged_bundle_rejects_off_topic_questions_as_the_one_in_models_does() -> None:
    """Questions on a paragraph of another article, as in the card."""
    squad = json.loads((ROOT / "tests/data/squad_dev/dev-v1.1.json").read_text(encoding="utf-8"))
    articles = [article["paragraphs"] for article in squad["data"]]
    questions = [
        {"question": question["question"], "context": other[0]["context"]}
        for article, other in pairwise([*articles, articles[0]])
        for paragraph in article
        for question in paragraph["qas"]
    ]
    rejected = []
    for folder in (shipped_bundle(), PACKAGED):
        with AlbertClient.local(folder, num_threads=1) as albert:
            answers = albert.question_answering(questions)
            rejected.append(
                [isinstance(answer, Answer) and answer.answer == "" for answer in answers]
            )
    assert sum(rejected[0]) > 0.95 * len(questions)
    assert rejected[0] == rejected[1]


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
