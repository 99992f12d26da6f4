"""Figures are what the model does on the files, printed and written alike."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from albert_serve.api.schemas import Answer, QuestionAnsweringParameters, QuestionContext
from albert_serve.tasks.question_answering.task import QuestionAnswering
from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import (
    SQUAD,
    SQUAD_V2,
    TINY,
    make_part,
    make_shards,
    our_model,
    randomize,
)
from training.commands.evaluate import main
from training.data.batch import pad
from training.data.examples import Example, ExampleSettings, SentenceTask, build_examples
from training.data.masking import NgramMasking
from training.data.shards import Shards
from training.loop.validation import measure
from training.losses import Objective
from training.model.checkpoint import load_checkpoint
from training.model.heads import AlbertForTasks, Task, head_sizes
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
    score_answer,
    version_of,
)

pytestmark = pytest.mark.process

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def checkpoint(finetuned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finetuned / "checkpoint", tmp_path_factory.mktemp("e") / "c"))


def test_every_task_is_measured_by_its_own_figures(
    checkpoint: Path, easy_corpus: Path, labelled: Path, capsys: Capture
) -> None:
    arguments = [str(checkpoint), "--pretraining", str(easy_corpus), "--length", "32"]
    arguments += ["--text-classification", str(labelled), "--question-answering", str(SQUAD)]
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
        "text_classification_data": labelled.name,
        "question_answering_data": SQUAD.name,
    }
    assert sum(sum(row.values()) for row in confusion.values()) == 40
    assert [line.split()[0] for line in table] == list(figures)
    for line, value in zip(table, figures.values(), strict=True):
        assert float(line.split()[1].replace(",", "")) == pytest.approx(value, abs=6e-5)
    assert 0 < figures["masked_accuracy"] < 1
    assert figures["sentence_order_pairs"] > 50
    assert figures["text_classification_texts"] == 40
    assert {name: row["texts"] for name, row in classes.items()} == {"negative": 20, "positive": 20}
    assert figures["question_answering_questions"] == 33
    assert 0 <= figures["question_answering_exact_match"] <= figures["question_answering_f1"] <= 100


@pytest.fixture
def model() -> AlbertForTasks:
    config = replace(TINY, vocab_size=800, max_positions=64)
    model = AlbertForTasks(config, head_sizes(config, ("fill-mask", "sentence-order"))).eval()
    randomize(model, seed=0)
    return model


@pytest.mark.parametrize("task", ["sop", "nsp"])
def test_figures_of_held_out_rows_are_counted_as_by_hand(
    model: AlbertForTasks, shards: Shards, task: SentenceTask
) -> None:
    """In fp32; all positions go through all layers, and each prediction is counted alone.

    Masks stand in texts of one segment, but beside next sentences.
    """
    tasks: tuple[Task, ...] = ("fill-mask", "sentence-order")
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


def test_requests_with_the_recorded_parameters_have_the_figures(
    checkpoint: Path, tokenizer: AlbertTokenizer, tmp_path: Path
) -> None:
    """Those of the service, whose defaults are others, here in windows of 32 tokens."""
    output = tmp_path / "figures.json"
    options = ["--max-seq-length", "32", "--null-score-diff-threshold", "-0.1"]
    data = ["--question-answering", str(SQUAD_V2), "--output", str(output), "--device", "cpu"]
    assert main([str(checkpoint), *data, *options]) == 0
    figures = json.loads(output.read_text())
    recorded = figures["question_answering_parameters"]
    assert recorded == {
        "max_answer_len": 30,
        "max_question_len": 16,
        "max_seq_len": 32,
        "handle_impossible_answer": True,
        "null_score_diff_threshold": -0.1,
    }
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
    assert score.f1 == pytest.approx(figures["question_answering_f1"])
    assert score.exact == pytest.approx(figures["question_answering_exact_match"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "There is nothing to evaluate. Use --pretr"),
        (["--pretraining", str(SQUAD), "--length", "65"], "--length 65 is not between 8 and"),
        (["--token-classification", "a.txt"], "no head for token-classification. Its hea"),
        (["--pretraining", "a.txt", "--predictions", "a.tsv"], "--predictions requires the data o"),
    ],
)
def test_impossible_evaluations_are_refused(
    checkpoint: Path, arguments: list[str], message: str, capsys: Capture
) -> None:
    assert main([str(checkpoint), *arguments]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_validation_has_no_dropout_and_changes_nothing() -> None:
    heads: tuple[Task, ...] = ("fill-mask", "sentence-order")
    dropping = replace(TINY, hidden_dropout=0.5, attention_dropout=0.5)
    model, plain = our_model(dropping, heads).train(), our_model(TINY, heads)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shards = make_shards(make_part([[6, 7], [3, 2], [4, 9]] * 8, TINY.vocab_size))
    masking = NgramMasking(word_starts=np.ones(TINY.vocab_size, bool))
    batches = list(held_out(shards, masking, ExampleSettings(length=16)))
    device = torch.device("cpu")

    def measured(model: AlbertForTasks) -> dict[Task, object]:
        objective = Objective(model, device, {"pretraining": pretrain_loss})
        figures = measure(objective, batches, heads, device)
        assert figures is not None
        return {task: figure.sums for task, figure in figures.items()}

    assert measured(model) == measured(plain)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@torch.no_grad()
def test_figures_of_order_are_those_of_each_pair_alone(
    model: AlbertForTasks, shards: Shards
) -> None:
    pairs = ExampleSettings(length=64, sentence_task="pairs", short_rate=0.0)
    figures = order_metrics(model, shards, replace(pairs, sentence_task="sop"), "fp32")
    in_order, swapped = odds_of(model, shards, pairs)
    assert figures["sentence_order_pairs"] == len(in_order) > 100
    losses = np.log1p(np.exp([-in_order, swapped]))
    assert figures["sentence_order_loss"] == pytest.approx(losses.mean(), rel=1e-4)
    right = np.array([in_order > 0, swapped < 0]).mean()
    assert figures["sentence_order_accuracy"] == pytest.approx(right)
    paired = (in_order > swapped).mean()
    assert figures["sentence_order_paired_accuracy"] == pytest.approx(paired)
    in_order, swapped = odds_of(model, shards, replace(pairs, single_sentences=True))
    assert figures["single_sentence_order_pairs"] == len(in_order) > 20
    right = np.array([in_order > 0, swapped < 0]).mean()
    assert figures["single_sentence_order_accuracy"] == pytest.approx(right)


def odds_of(
    model: AlbertForTasks, shards: Shards, settings: ExampleSettings
) -> NDArray[np.float64]:
    """The log-odds of all pairs in order, and swapped, (2, N)."""
    odds: list[list[float]] = []
    for number, part in enumerate(shards.parts):
        examples = build_examples(part, settings, seed=12345, epoch=0, number=number)
        for a, b, c, d in examples.bounds.tolist():
            odds.append([])
            for bounds in ((a, b, c, d), (c, d, a, b)):
                ids, second = Example(0, 0, 0, bounds, 0).tokens(part)
                types = (np.arange(len(ids)) >= second).astype(int)
                hidden = model(pad([(ids.tolist(), types.tolist())]))
                logits = model.logits("sentence-order", hidden[:, 0])[0]
                odds[-1].append(float(logits[0] - logits[1]))
    return np.array(odds).T
