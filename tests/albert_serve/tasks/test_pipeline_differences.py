"""Each row of the tables of differences from `transformers`' pipelines, asked of both sides."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import pydantic_core
import pytest
import transformers
from pydantic import ValidationError
from transformers.pipelines.base import PipelineException

from albert_serve.errors import NoMaskError, TextTooLongError
from albert_serve.tasks import TASKS, Prepared, TaskSetup, open_task, prepare_request, shape_reply
from tests.albert_serve.task_fixtures import Answerer

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES: Final = {
    "fill-mask": "fill-mask.md",
    "text-classification": "text-classification.md",
    "feature-extraction": "embeddings.md",
}
LONG = "word " * 200
PAIR = {"text": "A dog runs.", "text_pair": "An animal moves."}


@dataclass(frozen=True, kw_only=True)
class Sides:
    """A task of this package, and the pipeline of `transformers` over the same checkpoint."""

    task: str
    setup: TaskSetup
    answer: Answerer
    pipeline: Any

    def prepare(self, inputs: Any, **parameters: Any) -> tuple[Any, list[Prepared[Any]]]:
        body = {"inputs": inputs, "parameters": parameters}
        request = TASKS[self.task].request.model_validate(body)
        return request, prepare_request(open_task(self.task, self.setup), request)

    def here(self, inputs: Any, **parameters: Any) -> Any:
        request, prepared = self.prepare(inputs, **parameters)
        reply = shape_reply(request, [self.answer(item) for item in prepared])
        return pydantic_core.to_jsonable_python(reply)


@pytest.fixture(scope="module")
def sides(checkpoint_dir: Path, task_setup: TaskSetup, answer: Answerer) -> dict[str, Sides]:
    make: Any = transformers.pipeline
    return {
        task: Sides(
            task=task,
            setup=task_setup,
            answer=answer,
            pipeline=make(task, model=str(checkpoint_dir), device="cpu"),
        )
        for task in PAGES
    }


def assert_refused(sides: Sides, **parameters: Any) -> None:
    with pytest.raises(ValidationError, match="is not known here; allowed are"):
        sides.here("a [MASK]", **parameters)


def assert_too_long(sides: Sides, text: str, **truncation: Any) -> None:
    """Refused by both, or by both cut."""
    with pytest.raises(TextTooLongError):
        sides.here(text)
    with pytest.raises((IndexError, RuntimeError)):
        sides.pipeline(text)
    _, (cut,) = sides.prepare(text, truncation=True)
    assert cut.num_tokens == sides.setup.max_positions
    assert sides.pipeline(text, **truncation)


def fill_mask_list(sides: Sides) -> None:
    [answer] = sides.here(["a [MASK]"])
    one = sides.pipeline(["a [MASK]"])
    assert [each["token"] for each in answer] == [each["token"] for each in one]
    assert len(sides.pipeline(["a [MASK]"] * 2)) == len(sides.here(["a [MASK]"] * 2)) == 2


def fill_mask_target(sides: Sides) -> None:
    target = "supervolcanoes"
    with mock.patch("transformers.pipelines.fill_mask.logger.warning") as warn:
        [expected] = sides.pipeline("a [MASK]", targets=target)
    assert target in warn.call_args.args[0]
    _, (prepared,) = sides.prepare("a [MASK]", targets=target)
    assert target in prepared.warnings[0]
    [found] = sides.here("a [MASK]", targets=target)
    assert found["token"] == expected["token"]


def fill_mask_long(sides: Sides) -> None:
    assert_too_long(sides, f"[MASK] {LONG}", tokenizer_kwargs={"truncation": True})


def fill_mask_none(sides: Sides) -> None:
    with pytest.raises(NoMaskError):
        sides.here("nothing")
    with pytest.raises(PipelineException):
        sides.pipeline("nothing")


def fill_mask_unknown(sides: Sides) -> None:
    assert_refused(sides, tokenizer_kwargs={})
    assert_refused(sides, top_p=1)
    with pytest.raises(TypeError):
        sides.pipeline("a [MASK]", top_p=1)


def fill_mask_own(sides: Sides) -> None:
    for parameter in ({"joint": True}, {"multi_token_targets": True, "targets": "supervolcanoes"}):
        assert "tokens" in sides.here("a [MASK]", **parameter)[0]
        with pytest.raises(TypeError):
            sides.pipeline("a [MASK]", **parameter)


def labels_default(sides: Sides) -> None:
    [labels] = sides.here("a film")
    [best] = sides.pipeline("a film")
    assert labels[0]["label"] == best["label"]
    assert len(labels) == 2


def labels_one(sides: Sides) -> None:
    assert [[len(each) for each in labels] for labels in sides.here("a film")] == [[2, 2]]
    assert [*map(type, sides.pipeline("a film"))] == [dict]
    assert [*map(type, sides.pipeline("a film", top_k=2))] == [dict, dict]


def labels_list(sides: Sides) -> None:
    assert [*map(len, sides.here(["a film"]))] == [2]
    assert [*map(type, sides.pipeline(["a film"]))] == [dict]
    [labels] = sides.pipeline(["a film"], top_k=2)
    assert [*map(type, labels)] == [dict, dict]


def labels_all(sides: Sides) -> None:
    assert sides.here("a film") == sides.here("a film", top_k=None)
    assert len(sides.pipeline("a film", top_k=None)) == 2


def labels_function(sides: Sides) -> None:
    with pytest.raises(ValidationError):
        sides.here("a film", function_to_apply="SIGMOID")
    assert sides.here("a film", function_to_apply=None) == sides.here("a film")
    [[best, _]] = sides.here("a film", function_to_apply="sigmoid")
    [expected] = sides.pipeline("a film", function_to_apply="Sigmoid")
    assert best["score"] == pytest.approx(expected["score"], abs=1e-5)


def labels_unknown(sides: Sides) -> None:
    assert_refused(sides, max_length=3)
    # Three tokens are read, [CLS] and [SEP] among them.
    [short] = sides.pipeline("a " * 200, truncation=True, max_length=3)
    [expected] = sides.pipeline("a")
    assert short["score"] == pytest.approx(expected["score"], abs=1e-5)


def labels_long(sides: Sides) -> None:
    assert_too_long(sides, LONG, truncation=True)


def labels_types(sides: Sides) -> None:
    _, (prepared,) = sides.prepare(PAIR)
    assert set(prepared.inputs[0].types) == {0, 1}
    tokenizer = sides.pipeline.tokenizer
    assert tokenizer(**PAIR)["token_type_ids"] == list(prepared.inputs[0].types)
    listed, tokenizer.model_input_names = (
        tokenizer.model_input_names,
        type(tokenizer).model_input_names,
    )
    try:
        assert "token_type_ids" not in tokenizer(**PAIR)
    finally:
        tokenizer.model_input_names = listed


def vectors_pooled(sides: Sides) -> None:
    [tokens] = sides.pipeline("It rained.")
    np.testing.assert_allclose(sides.here("It rained."), np.mean(tokens, axis=0), atol=1e-4)
    [unpooled] = sides.here("It rained.", pooling="none")
    np.testing.assert_allclose(unpooled, tokens, atol=1e-4)


def vectors_unknown(sides: Sides) -> None:
    assert_refused(sides, pool="max")
    assert sides.pipeline("It rained.", pool="max") == sides.pipeline("It rained.")


def vectors_long(sides: Sides) -> None:
    assert_too_long(sides, LONG, truncation=True)


def vectors_rounded(sides: Sides) -> None:
    assert [round(number, 8) for number in sides.here("It rained.")] == sides.here("It rained.")
    [tokens] = sides.pipeline("It rained.")
    assert any(round(number, 8) != number for number in tokens[0])


CHECKS: Final[dict[str, dict[str, Callable[[Sides], None]]]] = {
    "fill-mask": {
        "reply to a list of one text": fill_mask_list,
        "a target that the vocabulary lacks": fill_mask_target,
        "a text that is too long": fill_mask_long,
        "a text without a mask": fill_mask_none,
        "unknown parameters, `tokenizer_kwargs` among them": fill_mask_unknown,
        "`joint`, `multi_token_targets`": fill_mask_own,
    },
    "text-classification": {
        "labels without `top_k`": labels_default,
        "reply to one text": labels_one,
        "reply to a list of one text": labels_list,
        "all labels": labels_all,
        "`function_to_apply`": labels_function,
        "unknown parameters": labels_unknown,
        "a text that is too long": labels_long,
        "token types of a pair": labels_types,
    },
    "feature-extraction": {
        "answer to a text": vectors_pooled,
        "unknown parameters": vectors_unknown,
        "a text that is too long": vectors_long,
        "numbers": vectors_rounded,
    },
}


def rows_of(task: str) -> list[str]:
    """The first cells of the table of differences."""
    page = (DOCS / PAGES[task]).read_text(encoding="utf-8")
    section = page.split("\n## Differences from the pipeline", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| ([^|-]+?) \| ", section, re.MULTILINE)


@pytest.mark.parametrize("task", PAGES)
def test_every_row_is_asked(task: str) -> None:
    assert rows_of(task) == list(CHECKS[task])


@pytest.mark.parametrize(("task", "row"), [(task, row) for task in CHECKS for row in CHECKS[task]])
def test_a_row_is_true(task: str, row: str, sides: dict[str, Sides]) -> None:
    CHECKS[task][row](sides[task])
