"""Figures are what the model does on the files, printed and written alike."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from albert_serve.api.schemas import Answer, QuestionAnsweringParameters, QuestionContext
from albert_serve.tasks.question_answering.task import QuestionAnswering
from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import SQUAD, SQUAD_V2, TINY, evaluated, randomize
from training.commands import evaluate as command
from training.commands import pretrain
from training.commands.evaluate import main
from training.data.examples import ExampleSettings, SentenceTask
from training.data.masking import NgramMasking
from training.data.shards import Shards
from training.evaluation.run import Evaluation
from training.model.checkpoint import load_checkpoint
from training.model.heads import AlbertForTasks, Task, head_sizes
from training.tasks.engine import TorchEngine
from training.tasks.pretraining.metrics import evaluate_pretraining, held_out, unigram_entropy
from training.tasks.question_answering.files import Question, read_squad
from training.tasks.question_answering.metrics import (
    SquadScore,
    mean_score,
    score_answer,
    version_of,
)

pytestmark = pytest.mark.process

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def checkpoint(finetuned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finetuned / "checkpoint", tmp_path_factory.mktemp("e") / "c"))


def test_every_task_is_measured_by_its_own_figures(
    checkpoint: Path, easy_corpus: Path, labelled: Path, tmp_path: Path, capsys: Capture
) -> None:
    texts = [str(shutil.copy(labelled, tmp_path / f"{name}.tsv")) for name in "abcd"]
    arguments = [str(checkpoint), "--pretraining", str(easy_corpus), "--length", "32"]
    arguments += ["--text-classification", *texts, "--question-answering", str(SQUAD)]
    assert main(arguments) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert last == f"Written to {checkpoint / 'evaluation.json'}."
    figures = json.loads((checkpoint / "evaluation.json").read_text())
    classes = figures.pop("text_classification_classes")
    confusion = figures.pop("text_classification_confusion")
    assert figures.pop("question_answering_parameters")["max_answer_len"] == 30
    data = {name: figures.pop(name) for name in list(figures) if name.endswith("_data")}
    assert data == {
        "masked_data": easy_corpus.name,
        "sentence_order_data": easy_corpus.name,
        "text_classification_data": "a.tsv, b.tsv, c.tsv, 1 more",
        "question_answering_data": SQUAD.name,
    }
    assert sum(sum(row.values()) for row in confusion.values()) == 160
    assert [line.split()[0] for line in table] == list(figures)
    for line, value in zip(table, figures.values(), strict=True):
        assert float(line.split()[1].replace(",", "")) == pytest.approx(value, abs=6e-5)
    assert 0 < figures["masked_accuracy"] < 1
    assert figures["sentence_order_pairs"] > 50
    assert figures["text_classification_texts"] == 160
    assert {name: each["texts"] for name, each in classes.items()} == {
        "negative": 80,
        "positive": 80,
    }
    assert figures["question_answering_questions"] == 33
    assert 0 <= figures["question_answering_exact_match"] <= figures["question_answering_f1"] <= 100


@pytest.mark.parametrize("num_classes", [2, 3, 21])
def test_three_to_twenty_classes_are_printed(
    num_classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    row = {"precision": 0.5, "recall": 0.25, "f1": 1 / 3, "texts": 1200}
    classes = {f"c{n}": row for n in range(num_classes)}
    figures = {"a_loss": 0.12345, "a_texts": 12345, "a_classes": classes}
    monkeypatch.setattr(command, "evaluate", lambda _: Evaluation(figures, ["a note"]))
    options = ["--question-answering", "a.json", "--output", str(tmp_path / "figures.json")]
    assert main(["some/model", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["a_loss          0.1235", "a_texts         12,345"]
    assert lines[-1] == "a note"
    rows = [line.split() for line in lines if line.startswith("c")]
    assert rows[1:2] == ([["c0", "0.5000", "0.2500", "0.3333", "1,200"]] if num_classes > 2 else [])
    assert len(rows) == {2: 0, 3: 4, 21: 21}[num_classes]
    assert any("... and 1 more" in line for line in lines) == (num_classes == 21)
    assert json.loads((tmp_path / "figures.json").read_text()) == figures
    assert main(["some/model", *options[:2]]) == 0
    assert "--output" in capsys.readouterr().out


def test_a_checkpoint_is_evaluated_on_its_own_sentence_task(
    pretrain_options: list[str], easy_corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    more = ["--sentence-task", "nsp", "--steps", "2", "--output", str(folder)]
    assert pretrain.main([*pretrain_options, *more]) == 0
    arguments = ("--pretraining", str(easy_corpus), "--length", "64")
    figures = evaluated(folder / "checkpoint", *arguments)
    masked = ["masked_loss", "masked_accuracy", "masked_tokens", "unigram_entropy"]
    names = ["next_sentence_loss", "next_sentence_accuracy", "next_sentence_pairs"]
    assert list(figures) == [*masked, *names, "masked_data"]
    assert all(math.isfinite(figures[name]) for name in [*masked, *names])


@pytest.mark.parametrize("task", ["sop", "nsp", "none"])
def test_figures_of_held_out_rows_are_counted_as_by_hand(
    shards: Shards, task: SentenceTask
) -> None:
    """In fp32; all positions go through all layers, and each prediction is counted alone.

    Masks stand in texts of one segment, but beside next sentences.
    """
    config = replace(TINY, vocab_size=800, max_positions=64)
    tasks: tuple[Task, ...] = ("fill-mask", "sentence-order")
    tasks = tasks[:1] if task == "none" else tasks
    torch.manual_seed(0)
    model = AlbertForTasks(config, head_sizes(config, tasks)).eval()
    randomize(model, seed=0)
    masking = NgramMasking(word_starts=np.ones(800, bool))
    settings = ExampleSettings(length=64, sentence_task=task)
    figures = evaluate_pretraining(model, shards, masking, settings, "fp32")
    expected: dict[str, float] = {"unigram_entropy": unigram_entropy(shards, 800)}
    names = {"fill-mask": "masked", "sentence-order": "next_sentence" if task == "nsp" else ""}
    read = settings if task == "nsp" else replace(settings, sentence_task="none")
    for head in tasks:
        if name := names[head]:
            losses, is_right = predictions_by_hand(model, head, shards, masking, read)
            expected[f"{name}_loss"] = sum(losses) / len(losses)
            expected[f"{name}_accuracy"] = sum(is_right) / len(is_right)
            expected["masked_tokens" if head == "fill-mask" else f"{name}_pairs"] = len(losses)
    order = {name: figures.pop(name) for name in list(figures) if "sentence_order" in name}
    assert bool(order) == (task == "sop")
    assert figures == pytest.approx(expected, rel=1e-5)
    assert not model.training


@torch.no_grad()
def predictions_by_hand(
    model: AlbertForTasks,
    head: Task,
    shards: Shards,
    masking: NgramMasking,
    settings: ExampleSettings,
) -> tuple[list[float], list[bool]]:
    """The loss of each prediction of a head on the held-out rows, and whether it is right."""
    losses: list[float] = []
    is_right: list[bool] = []
    for batch in held_out(shards, masking, settings):
        hidden = model(batch.tokens).flatten(0, 1)
        rows, targets = (
            (batch.rows, batch.targets) if head == "fill-mask" else (batch.firsts, batch.labels)
        )
        for logits, target in zip(model.logits(head, hidden[rows]), targets.tolist(), strict=True):
            if target >= 0:
                losses.append(float(logits.logsumexp(0) - logits[target]))
                is_right.append(int(logits.argmax()) == target)
    return losses, is_right


def test_questions_without_an_answer_have_figures_and_a_threshold(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The best threshold gives the best figure, and the files hold what is scored.

    One by which no question has an answer is none that a bundle should get.
    """
    output, folder = tmp_path / "figures.json", tmp_path / "answers"
    options = [str(checkpoint), "--question-answering", str(SQUAD_V2), "--output", str(output)]
    assert main(options) == 0
    figures = json.loads(output.read_text())
    counts = [figures[f"question_answering_{part}questions"] for part in PARTS]
    assert counts == [68, 32, 36]
    for name in ("exact_match", "f1"):
        whole, some, none = (figures[f"question_answering_{part}{name}"] for part in PARTS)
        assert whole == pytest.approx((32 * some + 36 * none) / 68)
        assert whole <= figures[f"question_answering_best_{name}"]
        assert figures[f"question_answering_best_{name}"] >= 100 * 36 / 68
    threshold = figures["question_answering_best_exact_match_threshold"]
    assert "question_answering_best_f1_threshold" not in figures
    more = [
        *("--null-score-diff-threshold", str(threshold)),
        *("--predictions", str(folder / "dev.json")),
    ]
    assert main([*options, *more]) == 0
    tuned = json.loads(output.read_text())
    best_exact = pytest.approx(tuned["question_answering_best_exact_match"])
    assert tuned["question_answering_exact_match"] == best_exact
    predictions, odds, n_best = (
        json.loads((folder / f"{name}.json").read_text())
        for name in ("dev", "dev_null_odds", "dev_nbest")
    )
    questions = read_squad([SQUAD_V2])
    assert mean_of(questions, predictions).f1 == pytest.approx(tuned["question_answering_f1"])
    for question in questions:
        listed = n_best[question.id]
        assert 2 <= len(listed) <= 21
        assert sum(each["probability"] for each in listed) == pytest.approx(1)
        best = next(each["text"] for each in listed if each["text"])
        assert predictions[question.id] == ("" if odds[question.id] > threshold else best)


PARTS = ("", "has_answer_", "no_answer_")


def mean_of(questions: list[Question], answers: dict[str, str]) -> SquadScore:
    version = version_of(questions)
    return mean_score([score_answer(each, answers[each.id], version) for each in questions])


@pytest.mark.parametrize("file", [SQUAD, SQUAD_V2])
def test_requests_with_the_recorded_parameters_have_the_figures(
    checkpoint: Path, tokenizer: AlbertTokenizer, tmp_path: Path, file: Path
) -> None:
    """Those of the service, whose defaults are others, here in windows of 32 tokens."""
    output = tmp_path / "figures.json"
    options = ["--max-seq-length", "32", "--null-score-diff-threshold", "-0.1"]
    data = ["--question-answering", str(file), "--output", str(output), "--device", "cpu"]
    assert main([str(checkpoint), *data, *options]) == 0
    figures = json.loads(output.read_text())
    recorded = figures["question_answering_parameters"]
    expected: dict[str, Any] = {"max_answer_len": 30, "max_question_len": 16, "max_seq_len": 32}
    expected["handle_impossible_answer"] = file == SQUAD_V2
    if file == SQUAD_V2:
        expected["null_score_diff_threshold"] = -0.1
    assert recorded == expected
    parameters = QuestionAnsweringParameters(**recorded)
    task = QuestionAnswering(tokenizer=tokenizer, max_positions=64, null_score_diff_threshold=9.0)
    engine = TorchEngine(load_checkpoint(checkpoint))
    answers = {}
    for question in read_squad([file]):
        item = QuestionContext(question=question.question, context=question.context)
        prepared = task.prepare(item, parameters)
        assert max(len(encoded.ids) for encoded in prepared.inputs) <= 32
        answer = prepared.finish(engine.run(prepared.inputs))
        assert isinstance(answer, Answer)
        answers[question.id] = answer.answer
    score = mean_of(read_squad([file]), answers)
    assert score.f1 == pytest.approx(figures["question_answering_f1"])
    assert score.exact == pytest.approx(figures["question_answering_exact_match"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "There is nothing to evaluate. Use --pretr"),
        (["--question-answering", "none.json"], "none.json does not exist"),
        (["--pretraining", str(SQUAD), "--length", "65"], "--length 65 is not between 8 and"),
        (["--pretraining", str(SQUAD), "--length", "7"], "--length 7 is not between 8 and"),
        (["--token-classification", "a.txt"], "no head for token-classification. Its hea"),
        (["--multiple-choice", "a.csv"], "The checkpoint has no head for multiple-choice"),
        (
            ["--question-answering", str(SQUAD), "--max-seq-length", "65"],
            "--max-seq-length 65 is not",
        ),
        (["--pretraining", "a.txt", "--predictions", "a.tsv"], "--predictions requires the data o"),
        (
            ["--question-answering", str(SQUAD), "--task", "cola", "--predictions", "a.tsv"],
            "--predictions requires the data of either",
        ),
    ],
)
def test_impossible_evaluations_are_refused(
    checkpoint: Path, arguments: list[str], message: str, capsys: Capture
) -> None:
    assert main([str(checkpoint), *arguments]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
