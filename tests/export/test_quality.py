"""A cost is what the bundle's answers lose by the task's own measure, and too much is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from albert_serve.bundle.manifest import ProblemType, Quality, TaskEntry
from albert_serve.bundle.weights import TaskName
from albert_serve.runtime.engine import Engine
from albert_serve.tasks.base import EncoderInput, Logits
from albert_serve.tokenizer import AlbertTokenizer
from export.bundle import export_bundle
from export.errors import ExportError
from export.quality import MeasuredQuality, check_quality, measure_quality
from export.source import Source, read_source
from tests.export.conftest import WIKI
from training.data.labelled.texts import read_labelled
from training.data.questions import read_squad, span_examples
from training.evaluation.classification import classify
from training.evaluation.questions import answer_questions, question_figures
from training.evaluation.real_text import RealData
from training.evaluation.samples import draw_samples
from training.evaluation.torch_engine import TorchEngine
from training.model.checkpoint import load_checkpoint

pytestmark = pytest.mark.process

SQUAD = WIKI.with_name("squad.json")
RACE = WIKI.with_name("race")


class Chosen:
    """Runs nothing: the logits of each input are chosen."""

    max_batch_tokens = 100

    def __init__(self, choose: Callable[[EncoderInput], Logits]) -> None:
        self.choose = choose
        self.num_asked = 0

    def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        self.num_asked += len(inputs)
        return [self.choose(item) for item in inputs]


def one_hot(best: Iterable[int], num_outputs: int) -> Logits:
    logits: Logits = np.eye(num_outputs, dtype=np.float32)[list(best)]
    return logits


class Knowing(Chosen):
    """Predicts what is right, but for the first predictions that it is asked for."""

    def __init__(
        self, source: Source, tokenizer_file: Path, data: RealData, num_wrong: int
    ) -> None:
        super().__init__(self._answer)
        self.num_wrong = num_wrong
        self._outputs = source.num_outputs
        samples = draw_samples(
            source.config, source.tasks, AlbertTokenizer.from_file(tokenizer_file), data
        )
        self._rights = {
            (task, tuple(item.inputs[0].ids)): item.rights or []
            for task, sample in samples.items()
            for item in sample.items
        }

    def _answer(self, item: EncoderInput) -> Logits:
        num_outputs = self._outputs[item.task]
        rights = self._rights[item.task, tuple(item.ids)]
        wrong = min(self.num_wrong, len(rights))
        self.num_wrong -= wrong
        answers = [(right + (place < wrong)) % num_outputs for place, right in enumerate(rights)]
        return one_hot(answers, num_outputs)


@pytest.fixture
def source(real_checkpoint: Path) -> Source:
    return read_source(real_checkpoint)


@pytest.fixture
def tokenizer_file(real_checkpoint: Path) -> Path:
    return real_checkpoint / "tokenizer.json"


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The beginnings of three articles."""
    file = tmp_path_factory.mktemp("text") / "short.jsonl"
    lines = WIKI.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"][:1500] for line in lines[:3]]
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return file


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("labelled") / "dev.tsv"
    things = [
        f"{thing} was {word}"
        for thing in ("the game", "a city")
        for word in ("good", "bad", "great", "lost")
    ]
    rows = [f"{thing}\t{number % 3 % 2}" for number, thing in enumerate(things)]
    file.write_text("\n".join(["text\tlabel", *rows]))
    return file


def only(source: Source, task: TaskName, entry: TaskEntry | None = None) -> Source:
    return replace(source, tasks={task: entry or source.tasks[task]})


@pytest.mark.parametrize("num_wrong", [0, 7])
@pytest.mark.parametrize("task", ["fill-mask", "sentence-order", "text-classification"])
def test_each_wrong_answer_costs_its_share(
    source: Source,
    tokenizer_file: Path,
    short: Path,
    labelled: Path,
    task: TaskName,
    num_wrong: int,
) -> None:
    source = only(source, task)
    data = RealData(text=(short,), labelled=(labelled,) if task == "text-classification" else ())
    reference, engine = (Knowing(source, tokenizer_file, data, k) for k in (0, num_wrong))

    quality = measure_quality(source, tokenizer_file, reference, engine, data)[task].quality

    assert quality.metric == "accuracy"
    assert quality.torch == 100
    assert quality.cost == pytest.approx(100 * num_wrong / quality.count)
    assert reference.num_asked == engine.num_asked
    assert quality.data == ["dev.tsv" if data.labelled else "short.jsonl"]


def test_when_the_time_is_over_the_rest_is_left_out(
    source: Source, tokenizer_file: Path, short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def choose(item: EncoderInput) -> Logits:
        return one_hot([0] * len(item.rows or ()), 600)

    data, tasks = RealData(text=(short,)), source.tasks
    source = replace(source, tasks={name: tasks[name] for name in ("fill-mask", "sentence-order")})
    pair = (Chosen(choose), Chosen(choose))
    whole = measure_quality(source, tokenizer_file, *pair, data)
    assert "--no-quality skips it" in capsys.readouterr().err
    part = measure_quality(source, tokenizer_file, *pair, data, budget_s=0.0)
    warnings = capsys.readouterr().err
    assert ", within about 0 s (--quality-budget); --no-quality skips it" in warnings
    for task in source.tasks:
        assert 0 < part[task].quality.count < whole[task].quality.count / 4
        assert f"{task} is measured on 1 of 32 parts of its sample" in warnings


def test_without_labels_torch_is_right(source: Source, tokenizer_file: Path, short: Path) -> None:
    left = 3

    def differ(item: EncoderInput) -> Logits:
        nonlocal left
        left -= 1
        return one_hot([(sum(item.ids) + (left >= 0)) % 2], 2)

    source, data = only(source, "text-classification"), RealData(text=(short,))
    reference = Chosen(lambda item: one_hot([sum(item.ids) % 2], 2))
    quality = measure_quality(source, tokenizer_file, reference, Chosen(differ), data)
    differing = quality["text-classification"]
    assert (differing.num_worse, differing.num_better) == (3, 0)
    measured = differing.quality
    assert (measured.metric, measured.torch) == ("agreement", 100)
    assert measured.cost == pytest.approx(100 * 3 / measured.count)


@pytest.mark.parametrize(
    ("problem_type", "num_outputs", "logits", "agreement"),
    [
        pytest.param("multi_label_classification", 3, [1, 0.5, -9], 100, id="same-labels"),
        pytest.param("multi_label_classification", 3, [9, -0.5, -9], 0, id="one-label-fewer"),
        pytest.param("single_label_classification", 3, [1, 0.5, -9], 0, id="another-label"),
        pytest.param("single_label_classification", 3, [1, 1.5, 1], 100, id="same-best"),
    ],
)
def test_agreement_is_in_what_is_answered(
    source: Source,
    tokenizer_file: Path,
    short: Path,
    problem_type: ProblemType,
    num_outputs: int,
    logits: list[float],
    agreement: float,
) -> None:
    entry = TaskEntry(graph="a.onnx", num_outputs=num_outputs, problem_type=problem_type)
    source, data = only(source, "text-classification", entry), RealData(text=(short,))
    reference = Chosen(lambda _: np.array([[2, 3, -1]], np.float32))
    engine = Chosen(lambda _: np.array([logits], np.float32))
    quality = measure_quality(source, tokenizer_file, reference, engine, data)
    assert quality["text-classification"].quality.bundle == agreement


@pytest.mark.parametrize(("factor", "agreement"), [(0.5, 100), (-1, 0)])
def test_numbers_agree_where_their_order_does(
    source: Source,
    tokenizer_file: Path,
    short: Path,
    factor: float,
    agreement: float,
) -> None:
    def number(item: EncoderInput) -> float:
        return float(np.random.default_rng(item.ids).random())

    entry = TaskEntry(graph="a.onnx", num_outputs=1, problem_type="regression")
    task: TaskName = "text-classification"
    source, data = only(source, task, entry), RealData(text=(short,))
    reference = Chosen(lambda item: np.array([[number(item)]], np.float32))
    engine = Chosen(lambda item: np.array([[3 + factor * number(item)]], np.float32))
    quality = measure_quality(source, tokenizer_file, reference, engine, data)[task].quality
    assert (quality.metric, quality.bundle) == ("agreement", agreement)


def test_answers_are_marked_by_their_words(source: Source, tokenizer_file: Path) -> None:
    """A knowing reference has nearly all: a piece may hold more than an answer's last letter."""
    long = replace(source, config=replace(source.config, max_positions=384))
    tokenizer = AlbertTokenizer.from_file(tokenizer_file)
    known = {
        tuple(window.ids): window.target
        for question in read_squad([SQUAD])
        for window in span_examples(question, tokenizer, length=384)
    }

    def answer(item: EncoderInput) -> Logits:
        start, end = known.get(tuple(item.ids), (0, 0))
        logits = np.full((len(item.ids), 2), -30, np.float32)
        logits[[start, end], [0, 1]] = 30
        return logits

    long = only(long, "question-answering")
    data = RealData(text=(), questions=(SQUAD,))
    silent = Chosen(lambda item: np.zeros((len(item.ids), 2), np.float32))
    quality = measure_quality(long, tokenizer_file, Chosen(answer), silent, data)
    measured = quality["question-answering"].quality
    assert (measured.metric, measured.count, measured.data) == ("F1", 33, ["squad.json"])
    assert measured.torch > 90
    assert measured.bundle < 20


def test_a_bundle_in_fp32_costs_nothing(
    source: Source, tokenizer_file: Path, short: Path, labelled: Path, tmp_path: Path
) -> None:
    model = load_checkpoint(source.folder)
    bundle = export_bundle(source.folder, tmp_path / "bundle").bundle
    data = RealData(text=(short,), labelled=(labelled,), questions=(SQUAD,))

    quality = measure_quality(source, tokenizer_file, TorchEngine(model), Engine.open(bundle), data)

    assert quality.keys() == source.tasks.keys()
    for measured in quality.values():
        assert measured.quality.cost == pytest.approx(0, abs=1e-9)
    check_quality(quality, 0.0)
    tokenizer = AlbertTokenizer.from_file(tokenizer_file)
    names = source.tasks["text-classification"].labels or []
    labelled_texts, _ = read_labelled([labelled], names)
    texts = classify(model, tokenizer, labelled_texts, names, length=64).figures()
    figures = question_figures(answer_questions(model, tokenizer, read_squad([SQUAD])), 0.0)
    accuracy, f1 = texts["text_classification_accuracy"], figures["question_answering_f1"]
    assert quality["text-classification"].quality.torch == pytest.approx(100 * accuracy)
    assert quality["question-answering"].quality.torch == pytest.approx(f1)
    assert f1 > 0


def measured(
    metric: str, torch: float, worse: int, better: int, count: int = 200
) -> MeasuredQuality:
    lost = 100 * (worse - better) / count
    quality = Quality(metric=metric, torch=torch, bundle=torch - lost, count=count)
    return MeasuredQuality(quality=quality, num_worse=worse, num_better=better)


@pytest.mark.parametrize(
    ("task", "figure", "max_cost", "message"),
    [
        pytest.param("text-classification", measured("accuracy", 90, 1, 0, 60), 1.0, "", id="one"),
        # Six of six that change by chance do so in the same way once in 64, seven once in 128.
        ("text-classification", measured("accuracy", 90, 6, 0), 1.0, ""),
        (
            "text-classification",
            measured("accuracy", 90, 7, 0),
            1.0,
            "makes 7 of 200 answers worse and 0 better: accuracy falls from 90.00 to 86.50",
        ),
        ("text-classification", measured("accuracy", 90, 7, 0), 4.0, ""),
        pytest.param("fill-mask", measured("accuracy", 51, 40, 30), 1.0, "", id="both-ways"),
        pytest.param("fill-mask", measured("accuracy", 51, 900, 800, 20000), 1.0, "", id="small"),
        ("question-answering", measured("F1", 51, 60, 30), 1.0, "makes 60 of 200 answers worse"),
        # 19 of 182 are over 10 %, and as many by chance.
        ("question-answering", measured("agreement", 100, 19, 0, 182), 1.0, ""),
        (
            "question-answering",
            measured("agreement", 100, 33, 0),
            1.0,
            "another answer than torch in 33 of 200 cases; allowed are 10 %",
        ),
        ("question-answering", measured("agreement", 100, 33, 0), 12.0, ""),
    ],
)
def test_a_certain_loss_is_refused_with_what_can_be_done(
    task: str, figure: MeasuredQuality, max_cost: float, message: str
) -> None:
    figures = {task: figure, "right": measured("accuracy", 80.0, 0, 0)}
    if not message:
        check_quality(figures, max_cost)
        return
    with pytest.raises(ExportError) as caught:
        check_quality(figures, max_cost)
    error = str(caught.value)
    assert message in error
    assert "right:" not in error
    assert "\n" not in error
    for option in ("--tasks", "--keep-fp32", "--max-cost", "--force"):
        assert option in error
