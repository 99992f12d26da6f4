"""Targets of several pieces: against the product of conditional probabilities, piece by piece, by
the model of `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from albert_serve.api.schemas import FilledTarget, FillMaskParameters
from albert_serve.tasks import FillMask, TaskSetup
from tests.albert_serve.task_fixtures import Answerer

WORDS = ["encyclopedic", "▁the", "Wittgenstein", "was"]


@pytest.fixture(scope="module")
def task(task_setup: TaskSetup) -> FillMask:
    return FillMask(task_setup)


@pytest.fixture(scope="module")
def model(checkpoint_dir: Path) -> transformers.AlbertForMaskedLM:
    return transformers.AlbertForMaskedLM.from_pretrained(checkpoint_dir)


def whole(*targets: str, top_k: int = 5, truncation: str = "error") -> FillMaskParameters:
    return FillMaskParameters.model_validate(
        {
            "targets": list(targets),
            "multi_token_targets": True,
            "top_k": top_k,
            "truncation": truncation,
        }
    )


def pieces_of(task: FillMask, target: str) -> list[int]:
    token = task.setup.tokenizer.token_id(target)
    return task.setup.tokenizer.encode_plain(target).ids if token is None else [token]


@torch.inference_mode()
def product(
    model: transformers.AlbertForMaskedLM,
    ids: list[int],
    mask: int,
    pieces: list[int],
    mask_id: int,
) -> float:
    """P(first | masks) P(second | first, masks) ..., with as many masks as pieces."""
    score = 1.0
    for number, piece in enumerate(pieces):
        middle = [*pieces[:number], *[mask_id] * (len(pieces) - number)]
        read = torch.tensor([[*ids[:mask], *middle, *ids[mask + 1 :]]])
        score *= float(model(read).logits[0, mask + number].softmax(-1)[piece])
    return score


@pytest.mark.parametrize("text", ["The [MASK] erupted.", "A [MASK] in [MASK] ."])
def test_a_score_is_the_product_over_the_pieces(
    text: str, task: FillMask, answer: Answerer, model: transformers.AlbertForMaskedLM
) -> None:
    result = answer(task.prepare(text, whole(*WORDS)))
    ids = task.setup.tokenizer.encode(text).ids
    masks = [i for i, token in enumerate(ids) if token == task.setup.tokenizer.mask_id]
    by_mask: list[list[FilledTarget]] = [result] if len(masks) == 1 else result
    assert max(len(pieces_of(task, word)) for word in WORDS) > 2
    for mask, targets in zip(masks, by_mask, strict=True):
        scores = {tuple(one.tokens): one.score for one in targets}
        assert scores == {
            tuple(pieces): pytest.approx(
                product(model, ids, mask, pieces, task.setup.tokenizer.mask_id), rel=1e-4
            )
            for pieces in (pieces_of(task, word) for word in WORDS)
        }
        assert sorted(scores.values(), reverse=True) == list(scores.values())


def test_the_sequence_has_the_whole_target(task: FillMask, answer: Answerer) -> None:
    [one] = answer(task.prepare("A [MASK] it is.", whole("Encyclopedic")))
    assert one.token_str == "encyclopedic"
    assert one.sequence == "a encyclopedic it is."
    assert one.token == one.tokens[0]
    assert one.tokens == task.setup.tokenizer.encode_plain("encyclopedic").ids
    [several, _] = answer(task.prepare("[MASK] or [MASK]", whole("Encyclopedic")))
    assert several[0].sequence == "[CLS] encyclopedic or[MASK][SEP]"


def test_top_k_and_doubles(task: FillMask, answer: Answerer) -> None:
    every = answer(task.prepare("a [MASK]", whole(*WORDS, *WORDS)))
    assert len(every) == len(WORDS)
    assert answer(task.prepare("a [MASK]", whole(*WORDS, top_k=2))) == every[:2]


def test_no_text_is_read_twice(task: FillMask) -> None:
    words = ["encyclopedic", "encyclopedic", "encyclopedias"]
    inputs = task.prepare("a [MASK]", whole(*words)).inputs
    read = {(tuple(item.ids), tuple(item.rows or [])) for item in inputs}
    assert len(read) == len(inputs) < sum(len(pieces_of(task, word)) for word in words)


def test_a_text_is_cut_so_far_that_the_longest_target_has_room(
    task: FillMask, answer: Answerer
) -> None:
    prepared = task.prepare("[MASK] " + "e " * 61, whole("encyclopedic", truncation="truncate"))
    assert max(len(item.ids) for item in prepared.inputs) == 128
    assert prepared.num_truncated > 0
    assert answer(prepared)[0].sequence.startswith("encyclopedic e")
