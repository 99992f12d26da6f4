"""The start-conditioned head has the numbers of `transformers`, and the loss of run_squad_v2.

The oracle is XLM's `SQuADHead`, the same modules as XLNet's, on top of an `AlbertModel`.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers.models.xlm.modeling_xlm import XLMSQuADHead

from albert_serve.bundle.weights import NUM_BEAMS
from tests.training.support import TINY, randomize
from training.data.batch import ExampleBatch, TokenisedExample
from training.data.collate import collate_examples
from training.finetuning.questions import conditioned_loss
from training.model.albert import ModelInputs
from training.model.checkpoint import (
    CheckpointError,
    load_checkpoint,
    parameters,
    read_config,
    read_weights,
    save_checkpoint,
    write_weights,
)
from training.model.heads import AlbertForTasks, head_sizes
from training.model.start_conditioned import StartConditionedHead

TASK: Final = "question-answering"


def windows() -> list[TokenisedExample]:
    """Windows of a question and its context; one without the answer."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for num_question, num_context, start, end in ((2, 9, 3, 5), (4, 3, 1, 1), (1, 12, None, None)):
        size = num_question + num_context + 3
        first = num_question + 2
        made.append(
            TokenisedExample(
                ids=[2, *torch.randint(5, 50, (size - 1,), generator=generator).tolist()],
                types=[0] * first + [1] * (num_context + 1),
                target=(0, 0) if start is None or end is None else (first + start, first + end),
            )
        )
    return made


def answerable(example: TokenisedExample) -> list[int]:
    """Where an answer can be, and [CLS]."""
    return [0, *range(example.types.index(1), len(example.ids) - 1)]


@pytest.fixture(scope="module")
def ours() -> AlbertForTasks:
    model = AlbertForTasks(TINY, head_sizes(TINY, (TASK,), question_head="start-conditioned"))
    randomize(model, 0)
    return model.double().eval()


@pytest.fixture(scope="module")
def saved(ours: AlbertForTasks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start-conditioned") / "checkpoint"
    save_checkpoint(ours, folder)
    return folder


@pytest.fixture(scope="module")
def theirs(ours: AlbertForTasks, saved: Path) -> tuple[Any, Any]:
    """The backbone, which `transformers` reads from our checkpoint, and the head, in float64."""
    backbone: Any = transformers.AlbertModel.from_pretrained(saved, dtype=torch.float64)
    config: Any = SimpleNamespace(
        hidden_size=TINY.hidden_size,
        layer_norm_eps=TINY.layer_norm_eps,
        start_n_top=NUM_BEAMS,
        end_n_top=NUM_BEAMS,
    )
    head: Any = XLMSQuADHead(config).double()
    backbone_names = tuple(f"albert.{name}" for name, _ in backbone.named_parameters())
    stored = parameters(ours)
    head.load_state_dict(
        {name: each.detach() for name, each in stored.items() if name not in backbone_names}
    )
    return backbone.eval(), head.eval()


def their_hidden(theirs: tuple[Any, Any], example: TokenisedExample) -> Tensor:
    hidden: Tensor = theirs[0](
        input_ids=torch.tensor([example.ids]), token_type_ids=torch.tensor([example.types])
    ).last_hidden_state
    return hidden


def p_mask(example: TokenisedExample) -> Tensor:
    mask_1S = torch.ones(1, len(example.ids), dtype=torch.float64)
    mask_1S[0, answerable(example)] = 0.0
    return mask_1S


@torch.inference_mode()
@pytest.mark.parametrize("number", range(3))
def test_logits_are_those_of_transformers(
    number: int, ours: AlbertForTasks, theirs: tuple[Any, Any]
) -> None:
    """Starts, ends given each of the best starts, and answerability, of one window."""
    example = windows()[number]
    batch = ModelInputs(ids=torch.tensor([example.ids]), types=torch.tensor([example.types]))
    rows = answerable(example)
    logits = ours.logits(TASK, ours(batch)[0, rows])

    hidden, mask = their_hidden(theirs, example), p_mask(example)
    cls_index = torch.tensor([0])
    num_starts = min(NUM_BEAMS, len(rows))
    theirs[1].start_n_top = theirs[1].end_n_top = num_starts
    found = theirs[1](hidden, p_mask=mask, cls_index=cls_index, return_dict=True)

    assert (logits[:, 1] - found.cls_logits).abs().max() < 1e-10
    start_shares = logits[:, 0].softmax(0)
    best = start_shares.topk(num_starts)
    assert (best.values - found.start_top_log_probs[0]).abs().max() < 1e-10
    assert torch.tensor(rows)[best.indices].tolist() == found.start_top_index[0].tolist()
    # Theirs are the best ends of each start, in (end, start) order.
    end_shares = logits[:, 2 : 2 + num_starts].softmax(0).topk(num_starts, dim=0)
    assert (end_shares.values.flatten() - found.end_top_log_probs[0]).abs().max() < 1e-10
    ends = torch.tensor(rows)[end_shares.indices].flatten()
    assert ends.tolist() == found.end_top_index[0].tolist()
    assert not logits[:, 2 + num_starts :].any()


def packed() -> ExampleBatch:
    return collate_examples(TASK, windows(), row_length=16)


@torch.inference_mode()
def test_the_loss_is_that_of_transformers_and_half_that_of_answerability(
    ours: AlbertForTasks, theirs: tuple[Any, Any]
) -> None:
    """The end is conditioned on the true start; the answerability, as in the original, is not."""
    expected = torch.zeros((), dtype=torch.float64)
    for example in windows():
        hidden, mask = their_hidden(theirs, example), p_mask(example)
        start, end = (torch.tensor([each]) for each in example.target)
        loss = theirs[1](
            hidden, start_positions=start, end_positions=end, p_mask=mask, return_dict=True
        ).loss
        shares = theirs[1].start_logits(hidden, p_mask=mask).softmax(-1)
        summary = torch.einsum("blh,bl->bh", hidden, shares)
        logit = theirs[1].answer_class(hidden, start_states=summary, cls_index=torch.tensor([0]))
        target = torch.tensor([float(example.target[0] == 0)], dtype=torch.float64)
        expected += loss + 0.5 * F.binary_cross_entropy_with_logits(logit, target)

    score = conditioned_loss(ours, packed())[TASK]

    assert score.count == 3
    # Logits are rounded to fp32 before the loss.
    assert float(score.loss) == pytest.approx(float(expected), rel=1e-5)


def test_a_checkpoint_is_read_back(ours: AlbertForTasks, saved: Path) -> None:
    again = load_checkpoint(saved)
    assert again.tasks == {TASK: 2 + NUM_BEAMS}
    assert isinstance(again.heads[TASK], StartConditionedHead)
    for name, parameter in parameters(ours).items():
        assert torch.equal(parameter.float(), parameters(again)[name].float()), name
    # `transformers` has no class that reads it: AlbertForQuestionAnswering would begin another.
    assert read_config(saved)["architectures"] == ["AlbertModel"]


def test_half_a_head_is_refused(saved: Path, tmp_path: Path) -> None:
    weights = read_weights(saved)
    del weights["answer_class.dense_1.weight"]
    (tmp_path / "config.json").write_text(json.dumps(read_config(saved)))
    write_weights(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no answer_class\.dense_1\.weight"):
        load_checkpoint(tmp_path)
