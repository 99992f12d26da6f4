"""The student's first weights, taken from its teacher.

The shared layer is one of the teacher's layers: layers of a trained encoder have next to nothing in
common, so that a mean of them would be none. The embeddings are the teacher's for the pieces that
both vocabularies have, and means of the teacher's pieces for the others. Where E is smaller than H
they are projected onto the E - 1 directions in which they vary most, and the map from E to H
is fitted so that the first layer gets what it got in the teacher.

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
from albert_serve.tokenizer import SPECIAL_TOKENS, AlbertTokenizer
from training.distillation.teacher import Teacher, TeacherError
from training.model.albert import Embeddings
from training.model.heads import AlbertForTasks, FillMaskHead
from training.model.initialization import use_counts

# Our block's parts -> the modules of a layer of BERT, RoBERTa, ELECTRA and their kin.
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
    """The sizes, by the names of `AlbertConfig`, that a student has if nothing else is asked for.

    Raises:
        TeacherError: its layers are not built as BERT's.
    """
    config = teacher.model.config
    for name in ("hidden_act", "intermediate_size", "layer_norm_eps"):
        if not hasattr(config, name):
            raise TeacherError(
                f"{teacher.name} is a {config.model_type}, whose config has no {name}; give a "
                "student of it its sizes by --preset, and --start local"
            )
    if config.hidden_act not in _ACTIVATIONS:
        raise TeacherError(
            f"{teacher.name} has the activation {config.hidden_act}; a student that starts from a "
            f"teacher's layer has {', '.join(_ACTIVATIONS)}"
        )
    return {
        "hidden_size": teacher.hidden_size,
        "num_layers": teacher.num_layers,
        "num_heads": config.num_attention_heads,
        "ffn_size": config.intermediate_size,
        "max_positions": teacher.max_positions,
        "activation": _ACTIVATIONS[config.hidden_act],
        "layer_norm_eps": config.layer_norm_eps,
    }


def default_layers(num_groups: int, num_layers: int) -> tuple[int, ...]:
    """The teacher's layers, from 1, that the student's groups start from.

    One group starts from the layer at two thirds of the depth; several from layers spread evenly.
    """
    if num_groups == 1:
        return (max(1, round(num_layers * 2 / 3)),)
    return tuple(
        round(1 + group * (num_layers - 1) / (num_groups - 1)) for group in range(num_groups)
    )


def check_start(config: AlbertConfig, teacher: Teacher, layers: Sequence[int]) -> None:
    """Check that a model of these sizes can start from these layers of a teacher.

    Raises:
        TeacherError: it cannot.
    """
    given = sizes_of(teacher)
    for name in ("hidden_size", "num_heads", "ffn_size", "activation"):
        if getattr(config, name) != given[name]:
            raise TeacherError(
                f"{name} is {given[name]} in {teacher.name} and {getattr(config, name)} in the "
                "student; --start teacher copies a whole layer, so that they have to be equal"
            )
    if config.embedding_size > config.hidden_size:
        raise TeacherError(
            f"--embedding-size {config.embedding_size} is over the teacher's hidden size "
            f"{config.hidden_size}; --start teacher needs an equal or a smaller one"
        )
    if config.max_positions > teacher.max_positions:
        raise TeacherError(
            f"--max-positions {config.max_positions}: {teacher.name} has {teacher.max_positions}"
        )
    if len(layers) != config.num_attentions or config.num_attentions != config.num_ffns:
        raise TeacherError(
            f"--start-layers names {len(layers)} layers of the teacher; "
            f"the student has {config.num_attentions} attention blocks and {config.num_ffns} "
            "feed-forward blocks of its own, each pair of which starts from one"
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
    """Give a fresh student its teacher's embeddings and layers, and the corpus' frequencies.

    Returns the part of the variance of the teacher's embeddings, of words as frequent as in the
    corpus, that the student's have: 1 where E is H.

    Args:
        token_counts: (V,) how often each token occurs in the corpus.
        layers: the teacher's layers, from 1, one for each of the student's own.

    Raises:
        TeacherError: sizes or layers do not fit.
    """
    check_start(model.config, teacher, layers)
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
            f"the layers of {teacher.name} are not built as BERT's; "
            "distil it with --start local, or an ALBERT with --initialize-from"
        ) from error
    return layer


def _copy(block: nn.Module, source: nn.Module, names: dict[str, str]) -> None:
    for ours, theirs in names.items():
        block.get_submodule(ours).load_state_dict(source.get_submodule(theirs).state_dict())


def _tables(teacher: Teacher) -> Any:
    """The teacher's embeddings, which have to be as wide as its hidden states."""
    embeddings = teacher.model.embeddings
    if embeddings.word_embeddings.weight.shape[1] != teacher.hidden_size:
        raise TeacherError(
            f"{teacher.name} has embeddings of {embeddings.word_embeddings.weight.shape[1]} and "
            f"hidden states of {teacher.hidden_size}; --start teacher needs equal sizes"
        )
    return embeddings


def word_rows(teacher: Teacher, tokenizer: AlbertTokenizer) -> tuple[Tensor, NDArray[np.bool_]]:
    """The teacher's embeddings (V, H) of the student's pieces, and which (V,) it has whole."""
    table = _tables(teacher).word_embeddings.weight.detach().float().cpu()
    ids = [_teacher_ids(teacher, tokenizer.token(index)) for index in range(tokenizer.vocab_size)]
    nothing_H = table.mean(0)  # for a lone "▁", which the teacher has no piece for
    rows_VH = torch.stack([table[each].mean(0) if each else nothing_H for each in ids])
    return rows_VH, shared_pieces(teacher, tokenizer)


def shared_pieces(teacher: Teacher, tokenizer: AlbertTokenizer) -> NDArray[np.bool_]:
    """Which (V,) of the student's pieces are one piece of the teacher's, and not its [UNK]."""
    unk = teacher.tokenizer.unk_id
    ids = [_teacher_ids(teacher, tokenizer.token(index)) for index in range(tokenizer.vocab_size)]
    return np.array([len(each) == 1 and each[0] != unk for each in ids])


def _teacher_ids(teacher: Teacher, piece: str) -> list[int]:
    """The teacher's ids for one of the student's pieces; none for a lone "▁"."""
    known = teacher.tokenizer
    mask = known.hf.mask_token_id
    ids = (known.pad_id, known.unk_id, known.cls_id, known.sep_id, mask)
    special = dict(zip(SPECIAL_TOKENS, ids, strict=True))
    if piece in special:
        given = special[piece]
        return [known.unk_id if given is None else given]
    if piece.startswith("▁"):
        return [part.token_id for part in known.encode_word(piece[1:])]
    return known.continuation(piece)


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
        # A student of more types than its teacher's has the last one for the rest.
        known = types.weight.float().cpu()
        type_H = known[torch.arange(num_types).clamp(max=len(known) - 1)]
    word_VH, _ = word_rows(teacher, tokenizer)
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
    given_RE = embeddings.norm(samples_RH @ basis_HE)
    wanted_RH = normed_RH * gain_H + bias_H
    _fit(embeddings.project, given_RE, wanted_RH)
    error_RH = embeddings.project(given_RE) - wanted_RH
    variance_RH = wanted_RH - wanted_RH.mean(0)
    return 1 - float(error_RH.square().sum() / variance_RH.square().sum())


def _copy_tables(embeddings: Embeddings, word: Tensor, position: Tensor, types: Tensor) -> None:
    embeddings.word.weight.copy_(word)
    embeddings.position.weight.copy_(position)
    embeddings.token_type.weight.copy_(types)


def _samples(
    word_VH: Tensor, position_SH: Tensor, type_H: Tensor, token_counts: NDArray[np.int64]
) -> Tensor:
    """Sums (R, H) of embeddings, of words as frequent as in the corpus."""
    rng = np.random.default_rng(0)
    odds = token_counts + 1e-9
    words = rng.choice(len(odds), _NUM_SAMPLES, p=odds / odds.sum())
    positions = rng.integers(len(position_SH), size=_NUM_SAMPLES)
    types = rng.integers(len(type_H), size=_NUM_SAMPLES)
    return word_VH[words] + position_SH[positions] + type_H[types]


def _basis(normed_RH: Tensor, size: int) -> Tensor:
    """A map (H, E) that keeps the `size` - 1 directions of largest variance.

    Its columns' sum is 0, so that the norm at width E takes away no mean that carries anything.
    """
    _, directions_HH = torch.linalg.eigh(normed_RH.T @ normed_RH)
    kept_HK = directions_HH[:, len(directions_HH) - (size - 1) :]
    mixed = torch.cat([torch.ones(size, 1), torch.eye(size)[:, 1:]], dim=1)
    without_mean_EK = torch.linalg.qr(mixed).Q[:, 1:]
    # What is constant over H has no part in the norm at width H.
    centred_HK = kept_HK - kept_HK.mean(0)
    basis_HE: Tensor = centred_HK @ without_mean_EK.T
    return basis_HE


def _fit(project: nn.Linear, given_RE: Tensor, wanted_RH: Tensor) -> None:
    """Least squares, with a small ridge since one direction of what is given is constant."""
    ones = torch.ones(len(given_RE), 1)
    given = torch.cat([given_RE, ones], dim=1).double()
    square = given.T @ given / len(given)
    square += _RIDGE * torch.eye(len(square), dtype=square.dtype)
    solved = torch.linalg.solve(square, given.T @ wanted_RH.double() / len(given)).float()
    project.weight.copy_(solved[:-1].T)
    project.bias.copy_(solved[-1])
