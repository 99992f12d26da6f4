"""Entities are learnt, measured as seqeval does, and select the best checkpoint."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from albert_serve.tasks.token_classification.entities import OUTSIDE, Span, find_spans
from tests.training.support import best_step, evaluated, run_command, validations
from training.commands.finetune import main
from training.tasks.token_classification.metrics import entity_metrics

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)


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
