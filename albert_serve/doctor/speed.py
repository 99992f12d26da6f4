"""The throughput of an engine for some shapes, also as a share of the machine's peak."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from albert_serve.api.embeddings import FEATURE_EXTRACTION
from albert_serve.bundle.manifest import Bundle
from albert_serve.config import AlbertConfig
from albert_serve.doctor.timing import time_runs
from albert_serve.progress import progress
from albert_serve.runtime.engine import Engine
from albert_serve.tasks.base import EncoderInput

# Tokens of a single sequence; the longest that the model takes is added.
_LENGTHS: Final = (8, 32, 128)
_BUDGET_S: Final = 2.0  # of one shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Running inputs of one shape together, unpadded.

    Attributes:
        num_sequences: inputs.
        num_tokens: of each.
        num_runs: the number of runs.
        median_ms: of the runs.
        fastest_ms: of the runs.
        tokens_per_s: of all sequences, in the median run.
        gflops_per_s: the encoder's additions and multiplications in the fastest run, in 10^9 a
            second.
        share_of_peak: the same over `Products.fp32_gflops_per_s`; None on a CUDA device.
    """

    num_sequences: int
    num_tokens: int
    num_runs: int
    median_ms: float
    fastest_ms: float
    tokens_per_s: float
    gflops_per_s: float
    share_of_peak: float | None


def measure_speeds(
    engine: Engine, bundle: Bundle, fp32_gflops_per_s: float | None = None
) -> list[Speed]:
    """Measure single sequences of some lengths, and full batches.

    Args:
        engine: of the bundle; its lightest head is read, or the hidden states if it has none.
        bundle: the engine's bundle.
        fp32_gflops_per_s: what `Speed.share_of_peak` is a share of.

    Raises:
        EngineError: the runtime failed.
    """
    tasks = bundle.manifest.tasks
    heads = sorted(tasks, key=lambda name: tasks[name].num_outputs)
    lightest = heads[0] if heads else FEATURE_EXTRACTION
    return [
        _measure(engine, lightest, shape, fp32_gflops_per_s)
        for shape in progress(_shapes(engine), title="speed", unit="shapes")
    ]


def encoder_flops(config: AlbertConfig, num_sequences: int, num_tokens: int) -> int:
    """Return the additions and multiplications of the encoder, attention scores included.

    Scores and weighted sums take S * H multiplications each, for each token and layer.
    """
    attention = 4 * num_tokens * config.hidden_size * len(config.layer_plan)
    return num_sequences * (linear_flops(config, num_tokens) + num_tokens * attention)


def linear_flops(config: AlbertConfig, num_tokens: int) -> int:
    """Return those of the linear maps: two for each token and each use of a weight."""
    embedded = config.vocab_size * config.embedding_size
    pooler = config.hidden_size**2
    return 2 * num_tokens * (config.num_compute_weights - embedded - pooler)


def _shapes(engine: Engine) -> list[tuple[int, int]]:
    """Return the shapes: single sequences, and full batches."""
    longest = engine.config.max_positions
    lengths = sorted({min(length, longest) for length in (*_LENGTHS, longest)})
    batched = min(_LENGTHS[-1], longest)
    together = engine.max_batch_tokens // batched
    return [(1, length) for length in lengths] + ([(together, batched)] if together > 1 else [])


def _measure(engine: Engine, task: str, shape: tuple[int, int], peak: float | None) -> Speed:
    num_sequences, num_tokens = shape
    inputs = list(_draw_inputs(engine.config, task, num_sequences, num_tokens))
    timing = time_runs(lambda: engine.run(inputs), budget_s=_BUDGET_S)
    gflops_per_s = 1e-9 * encoder_flops(engine.config, *shape) / timing.fastest_s
    return Speed(
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        num_runs=timing.num_runs,
        median_ms=1e3 * timing.median_s,
        fastest_ms=1e3 * timing.fastest_s,
        tokens_per_s=num_sequences * num_tokens / timing.median_s,
        gflops_per_s=gflops_per_s,
        share_of_peak=gflops_per_s / peak if peak else None,
    )


def _draw_inputs(
    config: AlbertConfig, task: str, num_sequences: int, num_tokens: int
) -> Iterator[EncoderInput]:
    """Return inputs of random ids; one gathered row each, so that the encoder dominates."""
    chance = random.Random(0)
    for _ in range(num_sequences):
        ids = [chance.randrange(config.vocab_size) for _ in range(num_tokens)]
        yield EncoderInput(ids=ids, types=[0] * num_tokens, task=task, rows=[0])
