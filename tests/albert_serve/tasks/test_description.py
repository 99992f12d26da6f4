"""The description of a model: metadata of its README.md, figures and stages of its manifest."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from albert_serve.api.model_card import ModelCard
from albert_serve.bundle.manifest import Bundle, Manifest, Quality
from albert_serve.tasks.description import describe, read_metadata, read_quality
from albert_serve.tasks.text_length import text_length
from training.model.checkpoint import load_checkpoint


def manifest_with(**values: Any) -> Manifest:
    return Manifest.model_validate({"config": {}, "heads": {}, "files": {}, **values})


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
        pytest.param("---\nlicense: [\n---\n", {}, id="no YAML"),
        pytest.param("---\n- license\n---\n", {}, id="a list"),
        pytest.param(f"---\nx: {'[' * 5000}\n---\n", {}, id="nested too deep"),
        pytest.param(f"---\nlicense: mit\nx: {'y' * 70_000}\n---\n", {}, id="long"),
        pytest.param(
            f"---\nlicense: mit\n---\n{'y' * 70_000}\n",
            {"license": "mit"},
            id="long text",
        ),
        pytest.param("---\nlicense: {a: b}\n---\n", {}, id="no text"),
    ],
)
def test_metadata_stands_at_the_beginning_of_the_card(
    card: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_bytes(card.encode())
    assert {name: value for name, value in read_metadata(tmp_path).items() if value} == expected


def test_a_card_that_cannot_be_read_has_no_metadata(tmp_path: Path) -> None:
    assert read_metadata(tmp_path) == {}
    (tmp_path / "README.md").write_bytes(b"---\nlicense: \xff\n---\n")
    assert read_metadata(tmp_path) == {}
    (tmp_path / "README.md").unlink()
    os.mkfifo(tmp_path / "README.md")
    assert read_metadata(tmp_path) == {}


def card_of(bundle: Bundle, **values: Any) -> ModelCard:
    card = describe(bundle.manifest.model_copy(update=values), "tiny").card
    assert card is not None
    return card


def test_figures_are_the_numbers_of_the_evaluation(bundle_dir: Path) -> None:
    evaluation: dict[str, Any] = {
        "accuracy": 0.5,
        "texts": 7,
        "classes": {"a": 1},
        "official": True,
        "loss": float("nan"),
        "huge": 10**400,
    }
    card = card_of(Bundle.open(bundle_dir), evaluation=evaluation)
    assert card.evaluation == {"accuracy": 0.5, "texts": 7.0}


def quality(metric: str) -> Quality:
    return Quality(metric=metric, torch=60.0, bundle=59.5, count=300)


TEXTS = {"text_classification_texts": 7, "text_classification_loss": 0.1}


def of_texts(figures: Any) -> dict[str, float]:
    return TEXTS | {f"text_classification_{name}": value for name, value in figures.items()}


@pytest.mark.parametrize(
    ("task", "evaluation", "expected"),
    [
        (
            "question-answering",
            {"question_answering_f1": 29.0, "question_answering_questions": 50},
            ("F1", 29, 50),
        ),
        *(
            ("text-classification", of_texts(figures), expected)
            for figures, expected in [
                ({"micro_f1": 0.5, "macro_f1": 0.4, "subset_accuracy": 0.3}, ("micro-F1", 50, 7)),
                ({"pearson": -0.25, "spearman": 0.8, "mse": 1.5}, ("Pearson", -25, 7)),
                ({"spearman": 0.75, "mse": 1.5}, ("Spearman", 75, 7)),
                (
                    {"accuracy": 0.8, "macro_f1": 0.7, "matthews_correlation": 0.5},
                    ("Matthews correlation", 50, 7),
                ),
                ({"f1": 0.9, "accuracy": 0.8}, ("accuracy", 80, 7)),
                ({"pearson": math.nan, "spearman": None}, None),
                ({"pearson": 10**400, "spearman": True}, None),
            ]
        ),
        ("fill-mask", {}, None),
        ("fill-mask", {"masked_accuracy": 0.3}, None),
        ("fill-mask", {"masked_accuracy": "0.3", "masked_tokens": 5}, None),
        ("fill-mask", {"masked_accuracy": None, "masked_tokens": [5]}, None),
    ],
)
def test_a_task_has_the_figure_of_its_kind(
    task: str, evaluation: dict[str, Any], expected: tuple[str, float, int] | None
) -> None:
    figure = read_quality(manifest_with(evaluation=evaluation), task)
    assert (figure and (figure.metric, figure.percent, figure.count)) == expected


def test_parameters_are_counted_as_torch_counts_them(
    bundle_dir: Path, checkpoint_dir: Path
) -> None:
    bundle = Bundle.open(bundle_dir)
    heads = {head: entry.num_outputs for head, entry in bundle.manifest.heads.items()}
    model: torch.nn.Module = load_checkpoint(checkpoint_dir, heads)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert card_of(bundle).sizes.num_parameters == counted


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
    """Without one, all positions."""
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
