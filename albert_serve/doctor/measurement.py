"""Measurement of a bundle on this machine: memory and speed, by the options of the service."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from albert_serve.bundle.manifest import Bundle
from albert_serve.doctor.footprint import Footprint, measure_footprint
from albert_serve.doctor.layout import columns, in_bytes, rounded, section, table
from albert_serve.doctor.memory import read_memory
from albert_serve.doctor.speed import Speed, measure_speeds
from albert_serve.runtime.engine import Engine
from albert_serve.runtime.ort import processor_name
from albert_serve.settings import RuntimeOptions, num_usable_cpus


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
    speeds: list[Speed]


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
    tells = read_memory() is not None
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
        speeds=measure_speeds(engine),
    )


def measurement_text(measured: Measurement) -> str:
    """Return the measurements as text."""
    weights = in_bytes(measured.weights_bytes)
    run = [
        ("device", measured.device),
        ("processor", f"{measured.processor}, {measured.num_usable_cpus} usable CPUs"),
        ("workers", str(measured.num_workers)),
        ("threads", f"{measured.threads} of each worker"),
        ("packed weights", measured.prepack),
    ]
    footprints = [each for each in (measured.footprint, measured.workers_footprint) if each]
    memory = [line for each in footprints for line in _footprint_lines(each)]
    return "\n".join(
        [
            f"{measured.folder}: {measured.precision}, {weights} of weights",
            *section("how it is run", columns(run)),
            *section("memory", memory or ["not measured: this system does not tell it"]),
            *section("speed", _speed_lines(measured.speeds)),
        ]
    )


def _footprint_lines(footprint: Footprint) -> Iterator[str]:
    names = {
        "PSS (a shared page divided)": "pss_bytes",
        "private pages": "private_bytes",
        "pages of no file": "anonymous_bytes",
        "pages shared with others": "shared_bytes",
        "all at the peak": "peak_bytes",
    }
    states = (footprint.before, footprint.after)
    rows = [
        (name, *(in_bytes(getattr(memory, key)) for memory in states))
        for name, key in names.items()
    ]
    count = footprint.num_processes
    who = "one process" if count == 1 else f"{count} processes"
    yield from table((who, "before opening", "after a run of all tasks"), rows)
    added, weights = map(in_bytes, (footprint.bundle_pss_bytes, footprint.weights_pss_bytes))
    yield f"the bundle adds {added}, {footprint.bundle_over_weights:.2f} times the weight file"
    yield f"of that weights: {weights}, {footprint.weights_over_file:.2f} times"
    yield f"sessions were made in {footprint.sessions_s:.3f} s"


def _speed_lines(speeds: list[Speed]) -> list[str]:
    rows = [
        (
            f"{speed.num_sequences} x {speed.num_tokens}",
            rounded(speed.median_ms),
            rounded(speed.tokens_per_s),
            str(speed.num_runs),
        )
        for speed in speeds
    ]
    return table(("tokens", "ms, median", "tokens/s", "runs"), rows)
