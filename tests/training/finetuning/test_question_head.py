"""Questions are learnt by a start-conditioned head, and answered the same by torch and a bundle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from albert_serve.api.schemas import Answer
from albert_serve.bundle.manifest import Bundle
from albert_serve.client import AlbertClient
from albert_serve.config import AlbertConfig
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks import EncoderInput
from export.bundle import export_bundle
from tests.training.support import (
    SQUAD_V2,
    read_metrics,
    run_command,
)
from training import evaluate
from training.data.questions import Question, read_squad
from training.evaluation.torch_engine import TorchEngine
from training.finetune import main
from training.model.checkpoint import load_checkpoint, read_tasks, save_checkpoint
from training.model.heads import AlbertForTasks, head_sizes

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)
POSITIONS = 192
PREFIX = "question_answering_"


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three questions with an answer and three without, on the shortest paragraph."""
    content = json.loads(SQUAD_V2.read_text(encoding="utf-8"))
    paragraphs = [each for article in content["data"] for each in article["paragraphs"]]
    shortest = min(paragraphs, key=lambda each: len(each["context"]))
    asked = shortest["qas"][2:8]
    assert [bool(each["answers"]) for each in asked] == [True] * 3 + [False] * 3
    file = tmp_path_factory.mktemp("questions") / "few.json"
    data = [{"title": "few", "paragraphs": [{**shortest, "qas": asked}]}]
    file.write_text(json.dumps({"version": "v2.0", "data": data}))
    return file


@pytest.fixture(scope="module")
def start(vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new model, with a head for text classification beside."""
    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=800,
        embedding_size=32,
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        ffn_size=128,
        max_positions=POSITIONS,
        classifier_dropout=0.0,
    )
    folder = tmp_path_factory.mktemp("start") / "checkpoint"
    model = AlbertForTasks(config, head_sizes(config, ("text-classification",)))
    save_checkpoint(model, folder, tokenizer_from=vocab_dir)
    return folder


@pytest.fixture(scope="module")
def options(start: Path, few: Path) -> list[str]:
    return [
        *("--initialize-from", str(start), "--question-answering", str(few)),
        *("--question-head", "start-conditioned", "--length", str(POSITIONS)),
        *("--batch-size", "6", "--steps", "75", "--lr", "4e-3", "--adamw-lr", "6e-3"),
        *("--report-every", "10", "--device", "cpu"),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Learnt:
    """A run that has learnt the questions, and its evaluation on them."""

    folder: Path
    figures: dict[str, float]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"


@pytest.fixture(scope="module")
def learnt(options: list[str], few: Path, tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    folder = tmp_path_factory.mktemp("learnt") / "run"
    assert run(options, folder) == 0
    assert evaluate.main([str(folder / "checkpoint"), "--question-answering", str(few)]) == 0
    figures = json.loads((folder / "checkpoint" / "evaluation.json").read_text())
    return Learnt(folder=folder, figures=figures)


@pytest.fixture(scope="module")
def bundle(learnt: Learnt, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_bundle(learnt.checkpoint, tmp_path_factory.mktemp("bundles") / "fp32").bundle


@pytest.fixture(scope="module")
def albert(bundle: Bundle) -> Iterator[AlbertClient]:
    with AlbertClient.local(bundle.folder) as client:
        yield client


def context_of(question: Question) -> dict[str, str]:
    return {"question": question.question, "context": question.context}


def test_a_few_questions_are_learnt(learnt: Learnt) -> None:
    first, *_, last = read_metrics(learnt.folder)
    assert last["question-answering/loss"] < 0.3 * first["question-answering/loss"]
    assert learnt.figures[f"{PREFIX}exact_match"] == 100.0
    for part in ("has_answer_", "no_answer_"):
        assert learnt.figures[f"{PREFIX}{part}exact_match"] == 100.0
        assert learnt.figures[f"{PREFIX}{part}questions"] == 3


def test_the_head_is_in_checkpoint_and_manifest(learnt: Learnt, bundle: Bundle) -> None:
    assert read_tasks(learnt.checkpoint) == {"text-classification": 2, "question-answering": 7}
    entry = bundle.manifest.tasks["question-answering"]
    assert (entry.question_head, entry.num_outputs) == ("start-conditioned", 7)
    assert entry.null_score_diff_threshold == learnt.figures[f"{PREFIX}best_f1_threshold"]
    assert bundle.manifest.parity["question-answering"] < 1e-4
    stage = json.loads((learnt.checkpoint / "training.json").read_text())["stages"][-1]
    assert stage["settings"]["question_head"] == "start-conditioned"


def test_the_service_answers_what_was_learnt(albert: AlbertClient, few: Path) -> None:
    """At a threshold in the middle: the tuned one is the null score of one of the questions."""
    questions = read_squad([few])
    items = [context_of(each) for each in questions]
    for threshold, is_empty in ((0.0, False), (-1000.0, True)):
        answers = albert.question_answering(
            items,
            handle_impossible_answer=True,
            max_answer_len=30,
            null_score_diff_threshold=threshold,
        )
        for question, answer in zip(questions, answers, strict=True):
            assert isinstance(answer, Answer)
            has_answer = question.answers and not is_empty
            assert answer.answer == (question.answers[0] if has_answer else "")
            assert question.context[answer.start : answer.end] == answer.answer


def test_a_window_shorter_than_the_beam(bundle: Bundle, learnt: Learnt) -> None:
    engine = Engine.open(bundle, RuntimeOptions(device="cpu", num_threads=1))
    inputs = [
        EncoderInput(
            ids=[2, 9, 3, *range(10, 10 + size), 3],
            types=[0] * 3 + [1] * (size + 1),
            task="question-answering",
            rows=[0, *range(3, 3 + size)],
        )
        for size in (1, 2, 3)
    ]
    expected = TorchEngine(load_checkpoint(learnt.checkpoint)).run(inputs)
    for ours, theirs in zip(engine.run(inputs), expected, strict=True):
        known = 2 + len(ours)
        np.testing.assert_allclose(ours[:, :known], theirs[:, :known], atol=1e-4)


@pytest.mark.parametrize(
    ("more", "num_outputs", "said"),
    [
        ((), 7, ""),
        (
            ("--question-head", "independent"),
            2,
            "the checkpoint's start-conditioned head of questions is replaced by one that is ind",
        ),
    ],
)
def test_the_checkpoints_head_is_kept_unless_another_is_asked_for(
    learnt: Learnt, few: Path, more: tuple[str, ...], num_outputs: int, said: str,
    tmp_path: Path, capsys: Capture,
) -> None:  # fmt: skip
    options = ["--initialize-from", str(learnt.checkpoint), "--question-answering", str(few)]
    options += ["--length", "64", "--steps", "1", "--device", "cpu", *more]
    assert run(options, tmp_path) == 0
    assert read_tasks(tmp_path / "checkpoint")["question-answering"] == num_outputs
    out = capsys.readouterr().out
    assert (said in out) if said else ("replaced" not in out)
