"""`head` of `/text-classification`: several classifiers of one model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from albert_serve.api.schemas import InfoReply
from albert_serve.bundle.manifest import Bundle
from albert_serve.cli import main
from tests.albert_serve.classifiers import LABELS, classifiers, export_classifiers
from tests.albert_serve.support import local_http

PATH = "/text-classification"


@pytest.fixture(scope="module")
def bundle(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("heads")
    return export_classifiers(classifiers(checkpoint_dir), checkpoint_dir, folder)


@pytest.fixture(scope="module")
def http(bundle: Bundle) -> Iterator[httpx.Client]:
    """The service's routes over the bundle, in this process."""
    with local_http(bundle.folder) as client:
        yield client


@pytest.mark.parametrize("path", [PATH, f"/v1/models/bundle{PATH}"])
@pytest.mark.parametrize("name", [*LABELS, None])
def test_each_head_answers_with_its_labels_and_the_default_one_where_none_is_named(
    http: httpx.Client, sentences: list[str], path: str, name: str | None
) -> None:
    body = {"inputs": sentences[:4], "parameters": {"head": name}}
    reply = http.post(path, json=body)
    assert reply.status_code == 200
    for scores in reply.json():
        assert {each["label"] for each in scores} == set(LABELS[name or "sentiment"])


def test_a_model_of_one_classifier_has_the_default_one(client: httpx.Client) -> None:
    body = {"inputs": "a", "parameters": {"head": "default"}}
    assert client.post(PATH, json=body).status_code == 200
    tasks = InfoReply.model_validate(client.get("/info").json()).tasks
    assert {task.heads for task in tasks} == {None}


def test_info_lists_the_heads(http: httpx.Client) -> None:
    info = InfoReply.model_validate(http.get("/info").json())
    heads = {task.name: task.heads for task in info.tasks}
    listed = heads.pop("text-classification")
    assert listed is not None
    assert {head.name: head.labels for head in listed} == LABELS
    assert listed[1].problem_type == "multi_label_classification"
    assert set(heads.values()) == {None}
    assert "topic (sport, politics, music)" in str(info)


def test_files_are_scored_by_a_head(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a film"}\n{"text": "a game"}\n')
    words = ["score", "--bundle", str(bundle.folder), "--threads", "1"]
    files = [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    every = ["--task", "text-classification", "--head", "topic", "--all-scores"]
    assert main([*words, *every, *files]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [{each["label"] for each in row["output"]} for row in rows] == [set(LABELS["topic"])] * 2
    capsys.readouterr()
    options = ["--task", "text-classification", "--head", "nobody", "--restart"]
    assert main([*words, *options, *files]) == 1
    assert "has no head 'nobody'; it has sentiment, rating, topic" in capsys.readouterr().err
    options = ["--task", "text-classification", "--head", "topic"]
    assert main([*words, *options, "--parameters", '{"head": "rating"}', *files]) == 1
    assert "--head is topic and --parameters has head 'rating'" in capsys.readouterr().err
