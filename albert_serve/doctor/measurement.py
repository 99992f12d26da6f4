"""Measurement of a bundle on this machine: memory and speed, by the options of the service."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from albert_serve.api.embeddings import FEATURE_EXTRACTION
from albert_serve.bundle.manifest import Bundle
from albert_serve.doctor.footprint import Footprint, measure_footprint
from albert_serve.progress import progress
from albert_serve.runtime.engine import Engine
from albert_serve.runtime.ort import processor_name
from albert_serve.settings import RuntimeOptions, num_usable_cpus
from albert_serve.tasks.base import EncoderInput

# Tokens of a single sequence; the longest that the model takes is added.
_LENGTHS: Final = (8, 32, 128)
_BUDGET_S: Final = 2.0  # for one shape
_MAX_RUNS: Final = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class _Speed:
    """The speed of inputs of one shape that run together, without padding.

    Attributes:
        num_sequences: inputs.
        num_tokens: of each.
        num_runs: the number of runs.
        median_ms: of the runs.
        tokens_per_s: of all sequences, in the median run.
    """

    num_sequences: int
    num_tokens: int
    num_runs: int
    median_ms: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The measurements; its attributes are the keys of `albert-serve doctor --json`.

    Attributes:
        folder: the bundle's.
        precision: the bundle's.
        weights_bytes: size of the weight file.
        processor: its name.
        num_usable_cpus: those that this process may use.
        device: the bundle's device, "cpu" or "cuda".
        threads: threads of one run.
        prepack: the location of pre-packed weights.
        num_workers: worker processes.
        footprint: one process' memory; None where the system does not tell.
        workers_footprint: that of all workers; None as well where there is one worker.
        speeds: by shape.
    """

    folder: str
    precision: str
    weights_bytes: int
    processor: str
    num_usable_cpus: int
    device: str
    threads: int
    prepack: str
    num_workers: int
    footprint: Footprint | None
    workers_footprint: Footprint | None
    speeds: list[_Speed]


def measure_bundle(bundle: Bundle, options: RuntimeOptions, num_workers: int = 1) -> Measurement:
    """Measure a bundle on this machine; takes seconds, and a minute or two for the largest.

    Args:
        bundle: the bundle to measure.
        options: the runtime options of each worker.
        num_workers: worker processes.

    Raises:
        BundleError: the runtime refuses the bundle.
        EngineError: it cannot be run, or a process that opened it ended.
    """
    tells = sys.platform == "linux"
    footprint = measure_footprint(bundle, options, 1) if tells else None
    workers = measure_footprint(bundle, options, num_workers) if tells and num_workers > 1 else None
    engine = Engine.open(bundle, options)
    return Measurement(
        folder=str(bundle.folder),
        precision=bundle.manifest.precision,
        weights_bytes=bundle.weights_file.stat().st_size,
        processor=processor_name(),
        num_usable_cpus=num_usable_cpus(),
        device=engine.device,
        threads=options.threads,
        prepack=options.prepack,
        num_workers=num_workers,
        footprint=footprint,
        workers_footprint=workers,
        speeds=_measure_speeds(engine),
    )


def _measure_speeds(engine: Engine) -> list[_Speed]:
    """Measure single sequences of some lengths, and full batches.

    Raises:
        EngineError: the runtime failed.
    """
    longest = engine.config.max_positions
    lengths = sorted({min(length, longest) for length in (*_LENGTHS, longest)})
    batched = min(_LENGTHS[-1], longest)
    shapes = [(1, length) for length in lengths]
    if engine.max_batch_tokens >= 2 * batched:
        shapes.append((engine.max_batch_tokens // batched, batched))
    return [
        _measure_speed(engine, *shape) for shape in progress(shapes, title="speed", unit="shapes")
    ]


def _measure_speed(engine: Engine, num_sequences: int, num_tokens: int) -> _Speed:
    inputs = _random_inputs(engine.config.vocab_size, num_sequences, num_tokens)
    engine.run(inputs)  # what only a first run does is not counted
    times_s: list[float] = []
    while not times_s or (sum(times_s) < _BUDGET_S and len(times_s) < _MAX_RUNS):
        started_s = time.perf_counter()
        engine.run(inputs)
        times_s.append(time.perf_counter() - started_s)
    median_s = statistics.median(times_s)
    return _Speed(
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        num_runs=len(times_s),
        median_ms=1e3 * median_s,
        tokens_per_s=num_sequences * num_tokens / median_s,
    )


def _random_inputs(vocab_size: int, num_sequences: int, num_tokens: int) -> Sequence[EncoderInput]:
    """Return inputs of random ids whose hidden states are read at [CLS]: the encoder's time."""
    chance = random.Random(0)
    return [
        EncoderInput(
            ids=[chance.randrange(vocab_size) for _ in range(num_tokens)],
            types=[0] * num_tokens,
            task=FEATURE_EXTRACTION,
            rows=[0],
        )
        for _ in range(num_sequences)
    ]
