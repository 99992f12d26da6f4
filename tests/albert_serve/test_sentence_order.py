"""Sentence order against the head that `transformers` reads from the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from albert_serve.errors import InvalidInputError, TextTooLongError
from albert_serve.schemas import SentenceOrderParameters, TextPair
from albert_serve.tasks import SentenceOrder, TaskSetup
from tests.albert_serve.task_fixtures import Answerer

DEFAULT = SentenceOrderParameters()


@pytest.fixture(scope="module")
def task(task_setup: TaskSetup) -> SentenceOrder:
    return SentenceOrder(tokenizer=task_setup.tokenizer, max_positions=task_setup.max_positions)


def test_the_probability_is_that_of_label_0(
    task: SentenceOrder, answer: Answerer, checkpoint_dir: Path, sentences: list[str]
) -> None:
    model = transformers.AlbertForPreTraining.from_pretrained(checkpoint_dir)
    oracle = transformers.AutoTokenizer.from_pretrained(checkpoint_dir)
    for first, second in zip(sentences[:4], sentences[4:8], strict=True):
        texts = (first[:60], second[:60])
        with torch.inference_mode():
            encoded = oracle(*texts, return_tensors="pt", return_token_type_ids=True)
            logits = model(**encoded).sop_logits[0]
        found = answer(task.prepare(TextPair(text=texts[0], text_pair=texts[1]), DEFAULT))
        assert found.in_order == pytest.approx(logits.softmax(-1)[0].item(), abs=1e-5)


@pytest.mark.parametrize(("name", "pair"), [("text", ("  ", "b")), ("text_pair", ("a", ""))])
def test_an_empty_text_is_refused_by_name(
    name: str, pair: tuple[str, str], task: SentenceOrder
) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name} is empty"):
        task.prepare(TextPair(text=pair[0], text_pair=pair[1]), DEFAULT)


def test_a_long_pair_is_refused_or_truncated(task: SentenceOrder, answer: Answerer) -> None:
    pair = TextPair(text="a " * 100, text_pair="b " * 100)
    with pytest.raises(TextTooLongError):
        task.prepare(pair, DEFAULT)
    prepared = task.prepare(pair, SentenceOrderParameters(truncation="truncate"))
    assert prepared.num_tokens == 128
    assert 0 < answer(prepared).in_order < 1
