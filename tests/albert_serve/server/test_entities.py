"""`/token-classification` over HTTP: Hugging Face's client, ours, BentoML's method, batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient

from albert_serve.api.schemas import ClassifiedToken, EntityGroup
from albert_serve.cli import main
from albert_serve.client import AlbertClient
from tests.albert_serve.conftest import TOKEN_LABELS
from tests.albert_serve.support import Running

TASK = "token-classification"
TEXT = "Anna Berg lives in Vienna. She came in 1932."


def post(service: Running, inputs: Any, **parameters: Any) -> httpx.Response:
    body = {"inputs": inputs, "parameters": parameters}
    return httpx.post(f"{service.url}/{TASK}", json=body, timeout=30)


def test_hugging_faces_client_gets_entities_and_tokens(token_service: Running) -> None:
    client = InferenceClient(f"{token_service.url}/{TASK}")
    for strategy in ("none", "simple", "first", "average", "max"):
        got = client.token_classification(TEXT, aggregation_strategy=strategy, stride=4)
        expected = post(token_service, TEXT, aggregation_strategy=strategy).json()
        assert got, strategy
        for one, other in zip(got, expected, strict=True):
            assert {name: one[name] for name in other} == pytest.approx(other, abs=1e-5)
    labels = {
        str(one.entity) for one in client.token_classification(TEXT, aggregation_strategy="none")
    }
    without = client.token_classification(
        TEXT, aggregation_strategy="none", ignore_labels=[*labels]
    )
    assert labels.isdisjoint(one.entity for one in without)


def test_our_client_and_a_list_have_one_answer_a_text(token_service: Running) -> None:
    with AlbertClient(token_service.url) as albert:
        one, two = albert.token_classification([TEXT, "a film"], ignore_labels=[])
        tokens = albert.token_classification(TEXT, aggregation_strategy="none")
        info = albert.info()
    assert all(isinstance(each, EntityGroup) for each in [*one, *two])
    assert all(isinstance(each, ClassifiedToken) for each in tokens)
    assert info.tasks[0].labels == TOKEN_LABELS


@pytest.mark.parametrize(
    ("inputs", "parameters", "message"),
    [
        (" ", {}, "text is empty"),
        (TEXT, {"aggregation_strategy": "best"}, "must be 'none', 'simple', 'first'"),
        (TEXT, {"stride": 100}, "stride is 100; windows of 126 tokens share at most 63"),
        ([TEXT, 3], {}, r"inputs[1] must be a valid string"),
    ],
)
def test_bad_input_is_refused(
    token_service: Running, inputs: Any, parameters: Any, message: str
) -> None:
    reply = post(token_service, inputs, **parameters)
    assert reply.status_code == 422
    assert message in reply.json()["error"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_batch_has_a_list_of_entities_a_row(
    token_bundle: Path, tmp_path: Path, suffix: str
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / f"out.{suffix}"
    source.write_text(f"{json.dumps({'text': TEXT})}\n")
    command = ["score", "--task", TASK, "--bundle", str(token_bundle)]
    assert main([*command, "--parameters", '{"ignore_labels": []}', str(source), str(target)]) == 0
    if suffix == "parquet":
        pq = pytest.importorskip("pyarrow.parquet")
        [entities] = pq.read_table(target)["entities"].to_pylist()
    else:
        entities = json.loads(target.read_text())["output"]
    assert [TEXT[one["start"] : one["end"]] for one in entities] == [
        one["word"] for one in entities
    ]
