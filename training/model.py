"""ALBERT in torch: factorised embeddings and post-LN layers applied by a visible sharing plan.

Shape legend: B sequences, S positions, E embedding size, H hidden size, N heads, D = H / N,
F feed-forward size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from albert_serve.config import AlbertConfig


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

    def forward(self, ids_BS: Tensor, types_BS: Tensor) -> Tensor:
        """Embed ids and types of shape (B, S); returns (B, S, H)."""
        positions_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        x_BSE = self.word(ids_BS) + self.token_type(types_BS) + self.position(positions_S)
        x_BSH: Tensor = self.project(self.dropout(self.norm(x_BSE)))
        return x_BSH


class Attention(nn.Module):
    """Multi-head self-attention with its residual and layer norm: LN(x + attend(x))."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.attention_dropout = config.attention_dropout
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)
        self.output = nn.Linear(size, size)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps)

    def forward(self, x_BSH: Tensor, mask_B11S: Tensor | None) -> Tensor:
        """Attend over (B, S, H), to positions where the mask is True; returns (B, S, H)."""
        query_BNSD, key_BNSD, value_BNSD = (
            part(x_BSH).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        dropout = self.attention_dropout if self.training else 0.0
        seen_BNSD = attend(query_BNSD, key_BNSD, value_BNSD, mask_B11S, dropout)
        out_BSH = self.output(seen_BNSD.transpose(1, 2).flatten(2))
        normed_BSH: Tensor = self.norm(x_BSH + self.dropout(out_BSH))
        return normed_BSH


class FeedForward(nn.Module):
    """The position-wise part with its residual and layer norm: LN(x + down(act(up(x))))."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.ffn_size)
        self.down = nn.Linear(config.ffn_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.activation = activation(config)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Transform (B, S, H) into (B, S, H)."""
        out_BSH = self.down(self.activation(self.up(x_BSH)))
        normed_BSH: Tensor = self.norm(x_BSH + self.dropout(out_BSH))
        return normed_BSH


class Encoder(nn.Module):
    """The distinct attention and feed-forward blocks, and the loop that applies them."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.layer_plan = config.layer_plan
        self.attentions = nn.ModuleList(Attention(config) for _ in range(config.num_attentions))
        self.ffns = nn.ModuleList(FeedForward(config) for _ in range(config.num_ffns))

    def forward(self, x_BSH: Tensor, mask_B11S: Tensor | None) -> Tensor:
        """Apply the layers in the order of the plan to (B, S, H); returns (B, S, H)."""
        for attention, ffn in self.layer_plan:
            x_BSH = self.attentions[attention](x_BSH, mask_B11S)
            x_BSH = self.ffns[ffn](x_BSH)
        return x_BSH


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Token ids of right-padded sequences.

    Attributes:
        ids: (B, S) int64.
        types: (B, S) int64, 0 for the first segment, 1 for the second.
        lengths: (B,) int64, real tokens of each sequence; None where none is padded.
    """

    ids: Tensor
    types: Tensor
    lengths: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        lengths = None if self.lengths is None else self.lengths.to(device)
        return Batch(ids=self.ids.to(device), types=self.types.to(device), lengths=lengths)


class Albert(nn.Module):
    """The backbone that all tasks share: embeddings and encoder (Lan et al. 2019, section 3)."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.apply(Initializer(config.initializer_range))

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states (B, S, H); those at padded positions mean nothing.

        Raises:
            ValueError: the sequences are longer than the model has positions.
        """
        length = batch.ids.shape[1]
        if length > self.config.max_positions:
            raise ValueError(
                f"sequences of {length} tokens; the model has {self.config.max_positions} positions"
            )
        mask_B11S = None
        if batch.lengths is not None:
            positions_S = torch.arange(length, device=batch.ids.device)
            mask_B11S = (positions_S < batch.lengths[:, None])[:, None, None, :]
        hidden_BSH: Tensor = self.encoder(self.embeddings(batch.ids, batch.types), mask_B11S)
        return hidden_BSH


def attend(
    query_BNSD: Tensor,
    key_BNSD: Tensor,
    value_BNSD: Tensor,
    mask_B11S: Tensor | None,
    dropout: float,
) -> Tensor:
    """Scaled dot-product attention over the positions where the mask is True; (B, N, S, D)."""
    if query_BNSD.device.type != "cpu" or not query_BNSD.requires_grad:
        return F.scaled_dot_product_attention(
            query_BNSD, key_BNSD, value_BNSD, attn_mask=mask_B11S, dropout_p=dropout
        )
    # The backward pass of torch's fused CPU kernel took a third of a training step at 128
    # tokens; plain products, fused by torch.compile, made the whole step 1.4 times faster.
    scores_BNSS = query_BNSD @ key_BNSD.transpose(-1, -2) / query_BNSD.shape[-1] ** 0.5
    if mask_B11S is not None:
        scores_BNSS = scores_BNSS.masked_fill(~mask_B11S, float("-inf"))
    weights_BNSS = F.dropout(scores_BNSS.softmax(-1).to(value_BNSD.dtype), dropout)
    return weights_BNSS @ value_BNSD


@dataclass(frozen=True, slots=True)
class Initializer:
    """Truncated normal weights, zero biases, as the original code has it."""

    std: float

    def __call__(self, module: nn.Module) -> None:
        """Initialise the parameters that `module` itself holds."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=self.std, a=-2 * self.std, b=2 * self.std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def activation(config: AlbertConfig) -> Callable[[Tensor], Tensor]:
    """The activation that the config names."""
    return nn.GELU(approximate="tanh" if config.activation == "gelu_tanh" else "none")
