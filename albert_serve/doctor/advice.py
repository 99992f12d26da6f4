"""Advice that follows from the measurements of a diagnosis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from albert_serve.doctor.examination import Diagnosis
from albert_serve.doctor.report import in_bytes, rounded
from albert_serve.doctor.speed import Speed, linear_flops

# The smallest speedup that is worth another bundle.
_LEAST_GAIN: Final = 1.2
# A larger ratio of median to fastest run indicates other processes.
_LARGEST_SPREAD: Final = 1.3
# The smallest saving that is worth advice, as a share of the weights.
_LEAST_SAVING: Final = 0.2
# The tokens of most texts, at most.
_MANY_TOKENS: Final = 128


def advise(diagnosis: Diagnosis) -> list[str]:
    """Return advice that follows from the measurements, as sentences."""
    return [
        *_advise_precision(diagnosis),
        *_advise_threads(diagnosis),
        *_advise_prepack(diagnosis),
        *_advise_device(diagnosis),
        *_advise_noise(diagnosis),
    ]


def int8_speedup(diagnosis: Diagnosis) -> tuple[float, float]:
    """Return the bounds of an int8 bundle's speedup.

    The lower bound keeps all time beyond fp32's linear maps at the speed of `diagnosis.products`;
    the upper bound attributes all time to them.
    """
    gain = diagnosis.products.int8_gain
    speed = _usual(diagnosis)
    if speed is None:
        return 1.0, gain
    total_s = 1e-3 * speed.fastest_ms
    at_peak = (
        linear_flops(diagnosis.config, speed.num_tokens) / diagnosis.products.fp32_gflops_per_s
    )
    saved_s = min(1e-9 * at_peak, total_s) * (1 - 1 / gain)
    return total_s / (total_s - saved_s), gain


def _advise_precision(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.device != "cpu":
        return
    least, most = int8_speedup(diagnosis)
    instructions = ", ".join(diagnosis.machine.int8_instructions)
    has = f" (the processor has {instructions})" if instructions else ""
    usual = _usual(diagnosis)
    if diagnosis.precision != "int8" and usual and least >= _LEAST_GAIN:
        yield (
            f"int8 would be {least:.1f} to {most:.1f} times as fast at {usual.num_tokens} tokens: "
            f"its products run {most:.1f} times as fast as those of fp32{has}; export with "
            "--precision int8, which measures what it costs each task"
        )
    if diagnosis.precision == "int8" and most < _LEAST_GAIN:
        yield (
            f"int8 products run only {most:.1f} times as fast as those of fp32{has}: an fp32 "
            "bundle would be about as fast, and exact"
        )


def _advise_threads(diagnosis: Diagnosis) -> Iterator[str]:
    machine, num_threads = diagnosis.machine, diagnosis.threads * diagnosis.num_workers
    usable, quota = machine.num_usable_cpus, machine.cpu_quota
    threads = f"{diagnosis.num_workers} x {diagnosis.threads} threads"
    if diagnosis.device != "cpu":
        return
    if num_threads > usable:
        fitting = max(1, usable // diagnosis.num_workers)
        yield f"{threads} are more than the {usable} cores: set ALBERT_SERVE_THREADS={fitting}"
    elif quota is not None and num_threads > quota:
        fitting = max(1, int(quota) // diagnosis.num_workers)
        yield (
            f"{threads} are held to {quota:.3g} processors' worth of time and will be stopped in "
            f"the middle of runs: set ALBERT_SERVE_THREADS={fitting}"
        )
    if diagnosis.num_workers > min(usable, quota or usable) and diagnosis.spinning:
        yield "workers are more than cores and take time by waiting: set ALBERT_SERVE_SPINNING=off"


def _advise_prepack(diagnosis: Diagnosis) -> Iterator[str]:
    several = diagnosis.workers_footprint
    if diagnosis.device == "cpu" and diagnosis.prepack == "memory" and several:
        private = several.after.anonymous_bytes - several.before.anonymous_bytes
        saved = private - private // several.num_processes
        if saved > _LEAST_SAVING * diagnosis.weights_bytes:
            yield (
                f"the bundle takes {in_bytes(private)} that the {several.num_processes} workers do "
                "not share, packed weights above all: ALBERT_SERVE_PREPACK=cache saves up to "
                f"{in_bytes(saved)}"
            )
    short, long = _ends(diagnosis)
    if (
        diagnosis.prepack == "none"
        and short
        and long
        and short.gflops_per_s < long.gflops_per_s / 2
    ):
        share = short.gflops_per_s / long.gflops_per_s
        yield (
            f"at {short.num_tokens} tokens it computes at {share:.0%} of the speed of "
            f"{long.num_tokens} tokens, as each call packs the weights anew: set "
            "ALBERT_SERVE_PREPACK=memory, or cache for several workers"
        )


def _advise_device(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.device == "cpu" and diagnosis.machine.no_cuda is None:
        yield "there is a CUDA device that is not used: set ALBERT_SERVE_DEVICE=auto"
    if diagnosis.device == "cuda" and diagnosis.num_workers > 1:
        yield (
            f"{diagnosis.num_workers} workers hold {diagnosis.num_workers} copies of the weights "
            "on the CUDA device: set ALBERT_SERVE_WORKERS=1"
        )


def _advise_noise(diagnosis: Diagnosis) -> Iterator[str]:
    repeated = [speed for speed in diagnosis.speeds if speed.num_runs > 2]
    noisy = [s for s in repeated if s.median_ms > _LARGEST_SPREAD * s.fastest_ms]
    if noisy and len(noisy) >= len(repeated) / 2:
        worst = max(noisy, key=lambda speed: speed.median_ms / speed.fastest_ms)
        yield (
            f"times are not steady ({worst.num_sequences} x {worst.num_tokens} tokens took "
            f"{rounded(worst.fastest_ms)} ms at best, {rounded(worst.median_ms)} in the median): "
            "others use the cores; measure again when they do not"
        )


def _usual(diagnosis: Diagnosis) -> Speed | None:
    """Return the speed of a single sequence as long as most texts."""
    single = [speed for speed in diagnosis.speeds if speed.num_sequences == 1]
    return next((speed for speed in reversed(single) if speed.num_tokens <= _MANY_TOKENS), None)


def _ends(diagnosis: Diagnosis) -> tuple[Speed | None, Speed | None]:
    """Return the speeds of the shortest and the longest single sequence."""
    single = [speed for speed in diagnosis.speeds if speed.num_sequences == 1]
    return (single[0], single[-1]) if len(single) > 1 else (None, None)
