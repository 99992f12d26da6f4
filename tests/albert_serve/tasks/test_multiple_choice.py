"""Multiple choice against `transformers.AlbertForMultipleChoice`; its texts and its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from albert_serve.api.schemas import ChoiceQuestion, ChoiceScore, MultipleChoiceParameters
from albert_serve.tasks import MultipleChoice, TaskSetup
from albert_serve.tasks.multiple_choice import with_choice
from albert_serve.tasks.truncation import split_choice
from tests.albert_serve.task_fixtures import TorchEngine
from training.model.checkpoint import load_checkpoint

DEFAULT = MultipleChoiceParameters()
CUT = MultipleChoiceParameters(truncation="truncate")
CONTEXT = "The bridge over the river was built in 1932 and closed to cars in 1988."


@pytest.fixture
def task(task_setup: TaskSetup) -> MultipleChoice:
    return MultipleChoice(task_setup)


def item(context: str, *choices: str, question: str | None = None) -> ChoiceQuestion:
    return ChoiceQuestion(context=context, question=question, choices=list(choices))


@pytest.mark.parametrize("num_choices", [2, 3, 5])
def test_probabilities_are_those_of_transformers(
    choice_checkpoint_dir: Path, task: MultipleChoice, sentences: list[str], num_choices: int
) -> None:
    engine = TorchEngine(load_checkpoint(choice_checkpoint_dir))
    theirs: Any = transformers.AlbertForMultipleChoice.from_pretrained(choice_checkpoint_dir)
    theirs.eval()
    encode: Any = transformers.AutoTokenizer.from_pretrained(choice_checkpoint_dir)
    encode.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    context, *choices = sentences[: num_choices + 1]
    pairs = [f"He said: {choice}" for choice in choices]
    encoded = encode([context] * num_choices, pairs, padding=True, return_tensors="pt")
    with torch.inference_mode():
        logits = theirs(**{name: tensor[None] for name, tensor in encoded.items()}).logits
    prepared = task.prepare(item(context, *choices, question="He said:"), DEFAULT)
    rows = engine.run(prepared.inputs)
    np.testing.assert_allclose(np.concatenate(rows)[:, 0], logits[0].numpy(), atol=1e-4)
    answer = prepared.finish(rows)
    assert isinstance(answer, list)
    expected = logits[0].softmax(-1)
    assert [one.index for one in answer] == expected.argsort(descending=True).tolist()
    for one in answer:
        assert one.label == choices[one.index]
        assert one.score == pytest.approx(float(expected[one.index]), abs=1e-4)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (None, "cars"),
        ("It was closed to", "It was closed to cars"),
        ("It was closed to _ in 1988.", "It was closed to cars in 1988."),
        ("Closed to ___?", "Closed to cars?"),
        ("_ and _", "cars and cars"),
        ("Closed to_.", "Closed tocars."),  # as in RACE, and by the original's `replace`
    ],
)
def test_a_choice_stands_in_the_blank_or_at_the_end(question: str | None, expected: str) -> None:
    assert with_choice(question, "cars") == expected
    assert with_choice(question, r"\1") == expected.replace("cars", r"\1")


def finish(
    task: MultipleChoice, logits: list[float], top_k: int | None = None
) -> list[ChoiceScore]:
    choices = [f"choice {number}" for number in range(len(logits))]
    prepared = task.prepare(item("a", *choices), MultipleChoiceParameters(top_k=top_k))
    answer = prepared.finish([np.array([[logit]], np.float32) for logit in logits])
    assert isinstance(answer, list)
    return answer


def test_the_best_choice_is_first_and_equal_ones_keep_their_order(task: MultipleChoice) -> None:
    answer = finish(task, [0.0, 2.0, 0.0, 1.0])
    assert [one.index for one in answer] == [1, 3, 0, 2]
    assert sum(one.score for one in answer) == pytest.approx(1)
    assert [one.index for one in finish(task, [0.0, 2.0, 1.0], top_k=2)] == [1, 2]
    extreme = finish(task, [3e38, -3e38])
    assert [one.score for one in extreme] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("num_context", "num_choice", "max_positions", "expected"),
    [
        (10, 5, 18, (10, 5)),  # they fit
        (100, 5, 18, (10, 5)),  # the context is cut
        (2, 100, 18, (2, 13)),  # the choice has what the context leaves
        (100, 100, 18, (8, 7)),  # half of few positions are the choice's
        (1000, 1000, 512, (381, 128)),  # of many, 128 tokens
        (0, 600, 512, (0, 509)),
    ],
)
def test_the_context_is_cut_first(
    num_context: int, num_choice: int, max_positions: int, expected: tuple[int, int]
) -> None:
    assert split_choice(num_context, num_choice, max_positions) == expected


def test_what_was_cut_is_reported(task: MultipleChoice) -> None:
    context = "a " * 200
    prepared = task.prepare(item(context, "b", "b b b"), CUT)
    assert [len(each.ids) for each in prepared.inputs] == [128, 128]
    whole = [200 + len(task.setup.tokenizer.encode_plain(text)) + 3 for text in ("b", "b b b")]
    assert prepared.num_truncated == sum(whole) - 2 * 128
    num_kept = 128 - 3 - len(task.setup.tokenizer.encode_plain("b b b"))
    assert prepared.cuts == {".context": 2 * num_kept}  # the shortest beginning
    question = "a " * 200 + "end"
    prepared = task.prepare(item("short", "b", "c", question=question), CUT)
    [begin] = prepared.cuts.values()
    assert list(prepared.cuts) == [".question"]
    assert question[begin:].strip().endswith("end")
    assert 0 < begin < len(question)
    prepared = task.prepare(item("short", "b", "a " * 300), CUT)
    assert list(prepared.cuts) == [".choices[1]"]


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("_ " + "a " * 200 + "end", "a"),  # the blank is before the cut
        ("_ and __ " + "a " * 200 + "_", "a"),  # two are, and one is after it
        ("a " * 200 + "_ " + "a " * 50 + "_", "a"),
        ("a " * 200 + "_", "_"),  # the cut is in the choice
        ("a " * 200, ""),
    ],
)
def test_the_offset_of_a_cut_in_a_question_with_blanks(
    task: MultipleChoice, question: str, expected: str
) -> None:
    """The words that are read are those of the filled question's end, of the longest choice."""
    choice = "c " * (150 if expected in ("_", "") else 7) + "c"
    prepared = task.prepare(item("short", "c", choice, question=question), CUT)
    rest = question[prepared.cuts[".question"] :]
    assert rest.strip()[:1] == expected
    if expected == "a":
        filled = task.setup.tokenizer.encode_plain(rest.replace("_", choice)).ids
        num_first = len(task.setup.tokenizer.encode_plain("short")) + 2
        assert prepared.inputs[1].ids[num_first:-1] == filled
