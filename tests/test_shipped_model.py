"""The bundle in `models/`, its card, and the README's examples, held against each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from albert_serve.bundle.manifest import Bundle, TaskEntry
from albert_serve.bundle.weights import TaskName
from albert_serve.config import AlbertConfig
from albert_serve.default_bundle import shipped_bundle
from albert_serve.runtime.engine import Engine
from albert_serve.tasks import TASKS, prepare_request, shape_reply
from albert_serve.tasks.load import load_tasks
from albert_serve.tokenizer import AlbertTokenizer
from training.evaluation.real_text import DEFAULT_TEXT, RealData
from training.evaluation.samples import draw_samples
from training.evaluation.torch_engine import predict

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"
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


def test_ships_all_tasks_but_multiple_choice(bundle: Bundle) -> None:
    assert {*TASKS} - {"multiple-choice"} == {*load_tasks(bundle)}


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


@pytest.mark.process
def test_the_masked_accuracy_of_the_manifest_is_the_models(bundle: Bundle) -> None:
    """On the text of this repository that export measured it on; a draw has a few more or less."""
    stated = bundle.manifest.quality["fill-mask"]
    files = {file.name: file for file in (*DEFAULT_TEXT.parent.iterdir(), *DATA.iterdir())}
    data = RealData(text=tuple(files[name] for name in stated.data))
    tokenizer = AlbertTokenizer.from_file(bundle.tokenizer_file)
    tasks: dict[TaskName, TaskEntry] = {"fill-mask": bundle.manifest.tasks["fill-mask"]}
    config = AlbertConfig.from_hf(bundle.manifest.config)
    sample = draw_samples(config, tasks, tokenizer, data)["fill-mask"]
    predictions = predict(Engine.open(bundle), sample.items, max_tokens_at_once=4096)
    rights = [right for item in sample.items for right in item.rights or ()]
    assert len(predictions) == pytest.approx(stated.count, rel=0.05)
    assert sample.mark(predictions, rights) == pytest.approx(stated.bundle, abs=1.0)


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
