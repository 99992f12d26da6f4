"""`head` of `/text-classification`: several classifiers of one model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import onnxruntime as ort
import pytest
import torch

from albert_serve.api.schemas import InfoReply, LabelScore, TextClassificationParameters
from albert_serve.bundle.manifest import Bundle
from albert_serve.cli import main
from albert_serve.client import AlbertClient
from albert_serve.local import LocalTransport
from albert_serve.runtime.encoders import CpuEncoder, PaddedBatch
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks.base import Logits, Prepared
from albert_serve.tasks.load import load_tasks
from albert_serve.tokenizer import AlbertTokenizer
from tests.albert_serve.classifiers import LABELS, classifiers, export_classifiers, head_of
from training.model.albert import Batch
from training.model.heads import AlbertForTasks

PATH = "/text-classification"


@pytest.fixture(scope="module")
def model(checkpoint_dir: Path) -> AlbertForTasks:
    return classifiers(checkpoint_dir)


@pytest.fixture(scope="module")
def bundle(
    model: AlbertForTasks, checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    return export_classifiers(model, checkpoint_dir, tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def http(bundle: Bundle) -> Iterator[httpx.Client]:
    """The service's routes over the bundle, in this process."""
    transport = LocalTransport(bundle.folder, RuntimeOptions(device="cpu", num_threads=1))
    with httpx.Client(transport=transport, base_url="http://local") as client:
        yield client


def expected(model: AlbertForTasks, bundle: Bundle, text: str, name: str) -> dict[str, float]:
    """The scores of torch."""
    ids = AlbertTokenizer.from_file(bundle.tokenizer_file).encode(text).ids
    batch = Batch(ids=torch.tensor([ids]), types=torch.zeros(1, len(ids), dtype=torch.long))
    with torch.inference_mode():
        logits = model.logits(head_of(name), model(batch)[:, 0])[0]
    scores = logits if name == "rating" else logits.softmax(-1)
    return dict(zip(LABELS[name], scores.tolist(), strict=True))


def by_label(scores: list[Any]) -> dict[str, float]:
    pairs = (each if isinstance(each, dict) else each.model_dump() for each in scores)
    return {each["label"]: each["score"] for each in pairs}


@pytest.mark.parametrize("path", [PATH, f"/v1/models/bundle{PATH}"])
@pytest.mark.parametrize("name", LABELS)
def test_each_head_answers_with_its_labels(
    http: httpx.Client,
    model: AlbertForTasks,
    bundle: Bundle,
    sentences: list[str],
    path: str,
    name: str,
) -> None:
    body = {"inputs": sentences[:4], "parameters": {"head": name}}
    reply = http.post(path, json=body)
    assert reply.status_code == 200
    for text, scores in zip(sentences[:4], reply.json(), strict=True):
        assert by_label(scores) == pytest.approx(expected(model, bundle, text, name), abs=1e-4)


def test_the_default_one_answers_where_none_is_named(
    http: httpx.Client, model: AlbertForTasks, bundle: Bundle
) -> None:
    wanted = expected(model, bundle, "a film", "sentiment")
    for parameters in ({}, {"head": None}):
        body = {"inputs": "a film", "parameters": parameters}
        [scores] = http.post(PATH, json=body).json()
        assert by_label(scores) == pytest.approx(wanted, abs=1e-4)


def test_requests_of_all_heads_at_once_get_their_own_answers(
    model: AlbertForTasks, bundle: Bundle, sentences: list[str]
) -> None:
    asked = list(zip(sentences, [*LABELS] * 3, strict=False))
    with (
        AlbertClient.local(bundle.folder, device="cpu", num_threads=1) as client,
        ThreadPoolExecutor(len(asked)) as pool,
    ):
        answers = pool.map(lambda each: client.text_classification(each[0], head=each[1]), asked)
        for (text, name), scores in zip(asked, answers, strict=True):
            assert by_label(scores) == pytest.approx(expected(model, bundle, text, name), abs=1e-4)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"head": "nobody"}, "the model has no head 'nobody'; it has sentiment, rating, topic"),
        ({"head": "default"}, "the model has no head 'default'"),
        ({"head": ""}, "the model has no head ''"),
        ({"head": "topic", "patience": 1}, "this one answers after all of its"),
    ],
)
def test_a_head_that_is_none_is_refused(
    http: httpx.Client, parameters: dict[str, Any], message: str
) -> None:
    reply = http.post(PATH, json={"inputs": "a", "parameters": parameters})
    assert reply.status_code == 422
    assert message in reply.json()["error"]


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
    assert listed[1].problem_type == "regression"
    assert set(heads.values()) == {None}
    assert "topic (sport, politics, music)" in str(info)


def test_a_batch_of_all_heads_is_one_call_of_the_encoder(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.open(bundle, RuntimeOptions(device="cpu", num_threads=1))
    task = load_tasks(bundle)["text-classification"]
    prepared: list[Prepared[list[LabelScore]]] = [
        task.prepare("a film", TextClassificationParameters(head=name)) for name in LABELS
    ]
    calls: list[int] = []
    run = CpuEncoder.run

    def counted(encoder: CpuEncoder, batch: PaddedBatch) -> ort.OrtValue:
        calls.append(len(batch.ids))
        return run(encoder, batch)

    monkeypatch.setattr(CpuEncoder, "run", counted)
    logits: list[Logits] = engine.run([item.inputs[0] for item in prepared])
    assert calls == [3]
    answers = [item.finish([each]) for item, each in zip(prepared, logits, strict=True)]
    assert [
        {score.label for score in answer} for answer in answers if isinstance(answer, list)
    ] == [set(labels) for labels in LABELS.values()]


def test_files_are_scored_by_a_head(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a film"}\n{"text": "a game"}\n')
    words = ["score", "--bundle", str(bundle.folder), "--threads", "1"]
    files = [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    assert main([*words, "--task", "text-classification", "--head", "topic", *files]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [{each["label"] for each in row["output"]} for row in rows] == [set(LABELS["topic"])] * 2
    capsys.readouterr()
    assert main([*words, "--task", "fill-mask", "--head", "topic", *files]) == 1
    assert "--head is of text-classification, not of fill-mask" in capsys.readouterr().err
    options = ["--task", "text-classification", "--head", "nobody", "--restart"]
    assert main([*words, *options, *files]) == 1
    assert "has no head 'nobody'; it has sentiment, rating, topic" in capsys.readouterr().err
    options = ["--task", "text-classification", "--head", "topic"]
    assert main([*words, *options, "--parameters", '{"head": "rating"}', *files]) == 1
    assert "--head is topic and --parameters has head 'rating'" in capsys.readouterr().err
    again = [*options, "--parameters", '{"head": "topic"}', "--restart"]
    assert main([*words, *again, *files]) == 0


def test_the_description_of_a_bundle_has_all_heads(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(bundle.folder)]) == 0
    shown = capsys.readouterr().out
    assert "text-classification/topic" in shown
    assert "sport, politics, music" in shown
