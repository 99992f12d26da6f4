"""Zero-shot classification: the pipeline of `transformers`, Hugging Face's client, and limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from huggingface_hub import InferenceClient

from albert_serve.api.zero_shot import ZeroShotParameters, ZeroShotRequest
from albert_serve.bundle.manifest import HeadEntry
from albert_serve.client import AlbertClient
from albert_serve.errors import InvalidInputError, TooMuchAtOnceError
from albert_serve.tasks import TaskSetup, TextClassification, prepare_request
from albert_serve.tasks.zero_shot import ZeroShot
from tests.albert_serve.server.conftest import assert_envelope, post
from tests.albert_serve.support import local_client
from tests.export.exporting import export_bundle
from training.model.checkpoint import load_checkpoint, save_checkpoint

TEXTS = ["The home team won it in the ninth inning.", "It rained all day.", "A new film is out."]
LABELS = ["sport", "the weather", "cinema"]
TEMPLATE = "The topic is {}, I think."


@pytest.fixture(
    scope="module",
    params=[["other", "neutral", "ENTAILMENT"], ["entail", "neutral", "other"]],
    ids=["entailment last", "entailment first"],
)
def checkpoint(
    request: pytest.FixtureRequest, checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint with a classifier for natural language inference.

    No label is a contradiction, so the label at the other end is regarded as one.
    """
    torch.manual_seed(5)
    model = load_checkpoint(checkpoint_dir, {"text-classification": len(request.param)})
    weight = model.get_parameter("heads.text-classification.output.weight")
    torch.nn.init.normal_(weight)  # otherwise, all labels have nearly the same score
    folder = tmp_path_factory.mktemp("nli") / "checkpoint"
    labels = {
        "id2label": {str(index): label for index, label in enumerate(request.param)},
        "label2id": {label: index for index, label in enumerate(request.param)},
    }
    save_checkpoint(model, folder, tokenizer_from=checkpoint_dir, extra_config=labels)
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    return export_bundle(checkpoint, checkpoint.parent / "nli").bundle.folder


@pytest.fixture(scope="module")
def albert(bundle: Path) -> Iterator[AlbertClient]:
    with AlbertClient.local(bundle, num_threads=1) as client:
        yield client


def test_scores_equal_those_of_transformers(albert: AlbertClient, checkpoint: Path) -> None:
    """Candidate labels can be a text with commas."""
    oracle: Any = transformers.pipeline("zero-shot-classification", str(checkpoint), device="cpu")
    oracle.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    cases: list[dict[str, Any]] = [{}, {"multi_label": True}, {"hypothesis_template": TEMPLATE}]
    for options, labels in itertools.product(cases, (LABELS, LABELS[:1], ", ".join(LABELS))):
        answers = albert.zero_shot_classification(TEXTS, labels, **options)
        for answer, expected in zip(answers, oracle(TEXTS, labels, **options), strict=True):
            assert [item.label for item in answer] == expected["labels"]
            assert [item.score for item in answer] == pytest.approx(expected["scores"], abs=1e-5)


def test_invalid_labels_and_templates_and_long_texts_are_rejected(albert: AlbertClient) -> None:
    cases: list[tuple[str, list[str], dict[str, Any], str]] = [
        ("a", ["a", " "], {}, r"candidate_labels\[1\] is empty"),
        ("a", ["a"] * 257, {}, "257 items; at most 256"),
        ("a", LABELS, {"hypothesis_template": "{} or {}"}, "Write {} exactly once"),
        ("a", LABELS, {"hypothesis_template": "a" * 999 + "{}"}, "1001 characters; at most 1000"),
        ("run " * 124, LABELS, {}, r"the text with candidate_labels\[0\]: .* truncation"),
    ]
    for text, labels, options, message in cases:
        with pytest.raises(InvalidInputError, match=message):
            albert.zero_shot_classification(text, labels, **options)
    assert albert.zero_shot_classification("run " * 124, LABELS, truncation=True)


def test_the_limit_counts_the_characters_of_each_label_once_for_each_text() -> None:
    """The model reads each text with each label, so a short body could cause much work."""
    labels = [f"{number} {'long ' * 100}" for number in range(256)]
    parameters = {"candidate_labels": labels, "hypothesis_template": "a" * 998 + "{}"}
    request = ZeroShotRequest.model_validate({"inputs": ["a"] * 100, "parameters": parameters})
    num_chars = 100 * (1 + sum(map(len, labels)) + 256 * 998)
    with pytest.raises(TooMuchAtOnceError, match=f"{num_chars} characters"):
        prepare_request(NotImplemented, request, max_tokens=131_072)


def test_contradiction_is_found_by_its_name_at_any_position(task_setup: TaskSetup) -> None:
    """The memory of an answer counts 500 bytes for each label."""
    labels = ["neutral", "Contradiction", "entailment"]
    entry = HeadEntry(graph="a.onnx", num_outputs=3, labels=labels)
    setup = replace(task_setup, heads={"text-classification": entry})
    task = ZeroShot.open({"text-classification": TextClassification(setup)})
    assert (task.entailment, task.contradiction) == (2, 1)
    parameters = ZeroShotParameters(candidate_labels=LABELS)
    assert task.prepare("a", parameters).answer_bytes == 3 * 500


def test_a_model_without_an_entailment_label_does_not_have_the_task(local: httpx.Client) -> None:
    reply = post(local, "zero-shot-classification", "a text", candidate_labels=LABELS)
    assert "MNLI" in assert_envelope(reply, 404, "not_found")


def test_hugging_faces_client_gets_our_scores(
    bundle: Path, albert: AlbertClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_client(bundle) as http:

        def send(_client: InferenceClient, request: Any) -> bytes:
            return http.post(request.url, json=request.json).content

        monkeypatch.setattr(InferenceClient, "_inner_post", send)
        caller = InferenceClient(model="http://local/zero-shot-classification")
        answers = caller.zero_shot_classification(TEXTS[0], LABELS, multi_label=True)
        too_many = post(http, "zero-shot-classification", ["a"] * 1025, candidate_labels=LABELS)
        assert_envelope(too_many, 422, "too_much_at_once")
    expected = albert.zero_shot_classification(TEXTS[0], LABELS, multi_label=True)
    for answer, item in zip(answers, expected, strict=True):
        assert answer.label == item.label
        assert answer.score == pytest.approx(item.score, abs=1e-5)
