"""The model that ships, in `models/` and in the wheel: its card, figures, examples and versions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers

from albert_serve.api.schemas import Answer
from albert_serve.bundle.manifest import Bundle
from albert_serve.client import AlbertClient
from albert_serve.runtime.engine import Engine
from albert_serve.settings import shipped_bundle
from albert_serve.tasks import TASKS, load_tasks, prepare_request, shape_reply
from tests.albert_serve.support import running_service

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
# A curl command of the README, and the reply that it says follows.
EXAMPLE = re.compile(
    r"curl \S+?/(?P<task>[a-z-]+) [^`]*?-d '(?P<body>[^`]*?)'\n```\n+```json\n(?P<reply>[^`]*)```"
)
FIGURE = re.compile(r"^\| [^|]+ \| (?P<value>[\d.,]+) \| `(?P<name>\w+)` \|", re.M)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle.open(shipped_bundle())


def measured(bundle: Bundle) -> dict[str, float]:
    return {
        name: value
        for name, value in bundle.manifest.evaluation.items()
        if isinstance(value, int | float)
    }


def readme_examples() -> list[re.Match[str]]:
    return list(EXAMPLE.finditer((ROOT / "README.md").read_text(encoding="utf-8")))


def test_ships_all_tasks_but_entities(bundle: Bundle) -> None:
    assert {*TASKS} - {"token-classification"} == {*load_tasks(bundle)}


def test_an_embedding_is_that_of_transformers(bundle: Bundle) -> None:
    """Its mean of hidden states, of length 1."""
    texts = ["It rained, so we stayed in.", "He studied physics in Vienna, and moved to Berlin."]
    prepared = prepare_request(
        load_tasks(bundle)["feature-extraction"],
        TASKS["feature-extraction"].request.model_validate({"inputs": texts}),
    )
    hidden = Engine.open(bundle).run([one for item in prepared for one in item.inputs])
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundle.folder)
    model = transformers.AutoModel.from_pretrained(bundle.folder).eval()
    for text, item, rows in zip(texts, prepared, hidden, strict=True):
        with torch.inference_mode():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        expected = torch.nn.functional.normalize(mean, dim=0)
        embedding: Any = item.finish([rows])
        np.testing.assert_allclose(embedding, expected.numpy(), rtol=0, atol=1e-4)


def test_the_client_describes_it() -> None:
    with AlbertClient.local(num_threads=1) as albert:
        info = albert.info()
    described = (
        rf"{info.model_id}: an ALBERT in fp32, revision {info.revision}\nlicense: cc-by-sa-4\.0\n"
        r"language: en\nbase model: .+\nsizes: 5,338,470 parameters in 21\.4 MB, 6 layers of .+"
        r"\n  text-classification \(negative, positive\): accuracy \d\d\.\d % of 872 .+"
        r"\nevaluation:\n.+\n  question-answering: F1 \d\d\.\d\d\n.+"
        r"\nlimits: 512 tokens a text, 1,024 items and 4,194,304 bytes a request"
    )
    assert re.fullmatch(described, str(info), re.DOTALL)


def test_the_graphs_hold_no_weights(bundle: Bundle) -> None:
    graphs = list(bundle.folder.glob("*.onnx"))
    assert sum(graph.stat().st_size for graph in graphs) < 40_000


def test_the_card_states_the_figures_of_the_manifest(bundle: Bundle) -> None:
    card = (bundle.folder / "README.md").read_text(encoding="utf-8")
    stated = {match["name"]: match["value"] for match in FIGURE.finditer(card)}
    figures = measured(bundle)
    assert set(stated) <= set(figures)
    for name, text in stated.items():
        num_decimals = len(text.partition(".")[2])
        assert f"{figures[name]:,.{num_decimals}f}" == text, name


def test_the_readmes_example_is_right() -> None:
    """It is one of the list that was written before the model was tried."""
    [example] = readme_examples()
    listed = json.loads((ROOT / "albert_serve/web/examples.json").read_text())[example["task"]]
    asked = json.loads(example["body"])["inputs"]
    [expected] = [each["expected"] for each in listed if each["inputs"] == asked]
    assert json.loads(example["reply"])["answer"] in expected


@pytest.mark.parametrize("example", readme_examples(), ids=lambda example: example["task"])
def test_the_readmes_replies_are_the_models(bundle: Bundle, example: re.Match[str]) -> None:
    name = example["task"]
    request = TASKS[name].request.model_validate_json(example["body"])
    prepared = prepare_request(load_tasks(bundle)[name], request)
    logits = iter(Engine.open(bundle).run([one for item in prepared for one in item.inputs]))
    answers = [item.finish([next(logits) for _ in item.inputs]) for item in prepared]
    reply = json.loads(json.dumps(shape_reply(request, answers), default=lambda m: m.model_dump()))
    assert rounded(reply) == rounded(json.loads(example["reply"]))


def rounded(value: Any) -> Any:
    """The same with its numbers to three decimals, as the README prints them."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


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


def test_the_packaged_bundle_is_the_int8_form_of_the_one_in_models() -> None:
    packaged, shipped = Bundle.open(PACKAGED).manifest, Bundle.open(shipped_bundle()).manifest
    assert packaged.precision == "int8"
    assert packaged.provenance["training"] == shipped.provenance["training"]
    assert packaged.evaluation == shipped.evaluation
    assert {*packaged.tasks} == {*shipped.tasks}
    assert sum(file.stat().st_size for file in PACKAGED.iterdir()) < 8_000_000


def test_the_packaged_bundle_rejects_off_topic_questions_as_the_one_in_models_does() -> None:
    """Questions on a paragraph of another article, as in the card."""
    squad = json.loads((ROOT / "tests/data/squad_dev/dev-v1.1.json").read_text(encoding="utf-8"))
    articles = [article["paragraphs"] for article in squad["data"]]
    asked = [
        {"question": question["question"], "context": other[0]["context"]}
        for article, other in pairwise([*articles, articles[0]])
        for paragraph in article
        for question in paragraph["qas"]
    ]
    rejected = []
    for folder in (shipped_bundle(), PACKAGED):
        with AlbertClient.local(folder, num_threads=1) as albert:
            answers = albert.question_answering(asked)
            rejected.append([isinstance(one, Answer) and one.answer == "" for one in answers])
    assert sum(rejected[0]) > 0.95 * len(asked)
    assert rejected[0] == rejected[1]


@pytest.mark.extended
def test_the_wheel_serves_its_own_bundle(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
    subprocess.run([*build, tmp_path / "dist"], cwd=ROOT, check=True, capture_output=True)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, tmp_path / "site", wheel], check=True, capture_output=True)
    environment = {**clean_environment(tmp_path), "PYTHONPATH": str(tmp_path / "site")}
    with running_service(environment, tmp_path, ("albert_serve", "serve")) as service:
        info = httpx.get(f"{service.url}/info").json()
        asked = {"inputs": "She was [MASK] in London in 1950.", "parameters": {"top_k": 1}}
        [best] = httpx.post(f"{service.url}/fill-mask", json=asked, timeout=30).json()
    cited = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert [info["version"]] == [wheel.name.split("-")[1]] == cited
    assert info["precision"] == "int8"
    assert best["token_str"] == "born"


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
