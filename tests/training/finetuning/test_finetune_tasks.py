"""Tasks of GLUE, RACE and the user, and entities are trained, validated and evaluated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import transformers

from albert_serve.tasks.token_classification.entities import OUTSIDE, Span, find_spans
from tests.training.support import RACE, best_step, evaluated, run_command, validations
from training.commands import evaluate
from training.commands.finetune import main
from training.model.checkpoint import read_config
from training.model.heads import Task
from training.tasks.token_classification.metrics import entity_metrics

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)

TASK: Final[Task] = "text-classification"
PAIRS = ("the game was good", "a city was great", "his music died", "her work was lost")


def test_the_best_checkpoint_has_the_figures_of_its_validation(
    start: list[str], tmp_path: Path
) -> None:
    """By the official metric, which `albert-serve evaluate` computes on whole, padded texts."""
    data, folder = tmp_path / "cola", tmp_path / "run"
    rows = [f"x\t1\t\t{text}" for text in PAIRS]
    rows += [f"x\t0\t*\t{' '.join(reversed(text.split()))}" for text in PAIRS]
    data.mkdir()
    for name in ("train.tsv", "dev.tsv"):
        (data / name).write_text("\n".join([*rows, ""]))
    options = ["--task", "cola", "--data", str(data)]
    assert run([*start, "--keep", "1", *options], folder) == 0
    measured = validations(folder, TASK, "matthews_correlation")
    assert list(measured) == [0, 2, 4, 6]
    best = best_step(folder)
    assert best == min(step for step in measured if measured[step] == max(measured.values()))
    (data / "test.tsv").write_text("index\tsentence\n0\tthe game was good\n1\t\n2\tgood\n")
    predicted = data / "CoLA.tsv"
    figures = evaluated(folder / "best", *options, "--predictions", str(predicted))
    matthews = figures["text_classification_matthews_correlation"]
    assert matthews == pytest.approx(measured[best], abs=1e-3)
    loss = validations(folder, TASK, "loss")[best]
    assert figures["text_classification_loss"] == pytest.approx(loss, rel=1e-3)
    config = read_config(folder / "best")
    assert list(config["id2label"].values()) == ["unacceptable", "acceptable"]
    # Predictions are of the test file, also of an empty text.
    header, *lines = predicted.read_text().splitlines()
    assert header == "index\tprediction"
    assert [line.split("\t")[0] for line in lines] == ["0", "1", "2"]
    assert {line.split("\t")[1] for line in lines} <= {"0", "1"}


def test_the_best_checkpoint_of_choices_has_the_figures_of_its_validation(
    start: list[str], tmp_path: Path
) -> None:
    """By accuracy, which `albert-serve evaluate` computes on padded texts."""
    folder = tmp_path / "run"
    options = ["--batch-size", "6", "--task", "RACE", "--data", str(RACE)]
    assert run([*start, *options], folder) == 0
    measured = validations(folder, "multiple-choice", "accuracy")
    assert list(measured) == [2, 4, 6]
    best = best_step(folder)
    assert best == min(step for step in measured if measured[step] == max(measured.values()))
    figures = evaluated(folder / "best", "--task", "race", "--data", str(RACE))
    assert figures["multiple_choice_task"] == "RACE"
    assert figures["multiple_choice_accuracy"] == pytest.approx(measured[best])
    loss = validations(folder, "multiple-choice", "loss")[best]
    assert figures["multiple_choice_loss"] == pytest.approx(loss, rel=1e-3)
    config = read_config(folder / "best")
    assert "AlbertForMultipleChoice" in config["architectures"]
    assert "id2label" not in config


GLAD, SAD = ("good", "great", "beautiful", "first"), ("died", "lost", "war", "not")
THINGS = ("game", "city", "music", "work", "school")


def rows() -> Iterator[tuple[str, list[str]]]:
    """Texts that are glad, sad, both or neither."""
    for thing in THINGS:
        for glad, sad in zip(GLAD, SAD, strict=True):
            yield f"the {thing} was {glad}", ["glad"]
            yield f"the {thing} was {sad}", ["sad"]
            yield f"the {thing} was {glad} and {sad}", ["glad", "sad"]
            yield f"the {thing} was", []


def test_several_labels_and_numbers_are_learnt(
    start: list[str], tmp_path: Path, capsys: Capture
) -> None:
    """Several labels a text; a text's number is that of its glad words less its sad ones."""
    moods, scores, folder = tmp_path / "moods", tmp_path / "scores.csv", tmp_path / "run"
    moods.mkdir()
    for name in ("train.jsonl", "dev.jsonl"):
        lines = [json.dumps({"text": text, "label": labels}) for text, labels in rows()]
        (moods / name).write_text("\n".join(lines))
    numbers = [10.0 * (("glad" in labels) - ("sad" in labels)) for _, labels in rows()]
    lines = [f"{text},{number}" for (text, _), number in zip(rows(), numbers, strict=True)]
    scores.write_text("\n".join(["text,label", *lines]))
    data = ["--text-classification", str(moods)]
    more = ["--head", "score", "--text-classification", str(scores)]
    options = [*start, *data, "--problem-type", "multi_label_classification", *more]
    options += ["--problem-type", "regression", "--labels", "gladness", "--validation", str(scores)]
    options += ["--batch-size", "16", "--steps", "80", "--lr", "5e-3", "--validate-every", "40"]
    assert run(options, folder) == 0
    assert f"Validation uses {moods / 'dev.jsonl'}.\n" in capsys.readouterr().out
    config = read_config(folder / "best")
    assert config["problem_type"] == "multi_label_classification"
    assert config["id2label"] == {"0": "glad", "1": "sad"}
    assert config["albert_heads"]["score"]["problem_type"] == "regression"
    assert config["albert_heads"]["score"]["id2label"] == {"0": "gladness"}
    figures = evaluated(folder / "best", *data, *more)
    for head, metric in (("", "micro_f1"), ("/score", "pearson")):
        measured = validations(folder, f"text-classification{head}", metric)[best_step(folder)]
        assert figures[f"text_classification{head}_{metric}"] == pytest.approx(measured, abs=1e-3)
        assert measured > 0.6
    loss = figures["text_classification/score_loss"]
    assert loss == pytest.approx(figures["text_classification/score_mse"])


def test_evaluate_reads_as_much_of_a_text_as_training_did(
    start: list[str], tmp_path: Path, capsys: Capture
) -> None:
    lines = [
        f"the {thing} was {mood}{' and so on' * (n % 2 * 9)},{mood}"
        for n, (thing, mood) in enumerate(product(THINGS, ("good", "lost")))
    ]
    texts = tmp_path / "texts.csv"
    texts.write_text("\n".join(["text,label", *lines]))
    data = ["--text-classification", str(texts), "--validation", str(texts)]
    assert run([*start, *data, "--length", "16"], tmp_path / "run") == 0
    truncated = "of {} texts were truncated to 16 tokens (--no-truncation makes them errors)"
    assert f"\n10 {truncated.format(20)}\n" in capsys.readouterr().out
    figures = evaluated(tmp_path / "run/best", *data[:2])
    assert capsys.readouterr().out.splitlines()[-1] == f"5 {truncated.format(10)}"
    losses = validations(tmp_path / "run", "text-classification", "loss")
    assert figures["text_classification_loss"] == pytest.approx(losses[best_step(tmp_path / "run")])
    assert evaluate.main([str(tmp_path / "run/best"), *data[:2], "--no-truncation"]) == 1
    assert "texts.csv, line 3: The text has more than 16 tokens" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty-four sentences, in which a person came to a place."""
    people, places = (
        ("his father", "her king", "a son", "the man"),
        ("school", "city", "river", "war"),
    )
    lines = []
    for person, place, (verb, end) in product(people, places, product(("came", "was"), "12")):
        first, second = person.split()
        lines += [f"{first} B-PER", f"{second} I-PER", f"{verb} O", "in O", f"{place} B-LOC"]
        lines += [f"{end} O", ""]
    file = tmp_path_factory.mktemp("tagged") / "train.conll"
    file.write_text("\n".join(lines))
    return file


@pytest.fixture
def options(pretrained: Path, tagged: Path) -> list[str]:
    return [
        *("--initialize-from", str(pretrained / "checkpoint"), "--length", "64"),
        *("--token-classification", str(tagged), "--batch-size", "16", "--steps", "60"),
        *("--lr", "1e-2", "--adamw-lr", "1e-2", "--validate-every", "20"),
        *("--precision", "fp32", "--device", "cpu"),
    ]


def test_entities_are_learnt_and_the_best_checkpoint_has_the_best_f1(
    options: list[str], tmp_path: Path, tagged: Path
) -> None:
    """Validation and evaluation measure the same; `transformers` reads the head and its labels."""
    assert run([*options, "--validation", str(tagged)], tmp_path / "run") == 0
    f1 = validations(tmp_path / "run", "token-classification", "f1")
    assert list(f1) == [20, 40, 60]
    best, folder = best_step(tmp_path / "run"), tmp_path / "run" / "best"
    assert f1[best] == max(f1.values()) > 0.9
    assert validations(tmp_path / "run", "token-classification", "f1/PER")[best] > 0.9
    figures = evaluated(folder, "--token-classification", str(tagged), "--device", "cpu")
    assert figures["token_classification_f1"] == pytest.approx(f1[best], abs=1e-4)
    assert figures["token_classification_classes"]["LOC"]["entities"] == 64
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(folder)
    assert list(theirs.config.id2label.values()) == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]


def test_evaluation_has_the_figures_of_seqeval_on_the_words_of_the_file(
    options: list[str], tmp_path: Path
) -> None:
    """By the labels of the first pieces, as `transformers` reads words with inner punctuation."""
    seqeval = pytest.importorskip("seqeval.metrics")
    assert run([*options, "--steps", "12"], tmp_path / "run") == 0
    folder, generator = tmp_path / "run" / "checkpoint", np.random.default_rng(0)
    words = ["his", "father", "king", "U.K.", "D'Arcy", "in", "Clacton-on-Sea", "(", ")", "city."]
    sentences = [generator.choice(words, 7).tolist() for _ in range(60)]
    tags = [OUTSIDE, OUTSIDE, "B-PER", "I-PER", "B-LOC"]
    right = [generator.choice(tags, 7).tolist() for _ in sentences]
    file = tmp_path / "dev.conll"
    rows = [
        "\n".join(f"{word} {tag}" for word, tag in zip(sentence, its, strict=True))
        for sentence, its in zip(sentences, right, strict=True)
    ]
    file.write_text("\n\n".join(rows))
    model: Any = transformers.AutoModelForTokenClassification.from_pretrained(folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    predicted = []
    for sentence in sentences:
        encoding = tokenizer(sentence, is_split_into_words=True, return_tensors="pt")
        best = model(**encoding).logits[0].argmax(-1).tolist()
        of_word = encoding.word_ids()
        firsts = [best[of_word.index(number)] for number in range(len(sentence))]
        predicted.append([model.config.id2label[number] for number in firsts])
    figures = evaluated(folder, "--token-classification", str(file), "--device", "cpu")
    for name in ("precision", "recall", "f1"):
        expected = getattr(seqeval, f"{name}_score")(right, predicted)
        assert 0 < expected == pytest.approx(figures[f"token_classification_{name}"])


def test_figures_are_those_of_seqeval() -> None:
    seqeval = pytest.importorskip("seqeval.metrics")
    tags = [OUTSIDE, "B-PER", "I-PER", "B-LOC", "I-LOC"]
    generator = np.random.default_rng(0)
    right = [generator.choice(tags, 9).tolist() for _ in range(200)]
    predicted = [
        [tag if generator.random() < 0.8 else str(generator.choice(tags)) for tag in sequence]
        for sequence in right
    ]

    def entities(sequence: list[str]) -> frozenset[Span]:
        return frozenset(span for span in find_spans(sequence) if span.label != OUTSIDE)

    pairs = [(entities(a), entities(b)) for a, b in zip(predicted, right, strict=True)]
    whole, classes = entity_metrics(pairs)
    expected = seqeval.classification_report(right, predicted, output_dict=True)
    for name in ("precision", "recall"):
        assert whole[name] == pytest.approx(expected["micro avg"][name])
    assert whole["f1"] == pytest.approx(seqeval.f1_score(right, predicted))
    for label in ("PER", "LOC"):
        assert classes[label]["f1"] == pytest.approx(expected[label]["f1-score"])
        assert classes[label]["entities"] == expected[label]["support"]
