"""The card has the figures where the Hub and people look for them."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard

from albert_serve.bundle.manifest import FileEntry, HeadEntry, Manifest, Quality
from export.card import model_card
from tests.export.exporting import TINY


def manifest() -> Manifest:
    labels = ["a|b", "c"]
    entry = HeadEntry(
        graph="a.onnx",
        num_outputs=2,
        labels=labels,
        problem_type="multi_label_classification",
        quality=Quality(metric="accuracy", torch=71.2, bundle=70.8, count=277),
    )
    return Manifest(
        config=TINY.to_hf(),
        heads={"text-classification": entry},
        precision="int8",
        files={"model.safetensors": FileEntry(size=1, sha256="0" * 64)},
        evaluation={
            "text_classification_task": "RTE",
            "text_classification_accuracy": 0.71234567,
            "text_classification_texts": 277,
            "text_classification_classes": {"a|b": {"f1": 0.5}},
            "question_answering_f1": 88.5,
            "embeddings_spearman": 0.6254,
            "embeddings_mrr_at_10": 0.5,
        },
    )


def test_the_hub_reads_the_figures(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(model_card(manifest(), "rte"))
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.model_name == "rte"
    results = [
        (each.task_type, each.dataset_name, each.metric_type, each.metric_value)
        for each in card.data.eval_results
    ]
    assert results == [
        ("text-classification", "RTE", "accuracy", 0.7123),
        ("question-answering", "held-out data", "f1", 88.5),
        ("sentence-similarity", "held-out data", "spearman", 0.6254),
        ("sentence-similarity", "held-out data", "mrr_at_10", 0.5),
    ]


def test_requests_of_questions_have_the_figures() -> None:
    parameters = {"handle_impossible_answer": True, "max_answer_len": 30}
    evaluation = {
        "question_answering_parameters": parameters,
        "question_answering_best_f1_threshold": -1.25,
    }
    asked = manifest().model_copy(update={"evaluation": evaluation})
    lines = model_card(asked, "squad").splitlines()
    [line] = [line for line in lines if "The figures of question answering" in line]
    assert '`"parameters": {"handle_impossible_answer": true, "max_answer_len": 30}`' in line
    assert '`"null_score_diff_threshold": -1.25`' in line
    assert "The figures of question answering" not in model_card(manifest(), "rte")
