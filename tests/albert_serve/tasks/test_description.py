"""The description of a model: metadata of its README.md, metrics and stages of its manifest."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from albert_serve.api.model_card import ModelCard, metric_name
from albert_serve.bundle.manifest import Bundle, Manifest
from albert_serve.tasks.description import describe, read_metadata, read_quality
from albert_serve.tasks.text_length import text_length
from training.model.checkpoint import load_checkpoint


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        pytest.param(
            "---\nlicense: mit\nlanguage: [en, no]\nbase_model: a/b\n---\n# Title\n",
            {"license": "mit", "language": ["en", "no"], "base_model": ["a/b"]},
            id="the Hub's fields",
        ),
        pytest.param("---\r\nlanguage: no\r\n---\r\n", {"language": ["no"]}, id="Norwegian, CRLF"),
        pytest.param("# Title\n\nlicense: mit\n", {}, id="no metadata"),
        pytest.param("---\nlicense: [\n---\n", {}, id="not YAML"),
        pytest.param("---\n- license\n---\n", {}, id="a list"),
        pytest.param(f"---\nx: {'[' * 1500}\n---\n", {}, id="nested too deep"),
        pytest.param(f"---\nlicense: mit\nx: {'y' * 65_520}\n---\n", {"license": "mit"}, id="64 K"),
        pytest.param(f"---\nlicense: mit\nx: {'y' * 65_530}\n---\n", {}, id="more than 64 K"),
        pytest.param(f"---\nlicense: mit\n---\n{'y' * 70_000}", {"license": "mit"}, id="long text"),
        pytest.param(f"---\nlicense: mit\n---\n{'y' * (1 << 20)}", {}, id="more than 1 MiB"),
        pytest.param("---\nlicense: {a: b}\n---\n", {}, id="not a text"),
        pytest.param("---\nlicense: \udcff\n---\n", {}, id="not UTF-8"),
    ],
)
def test_metadata_is_read_from_the_beginning_of_the_card(
    card: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_bytes(card.encode(errors="surrogateescape"))
    assert {name: value for name, value in read_metadata(tmp_path).items() if value} == expected


def test_a_card_that_is_not_a_file_has_no_metadata(tmp_path: Path) -> None:
    assert read_metadata(tmp_path) == {}
    os.mkfifo(tmp_path / "README.md")
    assert read_metadata(tmp_path) == {}


def card_of(bundle: Bundle, **values: Any) -> ModelCard:
    card = describe(bundle.manifest.model_copy(update=values), "tiny").card
    assert card is not None
    return card


def test_the_card_has_the_parameters_of_torch_and_the_numbers_of_the_evaluation(
    bundle_dir: Path, checkpoint_dir: Path
) -> None:
    bundle = Bundle.open(bundle_dir)
    heads = {head: entry.num_outputs for head, entry in bundle.manifest.heads.items()}
    model: torch.nn.Module = load_checkpoint(checkpoint_dir, heads)
    evaluation: dict[str, Any] = {
        "accuracy": 0.5,
        "texts": 7,
        "classes": {"a": 1},
        "official": True,
        "loss": float("nan"),
        "huge": 10**400,
    }
    card = card_of(bundle, evaluation=evaluation)
    assert card.evaluation == {"accuracy": 0.5, "texts": 7.0}
    assert card.sizes.num_parameters == sum(weight.numel() for weight in model.parameters())
    assert card.sizes.num_layers == 3


TEXTS = {"texts": 7, "loss": 0.1}


@pytest.mark.parametrize(
    ("task", "metrics", "expected"),
    [
        ("question-answering", {"f1": 29.0, "questions": 50}, ("F1", 29, 50)),
        ("fill-mask", {"accuracy": 0.3, "tokens": 5}, None),
        ("sentence-order", {"accuracy": 0.3, "pairs": 5}, ("accuracy", 30, 5)),
        (
            "text-classification",
            TEXTS | {"micro_f1": 0.5, "macro_f1": 0.4, "subset_accuracy": 0.3},
            ("micro-F1", 50, 7),
        ),
        (
            "text-classification",
            TEXTS | {"pearson": -0.25, "spearman": 0.8, "mse": 1.5},
            ("Pearson", -25, 7),
        ),
        ("text-classification", TEXTS | {"spearman": 0.75, "mse": 1.5}, ("Spearman", 75, 7)),
        (
            "text-classification",
            TEXTS | {"accuracy": 0.8, "macro_f1": 0.7, "matthews_correlation": 0.5},
            ("Matthews correlation", 50, 7),
        ),
        ("text-classification", TEXTS | {"f1": 0.9, "accuracy": 0.8}, ("accuracy", 80, 7)),
        ("text-classification", TEXTS | {"pearson": math.nan, "spearman": None}, None),
        ("text-classification", TEXTS | {"pearson": 10**400, "spearman": True}, None),
        ("text-classification", {"accuracy": 0.8}, None),
        ("text-classification", {"accuracy": 0.8, "texts": [5]}, None),
    ],
)
def test_a_task_shows_the_main_metric_of_its_kind(
    task: str, metrics: dict[str, Any], expected: tuple[str, float, int] | None
) -> None:
    prefix = task.replace("-", "_")
    evaluation = {f"{prefix}_{name}": value for name, value in metrics.items()}
    manifest = Manifest.model_validate(
        {"config": {}, "heads": {}, "files": {}, "evaluation": evaluation}
    )
    quality = read_quality(manifest, task)
    assert (quality and (quality.metric, quality.percent, quality.count)) == expected


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (
            "single_sentence_order_paired_accuracy",
            "sentence-order: accuracy when both orders are compared, single sentences",
        ),
        ("text_classification/topic_macro_f1", "text-classification/topic: macro F1"),
        ("masked_accuracy", "fill-mask: accuracy"),
        ("other_mse", "other MSE"),
    ],
)
def test_metrics_have_names_for_people(key: str, name: str) -> None:
    heads = ["text-classification/topic", "text-classification", "fill-mask"]
    assert metric_name(key, heads) == name


@pytest.mark.parametrize(
    ("head", "length"),
    [
        ("text-classification", 128),
        ("text-classification/topic", 96),
        ("feature-extraction", 64),
        ("multiple-choice", 512),
        ("fill-mask", 512),
    ],
)
def test_texts_have_the_length_of_the_last_training(head: str, length: int) -> None:
    """Without training, a text may have all positions."""
    settings = {"length": "64", "embeddings": ["pairs.csv"]}
    stages: list[object] = [
        {"tasks": ["text-classification"], "settings": settings},
        {"tasks": ["text-classification/topic"], "settings": {"length": 96}},
        "nothing",
        {"tasks": ["text-classification", "fill-mask"], "settings": {"length": "128"}},
        {"tasks": ["text-classification"], "settings": {"length": "none"}},
    ]
    assert text_length(head, {"stages": stages}, 512) == length
    assert text_length(head, {"stages": stages}, 48) == 48
    assert text_length(head, None, 512) == 512
