"""FLOPs of a model: of a token, of a training step, and of a whole run.

Shared weights count once where they are stored and once for each layer that applies them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from albert_serve.config import AlbertConfig

# Of the tokens, in the paper (section 4.1).
_MASKED_RATE: Final = 0.15
_BYTES_OF_FP32: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainingSize:
    """The extent of a pretraining run; the defaults are the paper's (section 4.1).

    Attributes:
        num_steps: the number of steps.
        batch_size: sequences of a step.
        length: tokens of a sequence.
    """

    num_steps: int = 125_000
    batch_size: int = 4096
    length: int = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """A model's size and its compute, as a row of a table.

    Attributes:
        num_parameters: stored, of the embeddings, layers and pooler.
        fp32_bytes: of these parameters.
        forward_megaflops_per_token: of the encoder, at the run's length.
        step_teraflops: of a training step, forward and backward.
        total_exaflops: of the run.
    """

    model: str
    num_parameters: int
    fp32_bytes: int
    forward_megaflops_per_token: float
    step_teraflops: float
    total_exaflops: float


def compare_compute(name: str, config: AlbertConfig, size: PretrainingSize) -> list[Compute]:
    """Return the compute of a model and of BERT in the same shape.

    BERT's embeddings are as wide as its hidden states, without a map between them, and its layers
    share nothing.
    """
    bert = replace(config, embedding_size=config.hidden_size, sharing="none", num_groups=1)
    return [_compute(name, config, size), _compute(f"{name} as BERT", bert, size, has_map=False)]


def _compute(
    name: str, config: AlbertConfig, size: PretrainingSize, *, has_map: bool = True
) -> Compute:
    forward = forward_flops_per_token(config, size.length)
    train = train_flops_per_token(config, length=size.length, masked_rate=_MASKED_RATE)
    num_parameters = config.num_backbone_params
    if not has_map:
        product = 2 * config.embedding_size * config.hidden_size
        forward, train = forward - product, train - 3 * product
        num_parameters -= (config.embedding_size + 1) * config.hidden_size
    step = train * size.batch_size * size.length
    return Compute(
        model=name,
        num_parameters=num_parameters,
        fp32_bytes=_BYTES_OF_FP32 * num_parameters,
        forward_megaflops_per_token=forward / 1e6,
        step_teraflops=step / 1e12,
        total_exaflops=step * size.num_steps / 1e18,
    )


def forward_flops_per_token(config: AlbertConfig, length: float) -> float:
    """Return the FLOPs per token of the encoder's matrix products.

    2 operations for each multiply-add: the map of embeddings to hidden states, and every
    application of a layer, of which `train_flops_per_token` has the terms.

    Args:
        length: tokens of a sequence.
    """
    h, f = config.hidden_size, config.ffn_size
    layers = len(config.layer_plan) * (4 * h * h + 2 * h * f + 2 * h * length)
    return 2 * (config.embedding_size * h + layers)


def train_flops_per_token(
    config: AlbertConfig,
    *,
    length: float,
    masked_rate: float,
    num_sentence_outputs: int = 2,
    read_rate: float = 1.0,
) -> float:
    """Return the FLOPs per token of the matrix products of the forward and backward pass.

    Three times the forward pass, since each product has two in the backward pass; 2 operations
    for each multiply-add, of which a real token has

        E*H                          the map of embeddings to hidden states
        + n * (4H² + 2HF + 2HS)      n applications of a layer; 2HS are the attention's scores and
                                     sums over a sequence of S tokens
        - (1 - read) * (H² + 2HF)    where the last layer, after its attention, is applied to the
                                     gathered positions only
        + masked * (HE + EV)         fill-mask, at the masked tokens alone
        + (H² + HK) / S              pooler and sentence head of K outputs, once a sequence

    Lookups, norms, activations and softmax are not counted, nor are padding and recomputed
    activations.

    Args:
        length: S, real tokens of a sequence. For sequences of several lengths give the mean over
            their tokens, the sum of squares over the sum.
        masked_rate: fraction of the tokens that is predicted.
        read_rate: fraction of the positions that is gathered; 1 where all are computed.
        num_sentence_outputs: K; 0 for a run without a sentence task, which has no pooler either.
    """
    e, h, f, v = config.embedding_size, config.hidden_size, config.ffn_size, config.vocab_size
    unread = (1 - read_rate) * (h * h + 2 * h * f)
    fill_mask = masked_rate * (h * e + e * v)
    sentence = (h * h + h * num_sentence_outputs) / length if num_sentence_outputs else 0.0
    return 3 * (forward_flops_per_token(config, length) + 2 * (fill_mask + sentence - unread))
