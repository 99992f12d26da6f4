"""Zero-shot classification, against the pipeline of transformers and Hugging Face's client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import transformers
from huggingface_hub import InferenceClient

from albert_serve.api.zero_shot import ZeroShotRequest
from albert_serve.bundle.manifest import HeadEntry
from albert_serve.client import AlbertClient
from albert_serve.errors import InvalidInputError, TextTooLongError, TooMuchAtOnceError
from albert_serve.tasks import TextClassification, prepare_request
from albert_serve.tasks.zero_shot import ZeroShot
from tests.albert_serve.server.test_service import assert_envelope
from tests.albert_serve.support import running_service, service_environment
from tests.export.exporting import export_bundle
from training.model.checkpoint import load_checkpoint, save_checkpoint

TEXTS = ["The home team won it in the ninth inning.", "It rained all day.", "A new film is out."]
LABELS = ["sport", "the weather", "cinema"]
TEMPLATE = "The topic is {}, I think."


def write_checkpoint(source: Path, folder: Path, labels: list[str]) -> None:
    torch.manual_seed(5)
    model = load_checkpoint(source, {"text-classification": len(labels)})
    weight = model.get_parameter("heads.text-classification.output.weight")
    torch.nn.init.normal_(weight)  # else all labels have nearly the same score
    names = {str(index): label for index, label in enumerate(labels)}
    config = {"id2label": names, "label2id": {label: int(id_) for id_, label in names.items()}}
    save_checkpoint(model, folder, tokenizer_from=source, extra_config=config)


@pytest.fixture(
    scope="module",
    params=[["contradiction", "neutral", "ENTAILMENT"], ["entail", "neutral", "contradict"]],
    ids=["last", "first"],
)
def checkpoint(
    request: pytest.FixtureRequest, checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("nli") / "checkpoint"
    write_checkpoint(checkpoint_dir, folder, request.param)
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    return export_bundle(checkpoint, checkpoint.parent / "nli").bundle.folder


@pytest.fixture(scope="module")
def albert(bundle: Path) -> Iterator[AlbertClient]:
    with AlbertClient.local(bundle, num_threads=1) as client:
        yield client


@pytest.mark.parametrize(
    "options",
    [{}, {"multi_label": True}, {"hypothesis_template": TEMPLATE}],
    ids=["one label", "several labels", "a template"],
)
def test_scores_are_those_of_transformers(
    albert: AlbertClient, checkpoint: Path, options: dict[str, Any]
) -> None:
    oracle: Any = transformers.pipeline("zero-shot-classification", str(checkpoint), device="cpu")
    oracle.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    for labels in (LABELS, LABELS[:1]):
        answers = albert.zero_shot_classification(TEXTS, labels, **options)
        for answer, expected in zip(answers, oracle(TEXTS, labels, **options), strict=True):
            assert [item.label for item in answer] == expected["labels"]
            assert [item.score for item in answer] == pytest.approx(expected["scores"], abs=1e-5)


def test_labels_in_one_text_are_split_at_its_commas(albert: AlbertClient) -> None:
    answers = albert.zero_shot_classification(TEXTS, "sport,the weather , cinema")
    assert answers == albert.zero_shot_classification(TEXTS, LABELS)
    streamed = albert.stream("zero-shot-classification", TEXTS, candidate_labels="sport,cinema")
    assert [len(answer) for answer in streamed] == [2, 2, 2]


def test_long_texts_are_refused_or_cut(albert: AlbertClient) -> None:
    with pytest.raises(TextTooLongError, match="set the parameter truncation to true"):
        albert.zero_shot_classification("run " * 300, LABELS)
    cut = albert.zero_shot_classification("run " * 300, LABELS, truncation=True)
    assert sum(item.score for item in cut) == pytest.approx(1)


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([], {}, "candidate_labels must hold at least one item"),
        (["a", " "], {}, r"candidate_labels\[1\] is empty"),
        (LABELS, {"hypothesis_template": "no place"}, "must contain {} once"),
        (LABELS, {"hypothesis_template": "{} or {}"}, "must contain {} once"),
    ],
)
def test_refusals(
    albert: AlbertClient, labels: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        albert.zero_shot_classification("a text", labels, **options)


def test_labels_are_counted_with_each_text_before_any_is_encoded() -> None:
    """A short body could ask for very many characters: each text is read with each label."""
    labels = [f"{number} {'long ' * 100}" for number in range(250)]
    parameters = {"candidate_labels": labels, "hypothesis_template": "a" * 900 + "{}"}
    request = ZeroShotRequest.model_validate({"inputs": ["a"] * 100, "parameters": parameters})
    per_text = sum(map(len, labels)) + 250 * 900
    message = f"would read {100 * (1 + per_text)} characters; at most 4194304 are read"
    with pytest.raises(TooMuchAtOnceError, match=message):
        prepare_request(NotImplemented, request, max_tokens=131_072)


@pytest.mark.parametrize(
    ("labels", "columns"),
    [
        (["neutral", "contradiction", "entailment"], (2, 1)),
        (["no", "maybe", "entailment"], (2, 0)),
        (["entailment", "maybe", "no"], (0, 2)),
    ],
)
def test_contradiction_is_the_label_of_that_name_or_at_the_other_end(
    labels: list[str], columns: tuple[int, int]
) -> None:
    entry = HeadEntry(graph="a.onnx", num_outputs=3, labels=labels)
    setup: Any = SimpleNamespace(heads={"text-classification": entry})
    task = ZeroShot.open({"text-classification": TextClassification(setup)})
    assert (task.entailment, task.contradiction) == columns


def test_a_model_without_entailment_has_no_such_task(client: httpx.Client) -> None:
    body = {"inputs": "a text", "parameters": {"candidate_labels": LABELS}}
    reply = client.post("/zero-shot-classification", json=body)
    assert_envelope(reply, 404, "not_found")
    assert "trained on MNLI" in reply.json()["error"]


@pytest.mark.process
def test_hugging_faces_client(checkpoint_dir: Path, tmp_path: Path) -> None:
    write_checkpoint(checkpoint_dir, tmp_path / "nli", ["no", "maybe", "entailment"])
    bundle = export_bundle(tmp_path / "nli", tmp_path / "bundle").bundle.folder
    environment = service_environment(bundle, tmp_path / "home")
    with running_service(environment, tmp_path) as service:
        url = f"{service.url}/zero-shot-classification"
        answers = InferenceClient(model=url).zero_shot_classification(
            TEXTS[0], LABELS, multi_label=True
        )
        with AlbertClient(service.url) as albert:
            expected = albert.zero_shot_classification(TEXTS[0], LABELS, multi_label=True)
    assert [(item.label, item.score) for item in answers] == [
        (item.label, item.score) for item in expected
    ]
