"""Runs train, validate and evaluate tasks of GLUE and RACE, users' texts, and entities."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from albert_serve.tasks.token_classification.entities import OUTSIDE, Span, find_spans
from tests.training.support import (
    RACE,
    SQUAD,
    best_step,
    evaluate_checkpoint,
    read_validations,
    run_command,
    write,
)
from training.commands import evaluate
from training.commands.finetune import main
from training.model.checkpoint import read_config
from training.model.heads import Task
from training.tasks.token_classification.metrics import entity_metrics

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)

PAIRS = ("the game was good", "a city was great", "his music died", "her work was lost")


def check_metrics(folder: Path, task: Task, names: Sequence[str], *options: str) -> dict[str, Any]:
    """Check that the best checkpoint has the metrics of its validation, and return them.

    The first metric selects the best checkpoint.
    """
    best, by_step = best_step(folder), read_validations(folder, task, names[0])
    assert best == min(step for step in by_step if by_step[step] == max(by_step.values()))
    metrics = evaluate_checkpoint(folder / "best", *options)
    for name in names:
        expected = pytest.approx(read_validations(folder, task, name)[best], abs=1e-4)
        assert metrics[f"{task.replace('-', '_')}_{name}"] == expected
    return metrics


def test_evaluate_confirms_the_best_validation_of_a_glue_task(
    short_finetune_options: list[str], tmp_path: Path
) -> None:
    """The official metric selects the best checkpoint. `evaluate` pads texts instead of packing."""
    data, folder = tmp_path / "cola", tmp_path / "run"
    rows = [f"x\t1\t\t{text}" for text in PAIRS]
    rows += [f"x\t0\t*\t{' '.join(reversed(text.split()))}" for text in PAIRS]
    for name in ("train.tsv", "dev.tsv"):
        write(data / name, "\n".join([*rows, ""]))
    options = ["--task", "cola", "--data", str(data)]
    assert run([*short_finetune_options, "--keep", "1", *options], folder) == 0
    assert list(read_validations(folder, "text-classification", "loss")) == [0, 2, 4, 6]
    (data / "test.tsv").write_text("index\tsentence\n0\tthe game was good\n1\t\n2\tgood\n")
    options += ["--predictions", str(data / "CoLA.tsv")]
    names = ["matthews_correlation", "loss"]
    metrics = check_metrics(folder, "text-classification", names, *options)
    assert "text_classification_combined_score" not in metrics  # the task has one official metric
    config = read_config(folder / "best")
    assert list(config["id2label"].values()) == ["unacceptable", "acceptable"]
    # Predictions are for the test file, including its empty text.
    header, *lines = (data / "CoLA.tsv").read_text().splitlines()
    assert header == "index\tprediction"
    assert [line.split("\t")[0] for line in lines] == ["0", "1", "2"]
    assert {line.split("\t")[1] for line in lines} <= {"0", "1"}


def test_evaluate_confirms_the_best_validation_of_multiple_choice(
    short_finetune_options: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    options = ["--batch-size", "6", "--task", "RACE", "--data", str(RACE)]
    assert run([*short_finetune_options, *options], folder) == 0
    assert list(read_validations(folder, "multiple-choice", "loss")) == [2, 4, 6]
    data = ("--task", "race", "--data", str(RACE))
    metrics = check_metrics(folder, "multiple-choice", ["accuracy", "loss"], *data)
    assert metrics["multiple_choice_task"] == "RACE"
    config = read_config(folder / "best")
    assert "AlbertForMultipleChoice" in config["architectures"]
    assert "id2label" not in config


def test_evaluate_confirms_the_best_validation_of_question_answering(
    short_finetune_options: list[str], tmp_path: Path
) -> None:
    data = ("--question-answering", str(SQUAD))
    options = [*short_finetune_options, *data, "--validation", str(SQUAD), "--validate-every", "2"]
    assert run(options, tmp_path / "f1") == 0
    assert list(read_validations(tmp_path / "f1", "question-answering", "f1")) == [2, 4, 6]
    check_metrics(tmp_path / "f1", "question-answering", ["f1"], *data)
    # The loss is of windows, not of the service's answers.
    assert run([*options, "--metric", "loss"], tmp_path / "loss") == 0
    losses = read_validations(tmp_path / "loss", "question-answering", "loss")
    assert losses[best_step(tmp_path / "loss")] == min(losses.values())


GLAD, SAD = ("good", "great", "beautiful", "first"), ("died", "lost", "war", "not")
THINGS = ("game", "city", "music", "work", "school")


def rows() -> Iterator[tuple[str, list[str]]]:
    """Yield texts and their labels: glad, sad, both or neither."""
    for thing in THINGS:
        for glad, sad in zip(GLAD, SAD, strict=True):
            yield f"the {thing} was {glad}", ["glad"]
            yield f"the {thing} was {sad}", ["sad"]
            yield f"the {thing} was {glad} and {sad}", ["glad", "sad"]
            yield f"the {thing} was", []


def test_a_run_learns_several_labels_per_text_and_scores(
    short_finetune_options: list[str], tmp_path: Path, capsys: Capture
) -> None:
    """The score of a text is 10 if it is only glad, -10 if it is only sad, otherwise 0."""
    moods, scores, folder = tmp_path / "moods", tmp_path / "scores.csv", tmp_path / "run"
    multi_label = "multi_label_classification"
    lines = [json.dumps({"text": text, "label": labels}) for text, labels in rows()]
    for name in ("train.jsonl", "dev.jsonl"):
        write(moods / name, "\n".join(lines))
    lines = [f"{text},{10.0 * (('glad' in names) - ('sad' in names))}" for text, names in rows()]
    scores.write_text("\n".join(["text,label", *lines]))
    data = ["--text-classification", str(moods)]
    head = ["--head", "score", "--text-classification", str(scores)]
    options = [*short_finetune_options, *data, "--problem-type", multi_label, *head]
    options += ["--problem-type", "regression", "--labels", "gladness", "--validation", str(scores)]
    options += ["--batch-size", "16", "--steps", "80", "--lr", "5e-3", "--validate-every", "40"]
    assert run(options, folder) == 0
    assert f"Validation uses {moods / 'dev.jsonl'}.\n" in capsys.readouterr().out
    config = read_config(folder / "best")
    assert config["problem_type"] == multi_label
    assert config["id2label"] == {"0": "glad", "1": "sad"}
    assert config["albert_heads"]["score"]["problem_type"] == "regression"
    assert config["albert_heads"]["score"]["id2label"] == {"0": "gladness"}
    metrics, step = evaluate_checkpoint(folder / "best", *data, *head), best_step(folder)
    for suffix, metric in (("", "micro_f1"), ("/score", "pearson")):
        measured = read_validations(folder, f"text-classification{suffix}", metric)[step]
        assert metrics[f"text_classification{suffix}_{metric}"] == pytest.approx(measured, abs=1e-3)
        assert measured > 0.6
    loss = metrics["text_classification/score_loss"]
    assert loss == pytest.approx(metrics["text_classification/score_mse"])


def test_evaluate_truncates_texts_to_the_length_of_training(
    short_finetune_options: list[str], tmp_path: Path, capsys: Capture
) -> None:
    lines = [
        f"the {thing} was {mood}{' and so on' * (n % 2 * 9)},{mood}"
        for n, (thing, mood) in enumerate(product(THINGS, ("good", "lost")))
    ]
    texts = write(tmp_path / "texts.csv", "\n".join(["text,label", *lines]))
    data = ["--text-classification", str(texts), "--validation", str(texts)]
    assert run([*short_finetune_options, *data, "--length", "16"], tmp_path / "run") == 0
    truncated = "of {} texts were truncated to 16 tokens (--no-truncation makes them errors)"
    assert f"\n10 {truncated.format(20)}\n" in capsys.readouterr().out
    metrics = evaluate_checkpoint(tmp_path / "run/best", *data[:2])
    assert capsys.readouterr().out.splitlines()[-1] == f"5 {truncated.format(10)}"
    losses = read_validations(tmp_path / "run", "text-classification", "loss")
    assert metrics["text_classification_loss"] == pytest.approx(losses[best_step(tmp_path / "run")])
    assert evaluate.main([str(tmp_path / "run/best"), *data[:2], "--no-truncation"]) == 1
    assert "texts.csv, line 3: The text has more than 16 tokens" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 64 sentences, each with a person and a place."""
    people = ("his father", "her king", "a son", "the man")
    places = ("school", "city", "river", "war")
    lines = []
    for person, place, verb, number in product(people, places, ("came", "was"), "12"):
        first, second = person.split()
        lines += [f"{first} B-PER", f"{second} I-PER", f"{verb} O", "in O", f"{place} B-LOC"]
        lines += [f"{number} O", ""]
    return write(tmp_path_factory.mktemp("tagged") / "train.conll", "\n".join(lines))


@pytest.fixture
def options(short_finetune_options: list[str], tagged: Path) -> list[str]:
    size = ("--batch-size", "16", "--steps", "60", "--validate-every", "20")
    return [*short_finetune_options, "--token-classification", str(tagged), *size]


def test_a_run_learns_entities_and_f1_selects_the_best_checkpoint(
    options: list[str], tmp_path: Path, tagged: Path
) -> None:
    """`evaluate` confirms the validation; `transformers` reads the head and its labels."""
    assert run([*options, "--validation", str(tagged)], tmp_path / "run") == 0
    f1 = read_validations(tmp_path / "run", "token-classification", "f1/PER")
    assert list(f1) == [20, 40, 60]
    assert f1[best_step(tmp_path / "run")] > 0.9
    data = ("--token-classification", str(tagged), "--device", "cpu")
    metrics = check_metrics(tmp_path / "run", "token-classification", ["f1"], *data)
    assert metrics["token_classification_f1"] > 0.9
    assert metrics["token_classification_classes"]["LOC"]["entities"] == 64
    model = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "run/best")
    assert list(model.config.id2label.values()) == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]


def test_evaluation_of_words_has_the_metrics_of_seqeval(options: list[str], tmp_path: Path) -> None:
    """The label of a word's first piece counts, as in `transformers`, despite inner punctuation."""
    seqeval = pytest.importorskip("seqeval.metrics")
    assert run([*options, "--steps", "12"], tmp_path / "run") == 0
    folder, generator = tmp_path / "run" / "checkpoint", np.random.default_rng(0)
    words = ["his", "father", "king", "U.K.", "D'Arcy", "in", "Clacton-on-Sea", "(", ")", "city."]
    sentences = [generator.choice(words, 7).tolist() for _ in range(60)]
    tags = [OUTSIDE, OUTSIDE, "B-PER", "I-PER", "B-LOC"]
    labels = [generator.choice(tags, 7).tolist() for _ in sentences]
    blocks = [
        "\n".join(map(" ".join, zip(sentence, sentence_labels, strict=True)))
        for sentence, sentence_labels in zip(sentences, labels, strict=True)
    ]
    file = write(tmp_path / "dev.conll", "\n\n".join(blocks))
    model: Any = transformers.AutoModelForTokenClassification.from_pretrained(folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    predictions = []
    for sentence in sentences:
        encoding = tokenizer(sentence, is_split_into_words=True, return_tensors="pt")
        best = model(**encoding).logits[0].argmax(-1).tolist()
        word_ids = encoding.word_ids()
        label_ids = [best[word_ids.index(word)] for word in range(len(sentence))]
        predictions.append([model.config.id2label[label] for label in label_ids])
    metrics = evaluate_checkpoint(folder, "--token-classification", str(file), "--device", "cpu")
    for name in ("precision", "recall", "f1"):
        expected = getattr(seqeval, f"{name}_score")(labels, predictions)
        assert 0 < expected == pytest.approx(metrics[f"token_classification_{name}"])


def test_metrics_of_entities_are_those_of_seqeval() -> None:
    seqeval = pytest.importorskip("seqeval.metrics")
    tags = [OUTSIDE, "B-PER", "I-PER", "B-LOC", "I-LOC"]
    generator = np.random.default_rng(0)
    labels = [generator.choice(tags, 9).tolist() for _ in range(200)]
    predictions = [
        [tag if generator.random() < 0.8 else str(generator.choice(tags)) for tag in sequence]
        for sequence in labels
    ]

    def entities(sequence: list[str]) -> frozenset[Span]:
        return frozenset(span for span in find_spans(sequence) if span.label != OUTSIDE)

    pairs = [(entities(a), entities(b)) for a, b in zip(predictions, labels, strict=True)]
    overall, classes = entity_metrics(pairs)
    expected = seqeval.classification_report(labels, predictions, output_dict=True)
    for name in ("precision", "recall"):
        assert overall[name] == pytest.approx(expected["micro avg"][name])
    assert overall["f1"] == pytest.approx(seqeval.f1_score(labels, predictions))
    for label in ("PER", "LOC"):
        assert classes[label]["f1"] == pytest.approx(expected[label]["f1-score"])
        assert classes[label]["entities"] == expected[label]["support"]
