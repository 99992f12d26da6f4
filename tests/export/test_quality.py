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
from export.quality import check_quality, measure_quality
from export.source import Source, read_source
from tests.export.conftest import WIKI
from training.data.choices import choice_examples
from training.data.labelled.choices import read_choices
from training.data.labelled.texts import read_labelled
from training.data.questions import read_squad, span_examples
from training.evaluation.classification import classify
from training.evaluation.questions import answer_questions, question_figures
from training.evaluation.real_text import RealData
from training.evaluation.samples import draw_samples
from training.evaluation.torch_engine import TorchEngine
from training.model.checkpoint import load_checkpoint

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


@pytest.mark.parametrize("num_wrong", [0, 1, 7])
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

    quality = measure_quality(source, tokenizer_file, reference, engine, data)[task]

    assert quality.metric == "accuracy"
    assert quality.torch == 100
    assert quality.cost == pytest.approx(100 * num_wrong / quality.count)
    assert reference.num_asked == engine.num_asked
    assert quality.data == ["dev.tsv" if data.labelled else "short.jsonl"]


def test_when_the_time_is_over_the_rest_is_left_out(
    source: Source, tokenizer_file: Path, short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0

    class Slow(Chosen):
        def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
            nonlocal now_s
            now_s += 1.0
            return super().run(inputs)

    def choose(item: EncoderInput) -> Logits:
        return one_hot([0] * len(item.rows or ()), 600)

    data, tasks = RealData(text=(short,)), source.tasks
    source = replace(source, tasks={name: tasks[name] for name in ("fill-mask", "sentence-order")})
    pair = (Slow(choose), Slow(choose))
    whole = measure_quality(source, tokenizer_file, *pair, data, clock=lambda: now_s)
    assert "--no-quality skips it" in capsys.readouterr().err
    part = measure_quality(source, tokenizer_file, *pair, data, budget_s=0.5, clock=lambda: now_s)
    warnings = capsys.readouterr().err
    assert ", within about 0 s (--quality-budget); --no-quality skips it" in warnings
    for task in source.tasks:
        assert 0 < part[task].count < whole[task].count / 4
        assert f"{task} is measured on 1 of 32 parts of its sample" in warnings


@pytest.mark.parametrize("num_wrong", [0, 3])
def test_without_labels_torch_is_right(
    source: Source, tokenizer_file: Path, short: Path, num_wrong: int
) -> None:
    left = num_wrong

    def differ(item: EncoderInput) -> Logits:
        nonlocal left
        left -= 1
        return one_hot([(sum(item.ids) + (left >= 0)) % 2], 2)

    source, data = only(source, "text-classification"), RealData(text=(short,))
    reference = Chosen(lambda item: one_hot([sum(item.ids) % 2], 2))
    quality = measure_quality(source, tokenizer_file, reference, Chosen(differ), data)
    measured = quality["text-classification"]
    assert (measured.metric, measured.torch) == ("agreement", 100)
    assert measured.cost == pytest.approx(100 * num_wrong / measured.count)


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
    assert quality["text-classification"].bundle == agreement


@pytest.mark.parametrize("task", ["text-classification", "multiple-choice"])
@pytest.mark.parametrize(("factor", "agreement"), [(0.5, 100), (-1, 0)])
def test_numbers_agree_where_their_order_does(
    source: Source,
    tokenizer_file: Path,
    short: Path,
    task: TaskName,
    factor: float,
    agreement: float,
) -> None:
    def number(item: EncoderInput) -> float:
        return float(np.random.default_rng(item.ids).random())

    entry = TaskEntry(graph="a.onnx", num_outputs=1, problem_type="regression")
    source, data = only(source, task, entry), RealData(text=(short,))
    reference = Chosen(lambda item: np.array([[number(item)]], np.float32))
    engine = Chosen(lambda item: np.array([[3 + factor * number(item)]], np.float32))
    quality = measure_quality(source, tokenizer_file, reference, engine, data)[task]
    assert (quality.metric, quality.bundle) == ("agreement", agreement)


@pytest.mark.parametrize("num_wrong", [0, 5])
def test_choices_are_marked_by_the_right_one(
    source: Source, tokenizer_file: Path, short: Path, num_wrong: int
) -> None:
    folder = RACE / "train"
    tokenizer, texts = AlbertTokenizer.from_file(tokenizer_file), read_choices([folder])
    length = source.config.max_positions
    examples, _ = choice_examples(texts, tokenizer, length=length, truncation=True)
    rights = {
        tuple(sequence.ids): place == (example.target + (number < num_wrong)) % 4
        for number, example in enumerate(examples)
        for place, sequence in enumerate(example.sequences(tokenizer))
    }
    runner = Chosen(lambda item: np.array([[rights[tuple(item.ids)]]], np.float32))
    entry = TaskEntry(graph="a.onnx", num_outputs=1)
    source = only(source, "multiple-choice", entry)
    data = RealData(text=(short,), choices=(folder,))
    quality = measure_quality(source, tokenizer_file, runner, runner, data)["multiple-choice"]
    assert (quality.metric, quality.count, quality.data) == ("accuracy", len(texts), ["train"])
    assert quality.bundle == pytest.approx(100 * (1 - num_wrong / len(texts)))


def spans(source: Source, tokenizer_file: Path) -> dict[tuple[int, ...], tuple[int, int]]:
    """Where the answer is in the sequence of each question, as finetuning has it."""
    tokenizer = AlbertTokenizer.from_file(tokenizer_file)
    return {
        tuple(window.ids): window.target
        for question in read_squad([SQUAD])
        for window in span_examples(question, tokenizer, length=source.config.max_positions)
    }


def test_answers_are_marked_by_their_words(source: Source, tokenizer_file: Path) -> None:
    """A knowing reference has nearly all: a piece may hold more than an answer's last letter."""
    long = replace(source, config=replace(source.config, max_positions=384))
    known = spans(long, tokenizer_file)

    def answer(item: EncoderInput) -> Logits:
        start, end = known.get(tuple(item.ids), (0, 0))
        logits = np.full((len(item.ids), 2), -30, np.float32)
        logits[[start, end], [0, 1]] = 30
        return logits

    long = only(long, "question-answering")
    data = RealData(text=(), questions=(SQUAD,))
    silent = Chosen(lambda item: np.zeros((len(item.ids), 2), np.float32))
    quality = measure_quality(long, tokenizer_file, Chosen(answer), silent, data)
    measured = quality["question-answering"]
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
        assert measured.cost == pytest.approx(0, abs=1e-9)
    check_quality(quality, 0.0)
    tokenizer = AlbertTokenizer.from_file(tokenizer_file)
    names = source.tasks["text-classification"].labels or []
    labelled_texts, _ = read_labelled([labelled], names)
    texts = classify(model, tokenizer, labelled_texts, names).figures()
    figures = question_figures(answer_questions(model, tokenizer, read_squad([SQUAD])), 0.0)
    accuracy, f1 = texts["text_classification_accuracy"], figures["question_answering_f1"]
    assert quality["text-classification"].torch == pytest.approx(100 * accuracy)
    assert quality["question-answering"].torch == pytest.approx(f1)
    assert f1 > 0


def quality(metric: str, torch: float, bundle: float, count: int = 200) -> Quality:
    return Quality(metric=metric, torch=torch, bundle=bundle, count=count)


def test_what_is_within_the_limits_is_let_through() -> None:
    check_quality(
        {
            "fill-mask": quality("accuracy", 51.0, 50.0),
            "sentence-order": quality("accuracy", 50.0, 80.0),
            "question-answering": quality("agreement", 100.0, 90.0),
        },
        max_cost=1.0,
    )
    check_quality({}, max_cost=0.0)


def test_a_refusal_says_what_is_lost_and_what_can_be_done() -> None:
    with pytest.raises(ExportError) as caught:
        check_quality(
            {
                "fill-mask": quality("accuracy", 51.2, 48.9, 3712),
                "sentence-order": quality("accuracy", 80.0, 79.5),
                "text-classification": quality("accuracy", 90.0, 88.0),
            },
            max_cost=1.0,
        )
    message = str(caught.value)
    assert "fill-mask loses 2.30 points of accuracy, from 51.20 to 48.90 over 3,712" in message
    assert "text-classification loses 2.00 points of accuracy" in message
    assert "(one is 0.5 points)" in message
    assert "sentence-order" not in message
    for option in ("--keep-fp32", "--text", "--max-cost", "--force"):
        assert option in message
    assert "--patience" not in message
    assert "\n" not in message


def test_a_refusal_of_fewer_layers_says_what_they_need() -> None:
    figures: dict[str, Quality] = {"text-classification": quality("accuracy", 90.0, 80.0)}
    with pytest.raises(ExportError, match="--max-layers, or a higher --patience") as caught:
        check_quality(figures, 1.0, is_rounded=False, is_shallow=True)
    assert "--keep-fp32" not in str(caught.value)
    with pytest.raises(ExportError, match=r"--patience.*--keep-fp32"):
        check_quality(figures, 1.0, is_rounded=True, is_shallow=True)


@pytest.mark.parametrize(
    ("task", "mended"),
    [
        ("question-answering", "--question-answering measures it"),
        ("multiple-choice", "--multiple-choice measures it"),
    ],
)
def test_a_disagreement_is_refused_only_where_it_is_large(task: str, mended: str) -> None:
    check_quality({task: quality("agreement", 100.0, 90.5)}, max_cost=1.0)
    figures = {task: quality("agreement", 100.0, 89.5)}
    with pytest.raises(ExportError) as caught:
        check_quality(figures, max_cost=1.0)
    assert f"{task} gives torch's answer in 89.50 % of 200 cases, less than 90 %" in str(
        caught.value
    )
    assert mended in str(caught.value)
    check_quality(figures, max_cost=12.0)  # more is not lost, whatever the labels
