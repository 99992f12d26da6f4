"""Initialization of a student from its teacher.

The shared layer is one of the teacher's layers: layers of a trained encoder have almost nothing in
common, so their mean would be useless. The embeddings are the teacher's for the pieces that
both vocabularies have, and means of the teacher's pieces for the others. If E is smaller than H
they are projected onto their E - 1 principal directions, and the map from E to H is fitted to
reproduce the input of the teacher's first layer.

Shape legend: V student's vocabulary, S positions, E student's embedding size, H hidden size of
both, R samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from training.distillation.teacher import HfTokenizer, Teacher, TeacherError
from training.model.albert import Embeddings
from training.model.heads import AlbertForTasks, FillMaskHead
from training.model.initialization import use_counts

# Modules of our block -> modules of a layer of BERT, RoBERTa, ELECTRA and similar encoders.
_ATTENTION: Final[dict[str, str]] = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "norm": "attention.output.LayerNorm",
}
_FFN: Final[dict[str, str]] = {
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
_ACTIVATIONS: Final = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_NUM_SAMPLES: Final = 1 << 15
_RIDGE: Final = 1e-4


def sizes_of(teacher: Teacher) -> dict[str, Any]:
    """Return the default sizes of a teacher's student, by the names of `AlbertConfig`.

    Raises:
        TeacherError: the teacher's layers do not have BERT's structure.
    """
    config = teacher.model.config
    try:
        return {
            "hidden_size": teacher.hidden_size,
            "num_layers": teacher.num_layers,
            "num_heads": config.num_attention_heads,
            "ffn_size": config.intermediate_size,
            "max_positions": teacher.max_positions,
            "activation": _ACTIVATIONS[config.hidden_act],
            "layer_norm_eps": config.layer_norm_eps,
        }
    except (AttributeError, KeyError) as error:
        raise TeacherError(
            f"{teacher.name} is a {config.model_type} whose layers do not have BERT's "
            f"structure ({error}); set the student's sizes with --preset, and use --start local"
        ) from error


def default_layers(num_groups: int, num_layers: int) -> tuple[int, ...]:
    """Return the teacher's layers, from 1, that initialise the student's groups by default.

    One group starts from the layer at two thirds of the depth; several from evenly spaced layers.
    """
    if num_groups == 1:
        return (max(1, round(num_layers * 2 / 3)),)
    return tuple(
        round(1 + group * (num_layers - 1) / (num_groups - 1)) for group in range(num_groups)
    )


def check_start(config: AlbertConfig, teacher: Teacher, layers: Sequence[int]) -> None:
    """Check that a model of these sizes can start from these layers, from 1, of a teacher.

    Raises:
        TeacherError: it cannot.
    """
    sizes = sizes_of(teacher)
    for name in ("hidden_size", "num_heads", "ffn_size", "activation"):
        if getattr(config, name) != sizes[name]:
            raise TeacherError(
                f"{name} is {sizes[name]} in {teacher.name} and {getattr(config, name)} in the "
                "student; --start teacher copies a layer, so both must be equal"
            )
    limits = {"embedding_size": teacher.hidden_size, "max_positions": teacher.max_positions}
    for name, size in limits.items():
        if getattr(config, name) > size:
            raise TeacherError(
                f"{name} {getattr(config, name)}: --start teacher allows at most {size}, "
                f"the size of {teacher.name}"
            )
    if len(layers) != config.num_attentions or config.num_attentions != config.num_ffns:
        raise TeacherError(
            f"--start-layers names {len(layers)} layers of the teacher; "
            f"the student has {config.num_attentions} attention blocks and {config.num_ffns} "
            "feed-forward blocks, and each pair starts from one"
        )
    for layer in layers:
        if not 1 <= layer <= teacher.num_layers:
            raise TeacherError(f"--start-layers {layer}: the teacher has 1 to {teacher.num_layers}")
    _layer(teacher, 1)
    _tables(teacher)


def start_from_teacher(
    model: AlbertForTasks,
    teacher: Teacher,
    tokenizer: AlbertTokenizer,
    token_counts: NDArray[np.int64],
    layers: Sequence[int],
) -> float:
    """Initialise a student with its teacher's embeddings and layers, and the corpus' frequencies.

    Returns the fraction of the variance of the teacher's embeddings, weighted by the corpus'
    frequencies, that the student's embeddings explain: 1 if E is H.

    Args:
        token_counts: (V,) occurrences of each token in the corpus.
        layers: layers that `check_start` allows, one for each layer of the student.
    """
    encoder = model.albert.encoder
    with torch.no_grad():
        for number, layer in enumerate(layers):
            source = _layer(teacher, layer)
            _copy(encoder.attentions[number], source, _ATTENTION)
            _copy(encoder.ffns[number], source, _FFN)
        head = model.heads["fill-mask"]
        assert isinstance(head, FillMaskHead)
        use_counts(head, token_counts)
        return _start_embeddings(model.albert.embeddings, teacher, tokenizer, token_counts)


def _layer(teacher: Teacher, number: int) -> nn.Module:
    try:
        layer: nn.Module = teacher.model.encoder.layer[number - 1]
        for name in (*_ATTENTION.values(), *_FFN.values()):
            layer.get_submodule(name)
    except AttributeError as error:
        raise TeacherError(
            f"the layers of {teacher.name} do not have BERT's structure; "
            "use --start local, or for an ALBERT --initialize-from"
        ) from error
    return layer


def _copy(block: nn.Module, source: nn.Module, names: dict[str, str]) -> None:
    for ours, theirs in names.items():
        block.get_submodule(ours).load_state_dict(source.get_submodule(theirs).state_dict())


def _tables(teacher: Teacher) -> Any:
    """Return the teacher's embeddings, which must be as wide as its hidden states."""
    embeddings = teacher.model.embeddings
    if embeddings.word_embeddings.weight.shape[1] != teacher.hidden_size:
        raise TeacherError(
            f"{teacher.name} has embeddings of {embeddings.word_embeddings.weight.shape[1]} and "
            f"hidden states of {teacher.hidden_size}; --start teacher needs equal sizes"
        )
    return embeddings


def word_rows(teacher: Teacher, tokenizer: AlbertTokenizer) -> Tensor:
    """Return the teacher's embeddings (V, H) of the student's pieces."""
    table = _tables(teacher).word_embeddings.weight.detach().float().cpu()
    mean_H = table.mean(0)  # for a lone "▁", for which the teacher has no piece
    ids = _piece_ids(teacher, tokenizer)
    return torch.stack([table[pieces].mean(0) if pieces else mean_H for pieces in ids])


def shared_pieces(teacher: Teacher, tokenizer: AlbertTokenizer) -> NDArray[np.bool_]:
    """Return (V,) bool, whether a student's piece is one piece of the teacher's, and not [UNK]."""
    unk = teacher.tokenizer.unk_id
    ids = _piece_ids(teacher, tokenizer)
    return np.array([len(pieces) == 1 and pieces[0] != unk for pieces in ids])


def _piece_ids(teacher: Teacher, tokenizer: AlbertTokenizer) -> list[list[int]]:
    """Return the teacher's ids of each of the student's V pieces; none for a lone "▁"."""
    theirs = teacher.tokenizer
    mask_id = theirs.hf.mask_token_id
    special = {
        tokenizer.pad_id: theirs.pad_id,
        tokenizer.unk_id: theirs.unk_id,
        tokenizer.cls_id: theirs.cls_id,
        tokenizer.sep_id: theirs.sep_id,
        tokenizer.mask_id: theirs.unk_id if mask_id is None else mask_id,
    }
    return [
        [special[token_id]] if token_id in special else _word_ids(theirs, tokenizer, token_id)
        for token_id in range(tokenizer.vocab_size)
    ]


def _word_ids(theirs: HfTokenizer, tokenizer: AlbertTokenizer, token_id: int) -> list[int]:
    piece = tokenizer.token(token_id)
    surface = tokenizer.surface(piece)
    if tokenizer.begins_word(piece):
        return [part.token_id for part in theirs.encode_word(surface)]
    return theirs.continuation(surface)


def _start_embeddings(
    embeddings: Embeddings,
    teacher: Teacher,
    tokenizer: AlbertTokenizer,
    token_counts: NDArray[np.int64],
) -> float:
    tables = _tables(teacher)
    num_positions = embeddings.position.num_embeddings
    offset = teacher.model.config.max_position_embeddings - teacher.max_positions
    position_SH = tables.position_embeddings.weight.float().cpu()[offset : offset + num_positions]
    types = getattr(tables, "token_type_embeddings", None)
    num_types = embeddings.token_type.num_embeddings
    type_H = torch.zeros(num_types, teacher.hidden_size)
    if types is not None:
        # A student with more types than its teacher repeats the last one.
        table = types.weight.float().cpu()
        type_H = table[torch.arange(num_types).clamp(max=len(table) - 1)]
    word_VH = word_rows(teacher, tokenizer)
    norm = tables.LayerNorm
    gain_H, bias_H = norm.weight.float().cpu(), norm.bias.float().cpu()
    if embeddings.word.embedding_dim == teacher.hidden_size:
        _copy_tables(embeddings, word_VH, position_SH, type_H)
        embeddings.norm.weight.copy_(gain_H)
        embeddings.norm.bias.copy_(bias_H)
        nn.init.eye_(embeddings.project.weight)
        nn.init.zeros_(embeddings.project.bias)
        return 1.0
    samples_RH = _samples(word_VH, position_SH, type_H, token_counts)
    normed_RH = F.layer_norm(samples_RH, samples_RH.shape[-1:], eps=norm.eps)
    basis_HE = _basis(normed_RH, embeddings.word.embedding_dim)
    _copy_tables(embeddings, word_VH @ basis_HE, position_SH @ basis_HE, type_H @ basis_HE)
    inputs_RE = embeddings.norm(samples_RH @ basis_HE)
    targets_RH = normed_RH * gain_H + bias_H
    _fit(embeddings.project, inputs_RE, targets_RH)
    error_RH = embeddings.project(inputs_RE) - targets_RH
    deviation_RH = targets_RH - targets_RH.mean(0)
    return 1 - float(error_RH.square().sum() / deviation_RH.square().sum())


def _copy_tables(embeddings: Embeddings, word: Tensor, position: Tensor, types: Tensor) -> None:
    embeddings.word.weight.copy_(word)
    embeddings.position.weight.copy_(position)
    embeddings.token_type.weight.copy_(types)


def _samples(
    word_VH: Tensor, position_SH: Tensor, type_H: Tensor, token_counts: NDArray[np.int64]
) -> Tensor:
    """Sample sums (R, H) of embeddings, with words as frequent as in the corpus."""
    rng = np.random.default_rng(0)
    odds = token_counts + 1e-9
    words = rng.choice(len(odds), _NUM_SAMPLES, p=odds / odds.sum())
    positions = rng.integers(len(position_SH), size=_NUM_SAMPLES)
    types = rng.integers(len(type_H), size=_NUM_SAMPLES)
    return word_VH[words] + position_SH[positions] + type_H[types]


def _basis(normed_RH: Tensor, size: int) -> Tensor:
    """Return a map (H, E) onto the `size` - 1 directions of largest variance.

    Its columns' sum is 0, so that the layer norm at width E removes no information.
    """
    _, directions_HH = torch.linalg.eigh(normed_RH.T @ normed_RH)
    largest_HK = directions_HH[:, len(directions_HH) - (size - 1) :]
    mixed = torch.cat([torch.ones(size, 1), torch.eye(size)[:, 1:]], dim=1)
    without_mean_EK = torch.linalg.qr(mixed).Q[:, 1:]
    # The layer norm at width H removes constants over H.
    centred_HK = largest_HK - largest_HK.mean(0)
    basis_HE: Tensor = centred_HK @ without_mean_EK.T
    return basis_HE


def _fit(project: nn.Linear, inputs_RE: Tensor, targets_RH: Tensor) -> None:
    """Fit by least squares, with a small ridge since one direction of the inputs is constant."""
    ones = torch.ones(len(inputs_RE), 1)
    inputs = torch.cat([inputs_RE, ones], dim=1).double()
    square = inputs.T @ inputs / len(inputs)
    square += _RIDGE * torch.eye(len(square), dtype=square.dtype)
    solved = torch.linalg.solve(square, inputs.T @ targets_RH.double() / len(inputs)).float()
    project.weight.copy_(solved[:-1].T)
    project.bias.copy_(solved[-1])
