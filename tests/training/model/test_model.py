"""Our model computes the same as `transformers`, also on packed rows, and shares its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Final, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from albert_serve.config import Activation, AlbertConfig, Sharing
from albert_serve.errors import ConfigError
from tests.training.support import (
    TINY,
    assert_close,
    each_class,
    each_sharing,
    hf_logits,
    our_and_hf_models,
    our_logits,
    our_model,
    ragged,
)
from training.model.albert import Albert, Attention, ModelInputs, Packing
from training.model.heads import AlbertForTasks, Task
from training.model.hf_names import parameters
from training.model.initialization import start_local

CONFIGS: Final[dict[str, AlbertConfig]] = {
    "base": TINY,
    "groups": replace(TINY, num_groups=3),
    "inner": replace(TINY, num_inner_layers=2),
    "groups and inner": replace(TINY, num_groups=2, num_inner_layers=2),
    "E is H": replace(TINY, embedding_size=24),
    "gelu": replace(TINY, activation="gelu"),
    "odd": replace(TINY, num_layers=5, num_groups=2, num_heads=1, num_token_types=3),
}


def assert_close_to_scale(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float = 1e-10
) -> None:
    """Like `assert_close`, but relative to the largest number if that is over 1."""
    scale = max(float(tensor.abs().max()) for tensor in actual.values())
    assert_close(actual, expected, limit * max(scale, 1))


@each_class
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_and_gradients_equal_transformers(config: AlbertConfig, class_name: str) -> None:
    """In training mode, which gives the gradients, attention on a CPU is two plain products."""
    ours, theirs = our_and_hf_models(config, class_name)
    with torch.no_grad():
        assert_close(our_logits(ours, ragged()), hf_logits(theirs, ragged()))
    for model, logits in ((ours, our_logits), (theirs, hf_logits)):
        model.train()
        loss = sum(x.square().sum() + x.sin().sum() for x in logits(model, ragged()).values())
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
    our_gradients = {name: p.grad for name, p in parameters(ours).items() if p.grad is not None}
    assert our_gradients.keys() == parameters(ours).keys()
    hf_gradients = {name: p.grad for name, p in theirs.named_parameters()}
    assert_close_to_scale(our_gradients, hf_gradients)


@pytest.mark.parametrize(
    ("sharing", "num_groups", "num_attentions", "num_ffns"),
    [
        ("all", 1, 1, 1),
        ("all", 2, 2, 2),
        ("none", 2, 4, 4),
        ("attention", 2, 2, 4),
        ("ffn", 2, 4, 2),
    ],
)
def test_layers_share_attention_and_ffn_objects(
    sharing: Sharing, num_groups: int, num_attentions: int, num_ffns: int
) -> None:
    model = Albert(replace(TINY, sharing=sharing, num_groups=num_groups)).eval()
    blocks = [model.encoder.attentions, model.encoder.ffns]
    calls: Counter[int] = Counter()
    for block in chain(*blocks):
        block.register_forward_hook(lambda module, *_: calls.update([id(module)]))
    model(ragged())
    for objects, num_objects in zip(blocks, (num_attentions, num_ffns), strict=True):
        assert [calls[id(block)] for block in objects] == [4 // num_objects] * num_objects


def test_initial_weights_are_distributed_as_in_the_original_code() -> None:
    """Matrices are normal, truncated at two standard deviations. Norms are the identity."""
    torch.manual_seed(0)
    model = AlbertForTasks(replace(TINY, hidden_size=240), {"fill-mask": 50, "sentence-order": 2})
    for name, weight in model.named_parameters():
        parameter = weight.detach()
        if "norm" in name:
            assert torch.equal(parameter, torch.full_like(parameter, name.endswith("weight")))
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            assert 0.02 < parameter.abs().max() <= 0.04 + 1e-6, name
            assert abs(float(parameter.std()) - 0.0176) < 0.004, name


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"text-classification": 2, "multiple-choice": 1}, "have the same name for their weights"),
        ({"text-classification/mood": 2}, "requires a default classifier"),
        ({"ranking": 1}, "'ranking' is not a task"),
        ({"fill-mask": 51}, r"fill-mask has 51 outputs\. It must have 50"),
        ({"text-classification": 0}, "must have at least 1"),
    ],
)
def test_impossible_heads_are_rejected(tasks: dict[Task, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AlbertForTasks(TINY, tasks)


def test_sequences_have_at_most_as_many_tokens_as_the_model_has_positions() -> None:
    model = AlbertForTasks(TINY, {"fill-mask": 50})
    model(ragged((TINY.max_positions,)))
    with pytest.raises(ValueError, match=f"have {TINY.max_positions + 1} tokens, more than"):
        model(ragged((TINY.max_positions + 1,)))


@torch.no_grad()
def test_each_attention_head_of_the_local_start_attends_to_one_neighbour() -> None:
    """The neighbours of heads 0 to 3 are one back, one ahead, two back and two ahead."""
    torch.manual_seed(0)
    config = replace(
        TINY, embedding_size=64, hidden_size=128, num_heads=4, num_groups=2, max_positions=32
    )
    model = AlbertForTasks(config, {"fill-mask": 50}).eval()
    start_local(model, np.arange(50) ** 2)
    # The first half of an embedding has the position, the second half the word.
    word, position = model.albert.embeddings.word.weight, model.albert.embeddings.position.weight
    assert [weight.any(0).nonzero().flatten().tolist() for weight in (position, word)] == [
        [*range(32)],
        [*range(32, 64)],
    ]
    batch = ragged((32, 32, 32))
    x_bsh = model.albert.embeddings(batch.ids, batch.types, None)
    for block in model.albert.encoder.attentions:
        assert isinstance(block, Attention)
        query, key = (
            part(x_bsh).unflatten(-1, (4, -1)).transpose(1, 2) for part in (block.query, block.key)
        )
        scores_bnss = query @ key.transpose(-1, -2) / 32**0.5
        weights_bns, neighbours_bns = scores_bnss.softmax(-1).max(-1)
        offsets = neighbours_bns[:, :, 2:-2] - torch.arange(2, 30)
        for head, expected in enumerate((-1, 1, -2, 2)):
            assert (offsets[:, head] == expected).float().mean() > 0.9
            assert 0.7 < weights_bns[:, head, 2:-2].mean() < 0.9


# Lengths of the sequences in each row. Rows are full or not; sequences have 1 to 16 tokens.
ROWS: Final = [(5, 3, 1, 7), (16,), (9, 4), (1, 1, 1, 1, 1, 1, 1), (2,)]
ROW_LENGTH: Final = 16


def packed_rows() -> tuple[ModelInputs, list[tuple[slice, ModelInputs]]]:
    """Make packed rows, and their sequences, each with its slice of the flattened rows.

    The padding contains other ids than 0, which must not matter.
    """
    generator = torch.Generator().manual_seed(2)
    shape = (len(ROWS), ROW_LENGTH)
    ids = torch.randint(1, TINY.vocab_size, shape, generator=generator)
    types = torch.randint(0, 2, shape, generator=generator)
    positions, numbers = torch.zeros_like(ids), torch.full_like(ids, -1)
    bounds: list[int] = []
    sequences: list[tuple[slice, ModelInputs]] = []
    for line, lengths in enumerate(ROWS):
        ends = list(accumulate(lengths, initial=0))
        for number, (begin, end) in enumerate(pairwise(ends)):
            positions[line, begin:end] = torch.arange(end - begin)
            numbers[line, begin:end] = number
            sequence = ModelInputs(
                ids=ids[line : line + 1, begin:end], types=types[line : line + 1, begin:end]
            )
            row_start = line * ROW_LENGTH
            sequences.append((slice(row_start + begin, row_start + end), sequence))
        bounds += [line * ROW_LENGTH + end for end in ends if end < ROW_LENGTH]
    padded_bounds = torch.full((8 * len(ROWS) + 1,), ids.numel(), dtype=torch.int32)
    padded_bounds[: len(bounds)] = torch.tensor(bounds)
    packing = Packing(positions=positions, sequences=numbers, bounds=padded_bounds)
    return ModelInputs(ids=ids, types=types, packing=packing), sequences


def weighted_loss(hidden_sh: Tensor) -> Tensor:
    """Compute a loss to which every number contributes differently."""
    return (hidden_sh.square() * torch.arange(1, 1 + hidden_sh.shape[0])[:, None]).sum()


def gradients(model: AlbertForTasks) -> dict[str, Tensor]:
    """Return the gradients of the backbone, after checking that every parameter has one."""
    grads = {name: p.grad for name, p in model.albert.named_parameters() if p.grad is not None}
    assert len(grads) == len(list(model.albert.parameters()))
    return grads


def double_model(config: AlbertConfig) -> AlbertForTasks:
    return our_model(config, ("fill-mask",)).double().train()


SHARED = [replace(CONFIGS["groups and inner"], sharing=name) for name in get_args(Sharing)[1:]]
each_architecture = pytest.mark.parametrize(
    "config",
    [*CONFIGS.values(), *SHARED],
    ids=lambda config: f"{config.sharing}-{config.num_groups}-{config.num_inner_layers}",
)


@pytest.mark.process
@each_architecture
def test_gradients_of_packed_and_padded_rows_are_those_of_single_sequences(
    config: AlbertConfig,
) -> None:
    """The model is in training mode, without dropout."""
    packed, sequences = packed_rows()
    lengths = [sequence.ids.shape[1] for _, sequence in sequences]
    padded = ModelInputs(
        ids=pad_sequence([sequence.ids[0] for _, sequence in sequences], batch_first=True),
        types=pad_sequence([sequence.types[0] for _, sequence in sequences], batch_first=True),
        lengths=torch.tensor(lengths),
    )
    model = double_model(config)
    for _, sequence in sequences:
        weighted_loss(model(sequence)[0]).backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    packed_spans = [span for span, _ in sequences]
    padded_spans = [slice(16 * n, 16 * n + length) for n, length in enumerate(lengths)]
    for batch, spans in ((packed, packed_spans), (padded, padded_spans)):
        model = double_model(config)
        hidden = model(batch).flatten(0, 1)
        sum(weighted_loss(hidden[span]) for span in spans).backward()  # type: ignore[union-attr]
        assert_close_to_scale(gradients(model), expected)


@pytest.mark.process
@each_architecture
def test_selected_hidden_states_are_rows_of_all_hidden_states(
    config: AlbertConfig,
) -> None:
    """Positions can be in any order and repeat. The gradients are the same, too."""
    positions = torch.tensor([70, 0, 17, 17, 31, 5, 0])
    batch, _ = packed_rows()
    results = []
    for selects in (True, False):
        model = double_model(config)
        hidden = model(batch, positions) if selects else model(batch).flatten(0, 1)[positions]
        weighted_loss(hidden).backward()  # type: ignore[no-untyped-call]
        results.append({**gradients(model), "hidden": hidden.detach()})
    assert_close_to_scale(results[0], results[1])


@pytest.mark.process
@each_sharing
def test_recomputation_saves_memory_and_changes_no_result(sharing: Sharing) -> None:
    """Recomputation repeats the same dropout. Without training, there is no recomputation."""
    config = replace(TINY, sharing=sharing, num_groups=2, hidden_dropout=0.1, attention_dropout=0.1)
    results, num_saved_bytes = [], []
    for recomputes in (False, True):
        model = our_model(config, ("fill-mask",)).train()
        model.albert.encoder.recomputes = recomputes
        torch.manual_seed(0)
        with saved_tensor_sizes() as sizes:
            loss = weighted_loss(model(packed_rows()[0]).flatten(0, 1))
        loss.backward()  # type: ignore[no-untyped-call]
        results.append({**gradients(model), "loss": loss.detach()})
        num_saved_bytes.append(sum(sizes.values()))
    for name, tensor in results[0].items():
        assert torch.equal(results[1][name], tensor), name
    assert num_saved_bytes[1] < num_saved_bytes[0] / 3
    with saved_tensor_sizes() as sizes:
        model.eval()(packed_rows()[0])
    assert sum(sizes.values()) > 2 * num_saved_bytes[1]


@contextmanager
def saved_tensor_sizes() -> Iterator[dict[int, int]]:
    """Yield the bytes of each tensor, including weights, that is saved for the backward pass."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


@pytest.mark.process
@pytest.mark.parametrize("activation", get_args(Activation))
def test_code_for_the_compiler_computes_the_same_activation(activation: Activation) -> None:
    """Linear maps also have other code for the compiler. The gradients are the same, too."""
    results = []
    for is_compiled in (False, True):
        model = our_model(replace(TINY, activation=activation), ("fill-mask",)).double().train()
        forward = torch.compile(model, backend="eager", fullgraph=True) if is_compiled else model
        hidden = forward(packed_rows()[0])
        weighted_loss(hidden.flatten(0, 1)).backward()  # type: ignore[no-untyped-call]
        results.append({**gradients(model), "hidden": hidden.detach()})
    assert_close_to_scale(results[0], results[1], limit=1e-11)
    torch._dynamo.reset()
