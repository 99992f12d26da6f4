"""`albert-serve evaluate` prints and writes the metrics of a checkpoint on held-out data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from albert_serve.api.schemas import Answer, QuestionAnsweringParameters, QuestionContext
from albert_serve.tasks.question_answering.task import QuestionAnswering
from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import SQUAD, SQUAD_V2, TINY, make_part, make_shards, our_model
from training.commands.evaluate import main
from training.data.batch import PretrainBatch, pad
from training.data.examples import Example, ExampleSettings, SentenceTask, build_examples
from training.data.masking import NgramMasking
from training.data.shards import Shards
from training.loop.validation import measure
from training.losses import Objective
from training.model.checkpoint import load_checkpoint
from training.model.heads import AlbertForTasks, Task
from training.tasks.engine import TorchEngine
from training.tasks.pretraining.loss import pretrain_loss
from training.tasks.pretraining.metrics import (
    evaluate_pretraining,
    held_out,
    order_metrics,
    unigram_entropy,
)
from training.tasks.question_answering.files import Question, read_squad
from training.tasks.question_answering.metrics import (
    SquadScore,
    mean_score,
    question_parameters,
    score_answer,
)

pytestmark = pytest.mark.process

Capture = pytest.CaptureFixture[str]
TASKS: tuple[Task, ...] = ("fill-mask", "sentence-order")
# Prefixes of metrics: all questions, questions with an answer, and questions without one.
PARTS = ("", "has_answer_", "no_answer_")


@pytest.fixture(scope="module")
def checkpoint(finetuned_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finetuned_run / "checkpoint", tmp_path_factory.mktemp("e") / "c"))


def test_every_task_has_its_own_metrics(
    checkpoint: Path, easy_corpus: Path, labelled_texts: Path, capsys: Capture
) -> None:
    arguments = [str(checkpoint), "--pretraining", str(easy_corpus), "--length", "32"]
    arguments += ["--text-classification", *[str(labelled_texts)] * 4]
    arguments += ["--question-answering", str(SQUAD)]
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert "labels are numbers in this order: 0 negative, 1 positive." in output.err
    *table, last_line = output.out.splitlines()
    assert last_line == f"Written to {checkpoint / 'evaluation.json'}."
    metrics = json.loads((checkpoint / "evaluation.json").read_text())
    classes = metrics.pop("text_classification_classes")
    confusion = metrics.pop("text_classification_confusion")
    assert metrics.pop("question_answering_parameters")["max_answer_len"] == 30
    data = {name: metrics.pop(name) for name in list(metrics) if name.endswith("_data")}
    assert data == {
        "masked_data": easy_corpus.name,
        "sentence_order_data": easy_corpus.name,
        "text_classification_data": ", ".join([*[labelled_texts.name] * 3, "1 more"]),
        "question_answering_data": SQUAD.name,
    }
    assert sum(sum(row.values()) for row in confusion.values()) == 160
    assert [line.split()[0] for line in table] == list(metrics)
    for line, value in zip(table, metrics.values(), strict=True):
        assert float(line.split()[1].replace(",", "")) == pytest.approx(value, abs=6e-5)
    assert 0 < metrics["masked_accuracy"] < 1
    assert metrics["sentence_order_pairs"] > 50
    assert metrics["text_classification_texts"] == 160
    assert {name: row["texts"] for name, row in classes.items()} == {"negative": 80, "positive": 80}
    assert metrics["question_answering_questions"] == 33
    assert 0 <= metrics["question_answering_exact_match"] <= metrics["question_answering_f1"] <= 100


@pytest.fixture
def model() -> AlbertForTasks:
    return our_model(replace(TINY, vocab_size=800, max_positions=64), TASKS)


@pytest.mark.parametrize("task", ["sop", "nsp"])
def test_metrics_of_held_out_rows_are_those_of_each_prediction(
    model: AlbertForTasks, shards: Shards, task: SentenceTask
) -> None:
    """The model runs in fp32, and every layer reads every position.

    With the task sop, masked texts have one segment; with nsp, two.
    """
    masking = NgramMasking(word_starts=np.ones(800, bool))
    settings = ExampleSettings(length=64, sentence_task=task)
    metrics = evaluate_pretraining(model, shards, masking, settings, "fp32")
    if task == "sop":
        assert "sentence_order_loss" in metrics
        metrics = {name: metrics[name] for name in metrics if "sentence_order" not in name}
        settings = replace(settings, sentence_task="none")
    batches = list(held_out(shards, masking, settings))
    loss, accuracy, count = metrics_by_hand(model, "fill-mask", batches)
    expected = {"masked_loss": loss, "masked_accuracy": accuracy, "masked_tokens": count}
    expected["unigram_entropy"] = unigram_entropy(shards, 800)
    if task == "nsp":
        loss, accuracy, count = metrics_by_hand(model, "sentence-order", batches)
        expected |= {"next_sentence_loss": loss, "next_sentence_accuracy": accuracy}
        expected["next_sentence_pairs"] = count
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert not model.training


@torch.no_grad()
def metrics_by_hand(
    model: AlbertForTasks, head: Task, batches: Sequence[PretrainBatch]
) -> tuple[float, float, int]:
    """Return loss, accuracy and number of the predictions of a head, each computed separately."""
    losses: list[float] = []
    is_right: list[bool] = []
    for batch in batches:
        is_masked = head == "fill-mask"
        rows = batch.rows if is_masked else batch.firsts
        targets = batch.targets if is_masked else batch.labels
        logits_RK = model.logits(head, model(batch.tokens).flatten(0, 1)[rows])
        for logits_K, target in zip(logits_RK, targets.tolist(), strict=True):
            if target >= 0:
                losses.append(float(logits_K.logsumexp(0) - logits_K[target]))
                is_right.append(int(logits_K.argmax()) == target)
    return float(np.mean(losses)), float(np.mean(is_right)), len(losses)


def test_the_best_no_answer_threshold_gives_the_best_metrics(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The files of predictions contain the scored answers.

    The best threshold is not written if it leaves every question without an answer.
    """
    output, folder = tmp_path / "metrics.json", tmp_path / "answers"
    options = [str(checkpoint), "--question-answering", str(SQUAD_V2), "--output", str(output)]
    assert main(options) == 0
    metrics = json.loads(output.read_text())
    counts = [metrics[f"question_answering_{part}questions"] for part in PARTS]
    assert counts == [68, 32, 36]
    for name in ("exact_match", "f1"):
        overall, answerable, impossible = (
            metrics[f"question_answering_{part}{name}"] for part in PARTS
        )
        assert overall == pytest.approx((32 * answerable + 36 * impossible) / 68)
        assert overall <= metrics[f"question_answering_best_{name}"]
        assert metrics[f"question_answering_best_{name}"] >= 100 * 36 / 68
    threshold = metrics["question_answering_best_exact_match_threshold"]
    assert "question_answering_best_f1_threshold" not in metrics
    options += ["--null-score-diff-threshold", str(threshold)]
    assert main([*options, "--predictions", str(folder / "dev.json")]) == 0
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
        answers = n_best[question.id]
        assert 2 <= len(answers) <= 21
        assert sum(answer["probability"] for answer in answers) == pytest.approx(1)
        best = next(answer["text"] for answer in answers if answer["text"])
        assert predictions[question.id] == ("" if odds[question.id] > threshold else best)


def mean_of(questions: list[Question], answers: dict[str, str]) -> SquadScore:
    return mean_score([score_answer(q, answers[q.id], "2.0") for q in questions])


def test_requests_with_the_recorded_parameters_have_the_same_metrics(
    checkpoint: Path, tokenizer: AlbertTokenizer, tmp_path: Path
) -> None:
    """The service has other default parameters. The windows have 32 tokens."""
    output = tmp_path / "metrics.json"
    options = ["--max-seq-length", "32", "--null-score-diff-threshold", "-0.1"]
    data = ["--question-answering", str(SQUAD_V2), "--output", str(output), "--device", "cpu"]
    assert main([str(checkpoint), *data, *options]) == 0
    metrics = json.loads(output.read_text())
    recorded = metrics["question_answering_parameters"]
    lengths = {"max_answer_len": 30, "max_question_len": 16, "max_seq_len": 32}
    threshold = {"handle_impossible_answer": True, "null_score_diff_threshold": -0.1}
    assert recorded == {**lengths, **threshold}
    assert question_parameters(512, may_be_empty=True).max_question_len == 64
    parameters = QuestionAnsweringParameters(**recorded)
    task = QuestionAnswering(tokenizer=tokenizer, max_positions=64, null_score_diff_threshold=9.0)
    engine = TorchEngine(load_checkpoint(checkpoint))
    answers = {}
    for question in read_squad([SQUAD_V2]):
        item = QuestionContext(question=question.question, context=question.context)
        prepared = task.prepare(item, parameters)
        assert max(len(encoded.ids) for encoded in prepared.inputs) <= 32
        answer = prepared.finish(engine.run(prepared.inputs))
        assert isinstance(answer, Answer)
        answers[question.id] = answer.answer
    score = mean_of(read_squad([SQUAD_V2]), answers)
    assert score.f1 == pytest.approx(metrics["question_answering_f1"])
    assert score.exact == pytest.approx(metrics["question_answering_exact_match"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "There is nothing to evaluate. Use --pretr"),
        (["--pretraining", str(SQUAD), "--length", "65"], "--length 65 is not between 8 and"),
        (["--token-classification", "a.txt"], "no head for token-classification. Its hea"),
        (["--pretraining", "a.txt", "--predictions", "a.tsv"], "--predictions requires the data o"),
    ],
)
def test_impossible_options_are_rejected(
    checkpoint: Path, arguments: list[str], message: str, capsys: Capture
) -> None:
    assert main([str(checkpoint), *arguments]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_validation_has_no_dropout_and_changes_nothing() -> None:
    dropout = replace(TINY, hidden_dropout=0.5, attention_dropout=0.5)
    model, without_dropout = our_model(dropout, TASKS).train(), our_model(TINY, TASKS)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shards = make_shards(make_part([[6, 7], [3, 2], [4, 9]] * 8, TINY.vocab_size))
    masking = NgramMasking(word_starts=np.ones(TINY.vocab_size, bool))
    batches = list(held_out(shards, masking, ExampleSettings(length=16)))
    device = torch.device("cpu")

    def sums_of(model: AlbertForTasks) -> dict[Task, object]:
        objective = Objective(model, device, {"pretraining": pretrain_loss})
        metrics = measure(objective, batches, TASKS, device)
        assert metrics is not None
        return {task: measurement.sums for task, measurement in metrics.items()}

    assert sums_of(model) == sums_of(without_dropout)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@torch.no_grad()
def test_sentence_order_has_the_metrics_of_each_pair(model: AlbertForTasks, shards: Shards) -> None:
    pairs = ExampleSettings(length=64, sentence_task="pairs", short_rate=0.0)
    metrics = order_metrics(model, shards, replace(pairs, sentence_task="sop"), "fp32")
    in_order, swapped = odds_of(model, shards, pairs)
    assert metrics["sentence_order_pairs"] == len(in_order) > 100
    losses = np.log1p(np.exp([-in_order, swapped]))
    assert metrics["sentence_order_loss"] == pytest.approx(losses.mean(), rel=1e-4)
    accuracy = np.array([in_order > 0, swapped < 0]).mean()
    assert metrics["sentence_order_accuracy"] == pytest.approx(accuracy)
    paired_accuracy = (in_order > swapped).mean()
    assert metrics["sentence_order_paired_accuracy"] == pytest.approx(paired_accuracy)
    in_order, swapped = odds_of(model, shards, replace(pairs, single_sentences=True))
    assert metrics["single_sentence_order_pairs"] == len(in_order) > 20
    accuracy = np.array([in_order > 0, swapped < 0]).mean()
    assert metrics["single_sentence_order_accuracy"] == pytest.approx(accuracy)


def odds_of(model: AlbertForTasks, shards: Shards, pairs: ExampleSettings) -> NDArray[np.float64]:
    """Return the log-odds of all pairs, in order and swapped, (2, N)."""
    odds: list[list[float]] = []
    for number, part in enumerate(shards.parts):
        examples = build_examples(part, pairs, seed=12345, epoch=0, number=number)
        for a, b, c, d in examples.bounds.tolist():
            odds.append([])
            for bounds in ((a, b, c, d), (c, d, a, b)):
                ids, second = Example(0, 0, 0, bounds, 0).tokens(part)
                types = (np.arange(len(ids)) >= second).astype(int)
                hidden = model(pad([(ids.tolist(), types.tolist())]))
                logits = model.logits("sentence-order", hidden[:, 0])[0]
                odds[-1].append(float(logits[0] - logits[1]))
    return np.array(odds).T
