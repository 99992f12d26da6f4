"""Masks filled together: against every filling that there is, scored with `transformers`' model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from albert_serve.api.schemas import MAX_JOINT_TOP_K, FillMaskParameters
from albert_serve.tasks import FillMask, Round, TaskSetup
from tests.albert_serve.task_fixtures import Answerer

JOINT = FillMaskParameters(joint=True)
TARGETS = ["▁the", "▁of", "▁in", "▁was", "▁and"]

# The probabilities of the vocabulary at a place of a text, by the model of transformers.
Shares = Callable[[Sequence[int], int], Any]


@pytest.fixture(scope="module")
def task(task_setup: TaskSetup) -> FillMask:
    return FillMask(task_setup)


@pytest.fixture(scope="module")
def shares(checkpoint_dir: Path) -> Shares:
    model = transformers.AlbertForMaskedLM.from_pretrained(checkpoint_dir)

    @torch.inference_mode()
    def read(ids: Sequence[int], place: int) -> Any:
        logits = model(torch.tensor([list(ids)])).logits[0, place]
        return logits.double().softmax(-1).numpy()

    return read


def fill(ids: Sequence[int], place: int, token: int) -> list[int]:
    return [*ids[:place], token, *ids[place + 1 :]]


def on_the_surest_path(
    shares: Shares, ids: list[int], masks: Sequence[int], tokens: dict[int, int], allowed: list[int]
) -> float:
    """The score of one filling, filled in as the documentation says."""
    remaining, score = list(masks), 1.0
    while remaining:
        read = {place: shares(ids, place) for place in remaining}
        surest = max(remaining, key=lambda place: read[place][allowed].max())
        score *= read[surest][tokens[surest]]
        ids = fill(ids, surest, tokens[surest])
        remaining.remove(surest)
    return score


@pytest.mark.parametrize("num_masks", [2, 3])
def test_the_best_of_all_fillings_are_found(
    num_masks: int, task: FillMask, answer: Answerer, shares: Shares
) -> None:
    text = " ".join(["[MASK] it"] * (num_masks - 1) + ["is [MASK]"])
    targets = TARGETS[: 5 if num_masks == 2 else 2]  # no more than the beam is wide
    result = answer(
        task.prepare(text, FillMaskParameters(joint=True, targets=targets, top_k=MAX_JOINT_TOP_K))
    )
    ids = task.setup.tokenizer.encode(text).ids
    masks = [i for i, token in enumerate(ids) if token == task.setup.tokenizer.mask_id]
    allowed = [token for target in targets if (token := task.setup.tokenizer.token_id(target))]
    scores = {
        tokens: on_the_surest_path(
            shares, ids, masks, dict(zip(masks, tokens, strict=True)), allowed
        )
        for tokens in product(allowed, repeat=num_masks)
    }
    best = sorted(scores, key=lambda tokens: -scores[tokens])[:MAX_JOINT_TOP_K]
    assert [tuple(one.tokens) for one in result] == best
    assert [one.score for one in result] == pytest.approx([scores[tokens] for tokens in best], 1e-4)


def test_there_is_a_round_for_each_mask_and_the_beam_stays_narrow(
    task: FillMask, engine: Any
) -> None:
    stage: Any = task.prepare("[MASK] is [MASK] and [MASK] .", JOINT)
    widths = []
    while isinstance(stage, Round):
        widths.append(len(stage.inputs))
        stage = stage.finish(engine.run(stage.inputs))
    assert widths == [1, 8, 8]
    assert len(stage) == 5
    assert len({tuple(one.tokens) for one in stage}) == 5
