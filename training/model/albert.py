"""ALBERT in torch: factorised embeddings and post-LN layers applied by a visible sharing plan.

Shape legend: B rows, S positions, E embedding size, H hidden size, N heads, D = H / N, F
feed-forward size, T = B * S tokens, C sequences, R gathered positions. A row is one sequence or
several packed sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from albert_serve.config import AlbertConfig

# torch's CPU builds do not have this attention kernel, and importing it takes a second.
if torch.version.cuda or torch.version.hip:
    import torch.nn.attention.varlen

_Record = TypeVar("_Record")


class CumulativeLengths(NamedTuple):
    """cu_seqlens (C + 1,) of the sequences in the flattened tokens (T,), and the maximum length."""

    bounds: Tensor
    longest: int


# A bool mask that broadcasts to (B, N, S, S) and is True for attended positions, or cu_seqlens, or
# None to attend to all positions.
_AttentionMask: TypeAlias = "Tensor | CumulativeLengths | None"


class Embeddings(nn.Module):
    """Word, position and type embeddings of width E, projected to H (paper, section 3.1)."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        size = config.embedding_size
        self.word = nn.Embedding(config.vocab_size, size)
        self.position = nn.Embedding(config.max_positions, size)
        self.token_type = nn.Embedding(config.num_token_types, size)
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.project = nn.Linear(size, config.hidden_size)

    def forward(self, ids_BS: Tensor, types_BS: Tensor, positions_BS: Tensor | None) -> Tensor:
        """Return the embeddings (B, S, H) of ids and types (B, S).

        Without positions, each row is one sequence that starts at position 0.
        """
        if positions_BS is None:
            positions_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        x_BSE = self.word(ids_BS) + self.token_type(types_BS) + self.position(positions_BS)
        x_BSH: Tensor = self.project(self.dropout(self.norm(x_BSE)))
        return x_BSH


class Attention(nn.Module):
    """Multi-head self-attention with its residual and layer norm: LN(x + attend(x))."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.attention_dropout = nn.Dropout(config.attention_dropout)
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)
        self.output = nn.Linear(size, size)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps)

    def forward(self, x_BSH: Tensor, mask: _AttentionMask, read: Tensor | None = None) -> Tensor:
        """Attend over (B, S, H) within the attention mask; return (B, S, H).

        With gathered positions `read`, (R,) indices into the flattened (T,), return (R, H).
        """
        heads = (*x_BSH.shape[:-1], self.num_heads, -1)
        query_BSND, key_BSND, value_BSND = (
            project(part, x_BSH).view(heads) for part in (self.query, self.key, self.value)
        )
        context_BSH = attend(
            query_BSND, key_BSND, value_BSND, mask, self.attention_dropout
        ).flatten(2)
        if read is not None:
            x_BSH, context_BSH = (part.flatten(0, 1)[read] for part in (x_BSH, context_BSH))
        attended_BSH = self.dropout(project(self.output, context_BSH))
        normed_BSH: Tensor = self.norm(x_BSH + attended_BSH)
        return normed_BSH


class FeedForward(nn.Module):
    """Position-wise feed-forward block with residual and layer norm: LN(x + down(act(up(x))))."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.ffn_size)
        self.down = nn.Linear(config.ffn_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.activation = activation(config)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Transform (..., H) into (..., H)."""
        out_BSH = project(self.down, self.activation(project(self.up, x_BSH)))
        normed_BSH: Tensor = self.norm(x_BSH + self.dropout(out_BSH))
        return normed_BSH


class _Encoder(nn.Module):
    """The distinct attention and feed-forward blocks, and the loop that applies them.

    Attributes:
        recomputes: whether the backward pass recomputes activations. This takes a third more
            compute, but stores the activations of only one layer instead of all.
    """

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.layer_plan = config.layer_plan
        self.recomputes = False
        self.attentions = nn.ModuleList(Attention(config) for _ in range(config.num_attentions))
        self.ffns = nn.ModuleList(FeedForward(config) for _ in range(config.num_ffns))

    def forward(self, x_BSH: Tensor, mask: _AttentionMask, read: Tensor | None = None) -> Tensor:
        """Apply the layers to (B, S, H) in the order of the plan; return (B, S, H).

        With gathered positions `read`, (R,) indices into the flattened (T,), return (R, H): the
        last layer computes only these positions after its attention.
        """
        for number in range(1, len(self.layer_plan)):
            x_BSH = self._apply_layer(number, x_BSH, mask)
        return self._apply_layer(len(self.layer_plan), x_BSH, mask, read)

    def _apply_layer(
        self, number: int, x_BSH: Tensor, mask: _AttentionMask, read: Tensor | None = None
    ) -> Tensor:
        """Apply layer `number`, counted from 1."""
        attention, ffn = self.layer_plan[number - 1]
        blocks = (self.attentions[attention], self.ffns[ffn])
        if self.recomputes and self.training:
            # Reentrant recomputation would run the hooks of shared weights once per use.
            out_BSH: Tensor = checkpoint(_layer, *blocks, x_BSH, mask, read, use_reentrant=False)
            return out_BSH
        return _layer(*blocks, x_BSH, mask, read)


def _layer(
    attention: nn.Module,
    ffn: nn.Module,
    x_BSH: Tensor,
    mask: _AttentionMask,
    read: Tensor | None,
) -> Tensor:
    out_BSH: Tensor = ffn(attention(x_BSH, mask, read))
    return out_BSH


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Sequence packing: several sequences in each row, none of which spans two rows.

    Attributes:
        positions: position of each token in its sequence, (B, S) int64.
        sequences: index of each token's sequence in its row, (B, S) int64, or -1 for padding.
        bounds: cu_seqlens, (C + 1,) int32: the start of each sequence in the flattened tokens
            (T,), where padding counts as a sequence, then the end T up to a fixed size.
    """

    positions: Tensor
    sequences: Tensor
    bounds: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInputs:
    """Token ids of right-padded rows.

    Attributes:
        ids: token ids, (B, S) int64.
        types: token types, (B, S) int64: 0 for the first segment, 1 for the second.
        lengths: number of real tokens in each row, (B,) int64, or None without padding.
        packing: sequences of packed rows, or None if each row is one sequence.
    """

    ids: Tensor
    types: Tensor
    lengths: Tensor | None = None
    packing: Packing | None = None

    def to(self, device: torch.device) -> ModelInputs:
        """Return the batch on another device."""
        return move(self, device)


def move(record: _Record, device: torch.device) -> _Record:
    """Copy a dataclass of tensors and nested dataclasses to another device."""
    moved: dict[str, object] = {}
    for field in fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            # From unpinned memory, a copy waits for all previous work of the device.
            source = value.pin_memory() if device.type == "cuda" and value.is_cpu else value
            moved[field.name] = source.to(device, non_blocking=True)
        elif is_dataclass(value) and not isinstance(value, type):
            moved[field.name] = move(value, device)
    return replace(record, **moved)  # type: ignore[type-var]


class Albert(nn.Module):
    """The backbone that all tasks share: embeddings and encoder (Lan et al. 2019, section 3).

    Attributes:
        has_varlen: whether packed rows use the variable-length attention kernel, which needs a
            GPU (`training/system/precision.py`) and a lower precision than fp32.
    """

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.config = config
        self.has_varlen = False
        self.embeddings = Embeddings(config)
        self.encoder = _Encoder(config)
        self.apply(Initializer(config.initializer_range))

    def forward(self, batch: ModelInputs, read: Tensor | None = None) -> Tensor:
        """Return the hidden states (B, S, H), which are undefined at padded positions.

        Args:
            read: gathered positions, (R,) indices into the flattened (T,). The result is then
                (R, H), which costs less.
        """
        hidden_BSH: Tensor = self.encoder(self._embed(batch), self._attention_mask(batch), read)
        return hidden_BSH

    def _embed(self, batch: ModelInputs) -> Tensor:
        length = batch.ids.shape[1]
        if length > self.config.max_positions:
            raise ValueError(
                f"The sequences have {length} tokens, more than the model's "
                f"{self.config.max_positions} positions."
            )
        positions_BS = None if batch.packing is None else batch.packing.positions
        x_BSH: Tensor = self.embeddings(batch.ids, batch.types, positions_BS)
        return x_BSH

    def _attention_mask(self, batch: ModelInputs) -> _AttentionMask:
        """Return the mask with which each token attends to its own sequence."""
        if batch.packing is None:
            if batch.lengths is None:
                return None
            positions_S = torch.arange(batch.ids.shape[1], device=batch.ids.device)
            return (positions_S < batch.lengths[:, None])[:, None, None, :]
        drops = self.training and self.config.attention_dropout > 0
        if self.has_varlen and torch.is_autocast_enabled("cuda") and not drops:
            return CumulativeLengths(bounds=batch.packing.bounds, longest=batch.ids.shape[1])
        sequences_BS = batch.packing.sequences
        return sequences_BS[:, None, :, None] == sequences_BS[:, None, None, :]


def attend(
    query_BSND: Tensor,
    key_BSND: Tensor,
    value_BSND: Tensor,
    mask: _AttentionMask,
    dropout: nn.Dropout,
) -> Tensor:
    """Return scaled dot-product attention within the attention mask, (B, S, N, D).

    In training, dropout sets attention weights to 0, except in the variable-length kernel.
    """
    if isinstance(mask, CumulativeLengths):
        return _attend_varlen(query_BSND, key_BSND, value_BSND, mask)
    query_BNSD, key_BNSD, value_BNSD = (
        part.transpose(1, 2) for part in (query_BSND, key_BSND, value_BSND)
    )
    is_fused = query_BNSD.device.type != "cpu" or not query_BNSD.requires_grad
    if is_fused and not (dropout.training and dropout.p):
        return F.scaled_dot_product_attention(
            query_BNSD, key_BNSD, value_BNSD, attn_mask=mask
        ).transpose(1, 2)
    # The backward pass of torch's fused CPU kernel took a third of a training step at 128 tokens.
    # Plain products, fused by torch.compile, made the step 1.4 times faster.
    scores_BNSS = query_BNSD @ key_BNSD.transpose(-1, -2) / query_BNSD.shape[-1] ** 0.5
    if mask is not None:
        scores_BNSS = scores_BNSS.masked_fill(~mask, float("-inf"))
    weights_BNSS = dropout(scores_BNSS.softmax(-1).to(value_BNSD.dtype))
    context_BSND: Tensor = (weights_BNSS @ value_BNSD).transpose(1, 2)
    return context_BSND


def _attend_varlen(
    query_BSND: Tensor, key_BSND: Tensor, value_BSND: Tensor, cu_seqlens: CumulativeLengths
) -> Tensor:
    """Return variable-length attention within each sequence, (B, S, N, D)."""
    query_TND, key_TND, value_TND = (
        part.flatten(0, 1) for part in (query_BSND, key_BSND, value_BSND)
    )
    bounds, longest = cu_seqlens
    context_TND = torch.nn.attention.varlen.varlen_attn(
        query_TND, key_TND, value_TND, bounds, bounds, longest, longest
    )
    assert isinstance(context_TND, Tensor)
    return context_TND.reshape(query_BSND.shape)


@dataclass(frozen=True, slots=True)
class Initializer:
    """Truncated normal weights and zero biases, as in the original code."""

    std: float

    def __call__(self, module: nn.Module) -> None:
        """Initialise the module's own parameters."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=self.std, a=-2 * self.std, b=2 * self.std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def project(linear: nn.Linear, x: Tensor) -> Tensor:
    """Return the linear map of x. Code compiled for a CPU adds the bias in the next fused kernel.

    Torch's product with a bias first writes the bias to all rows, which took as long as the
    product.
    """
    if not (torch.compiler.is_compiling() and x.device.type == "cpu"):
        mapped: Tensor = linear(x)
        return mapped
    product = F.linear(x, linear.weight)
    return product + linear.bias.to(product.dtype)


def activation(config: AlbertConfig) -> Callable[[Tensor], Tensor]:
    """Return the activation that the config names."""
    return _gelu_tanh if config.activation == "gelu_tanh" else F.gelu


def _gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU's tanh approximation (Hendrycks and Gimpel 2016, section 2)."""
    if not (torch.compiler.is_compiling() and x.device.type == "cpu"):
        return F.gelu(x, approximate="tanh")
    # (1 + tanh z) / 2 = sigmoid(2 z), and compiled code has a fast sigmoid.
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
