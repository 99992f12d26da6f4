"""Advice that follows from a diagnosis: from what was measured or read, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from albert_serve.doctor.examination import Diagnosis
from albert_serve.doctor.report import in_bytes, rounded
from albert_serve.doctor.speed import Speed, linear_flops

# A gain in speed that is smaller is not worth another bundle.
_LEAST_GAIN: Final = 1.2
# A median that is this much over the fastest run comes of other processes.
_LARGEST_SPREAD: Final = 1.3
# Of the weights; a smaller saving is not worth a word.
_LEAST_SAVING: Final = 0.2
# Of one sequence: what most texts have.
_MANY_TOKENS: Final = 128


def advise(found: Diagnosis) -> list[str]:
    """Sentences that follow from what was measured or read, and nothing else."""
    return [
        *_advise_precision(found),
        *_advise_threads(found),
        *_advise_prepack(found),
        *_advise_device(found),
        *_advise_noise(found),
    ]


def int8_speedup(found: Diagnosis) -> tuple[float, float]:
    """The least and the most times as fast that an int8 bundle would be.

    At the least all time that fp32 takes beyond its linear maps at the speed of `found.products`
    stays; at the most all time is theirs.
    """
    gain = found.products.int8_gain
    speed = _usual(found)
    if speed is None:
        return 1.0, gain
    total_s = 1e-3 * speed.fastest_ms
    at_peak = linear_flops(found.config, speed.num_tokens) / found.products.fp32_gflops_per_s
    saved_s = min(1e-9 * at_peak, total_s) * (1 - 1 / gain)
    return total_s / (total_s - saved_s), gain


def _advise_precision(found: Diagnosis) -> Iterator[str]:
    if found.device != "cpu":
        return
    least, most = int8_speedup(found)
    instructions = ", ".join(found.machine.int8_instructions)
    has = f" (the processor has {instructions})" if instructions else ""
    usual = _usual(found)
    if found.precision != "int8" and usual and least >= _LEAST_GAIN:
        yield (
            f"int8 would be {least:.1f} to {most:.1f} times as fast at {usual.num_tokens} tokens: "
            f"its products run {most:.1f} times as fast as those of fp32{has}; export with "
            "--precision int8, which measures what it costs each task"
        )
    if found.precision == "int8" and most < _LEAST_GAIN:
        yield (
            f"int8 products run only {most:.1f} times as fast as those of fp32{has}: an fp32 "
            "bundle would be about as fast, and exact"
        )


def _advise_threads(found: Diagnosis) -> Iterator[str]:
    machine, wanted = found.machine, found.threads * found.num_workers
    usable, quota = machine.num_usable_cpus, machine.cpu_quota
    threads = f"{found.num_workers} x {found.threads} threads"
    if found.device != "cpu":
        return
    if wanted > usable:
        fitting = max(1, usable // found.num_workers)
        yield f"{threads} are more than the {usable} cores: set ALBERT_SERVE_THREADS={fitting}"
    elif quota is not None and wanted > quota:
        fitting = max(1, int(quota) // found.num_workers)
        yield (
            f"{threads} are held to {quota:.3g} processors' worth of time and will be stopped in "
            f"the middle of runs: set ALBERT_SERVE_THREADS={fitting}"
        )
    if found.num_workers > min(usable, quota or usable) and found.spinning:
        yield "workers are more than cores and take time by waiting: set ALBERT_SERVE_SPINNING=off"


def _advise_prepack(found: Diagnosis) -> Iterator[str]:
    several = found.workers_footprint
    if found.device == "cpu" and found.prepack == "memory" and several:
        private = several.after.anonymous_bytes - several.before.anonymous_bytes
        saved = private - private // several.num_processes
        if saved > _LEAST_SAVING * found.weights_bytes:
            yield (
                f"the bundle takes {in_bytes(private)} that the {several.num_processes} workers do "
                "not share, packed weights above all: ALBERT_SERVE_PREPACK=cache saves up to "
                f"{in_bytes(saved)}"
            )
    short, long = _ends(found)
    if found.prepack == "none" and short and long and short.gflops_per_s < long.gflops_per_s / 2:
        share = short.gflops_per_s / long.gflops_per_s
        yield (
            f"at {short.num_tokens} tokens it computes at {share:.0%} of the speed of "
            f"{long.num_tokens} tokens, as each call packs the weights anew: set "
            "ALBERT_SERVE_PREPACK=memory, or cache for several workers"
        )


def _advise_device(found: Diagnosis) -> Iterator[str]:
    if found.device == "cpu" and found.machine.no_cuda is None:
        yield "there is a CUDA device that is not used: set ALBERT_SERVE_DEVICE=auto"
    if found.device == "cuda" and found.num_workers > 1:
        yield (
            f"{found.num_workers} workers hold {found.num_workers} copies of the weights on the "
            "CUDA device: set ALBERT_SERVE_WORKERS=1"
        )


def _advise_noise(found: Diagnosis) -> Iterator[str]:
    repeated = [speed for speed in found.speeds if speed.num_runs > 2]
    noisy = [s for s in repeated if s.median_ms > _LARGEST_SPREAD * s.fastest_ms]
    if noisy and len(noisy) >= len(repeated) / 2:
        worst = max(noisy, key=lambda speed: speed.median_ms / speed.fastest_ms)
        yield (
            f"times are not steady ({worst.num_sequences} x {worst.num_tokens} tokens took "
            f"{rounded(worst.fastest_ms)} ms at best, {rounded(worst.median_ms)} in the median): "
            "others use the cores; measure again when they do not"
        )


def _usual(found: Diagnosis) -> Speed | None:
    """A single sequence as long as most texts."""
    single = [each for each in found.speeds if each.num_sequences == 1]
    return next((each for each in reversed(single) if each.num_tokens <= _MANY_TOKENS), None)


def _ends(found: Diagnosis) -> tuple[Speed | None, Speed | None]:
    """The shortest and the longest single sequence."""
    single = [speed for speed in found.speeds if speed.num_sequences == 1]
    return (single[0], single[-1]) if len(single) > 1 else (None, None)
