"""Text output of a diagnosis."""

from __future__ import annotations

from typing import Final

from albert_serve.doctor.examination import Diagnosis
from albert_serve.doctor.footprint import Footprint
from albert_serve.doctor.machine import Machine
from albert_serve.doctor.report import columns, in_bytes, rounded, section, table

_NOT_MEASURED: Final = "not measured: this system does not tell it"


def findings_text(diagnosis: Diagnosis, advice: list[str]) -> str:
    """Return a diagnosis and its advice as text."""
    head = (
        f"{diagnosis.folder}: {diagnosis.precision}, {in_bytes(diagnosis.weights_bytes)} of weights"
    )
    lines = [head, *section("machine", columns(_machine_rows(diagnosis.machine)))]
    lines += section("how it is run", columns(_option_rows(diagnosis)))
    lines += section("matrix products of this machine, by the runtime itself", _products(diagnosis))
    lines += section("seconds to open", _opening(diagnosis))
    lines += section("memory", _memory(diagnosis))
    lines += section("speed", _speed(diagnosis))
    lines += section("advice", [f"- {sentence}" for sentence in advice] or ["none"])
    return "\n".join(lines)


def _machine_rows(machine: Machine) -> list[tuple[str, str]]:
    quota = (
        f"{machine.cpu_quota:.3g} processors' worth of time" if machine.cpu_quota else "no limit"
    )
    unknown = None if machine.instructions_are_known else "not known here"
    int8 = ", ".join(machine.int8_instructions) or "none: no VNNI, int8 is slow"
    bf16 = ", ".join(machine.bf16_instructions)
    return [
        ("system", machine.system),
        ("processor", machine.processor),
        ("cores", f"{machine.num_usable_cpus} usable of {machine.num_cpus}; {quota}"),
        ("int8 instructions", unknown or int8),
        ("bf16 instructions", unknown or (f"{bf16}; the runtime uses none" if bf16 else "none")),
        ("onnxruntime", f"{machine.onnxruntime} ({', '.join(machine.providers)})"),
        ("CUDA device", "yes" if machine.no_cuda is None else f"no: {machine.no_cuda}"),
    ]


def _option_rows(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    spinning = "spinning" if diagnosis.spinning else "not spinning"
    return [
        ("device", diagnosis.device),
        ("workers", str(diagnosis.num_workers)),
        ("threads", f"{diagnosis.threads} of each worker, {spinning}"),
        ("packed weights", diagnosis.prepack),
    ]


def _products(diagnosis: Diagnosis) -> list[str]:
    products = diagnosis.products
    return columns(
        [
            ("fp32", f"{rounded(products.fp32_gflops_per_s)} GFLOP/s"),
            (
                "int8",
                f"{rounded(products.int8_gflops_per_s)} GFLOP/s, {products.int8_gain:.1f} times",
            ),
        ]
    )


def _opening(diagnosis: Diagnosis) -> list[str]:
    rows = []
    cold = "from disk, and packed into the cache" if diagnosis.fills_cache else "from disk"
    for name, opening in ((cold, diagnosis.opening_cold), ("again", diagnosis.opening_warm)):
        if opening is not None:
            parts = (opening.check_s, opening.sessions_s, opening.first_run_s)
            rows.append((name, *(f"{part:.3f}" for part in (*parts, sum(parts)))))
    notes = [] if diagnosis.opening_cold else [f"{cold}: {_NOT_MEASURED}"]
    return [*table(("", "files checked", "sessions", "first run", "all"), rows), *notes]


def _memory(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.footprint is None:
        return [_NOT_MEASURED]
    lines = _footprint(diagnosis.footprint)
    if diagnosis.workers_footprint is not None:
        lines += ["", *_footprint(diagnosis.workers_footprint)]
    return lines


def _footprint(footprint: Footprint) -> list[str]:
    before, after = footprint.before, footprint.after
    names = {
        "PSS (a shared page divided)": "pss_bytes",
        "private pages": "private_bytes",
        "pages of no file": "anonymous_bytes",
        "pages shared with others": "shared_bytes",
        "all at the peak": "peak_bytes",
    }
    rows = [
        (name, *(in_bytes(getattr(memory, key)) for memory in (before, after)))
        for name, key in names.items()
    ]
    count = footprint.num_processes
    who = "one process" if count == 1 else f"{count} processes"
    added, weights = map(in_bytes, (footprint.bundle_pss_bytes, footprint.weights_pss_bytes))
    return [
        *table((who, "before opening", "after a run of all tasks"), rows),
        f"the bundle adds {added}, {footprint.bundle_over_weights:.2f} times the weight file",
        f"of that weights: {weights}, {footprint.weights_over_file:.2f} times",
    ]


def _speed(diagnosis: Diagnosis) -> list[str]:
    rows = [
        (
            f"{speed.num_sequences} x {speed.num_tokens}",
            rounded(speed.median_ms),
            rounded(speed.fastest_ms),
            rounded(speed.tokens_per_s),
            rounded(speed.gflops_per_s),
            "" if speed.share_of_peak is None else f"{speed.share_of_peak:.0%}",
            str(speed.num_runs),
        )
        for speed in diagnosis.speeds
    ]
    header = ("tokens", "ms, median", "ms, best", "tokens/s", "GFLOP/s", "of peak", "runs")
    note = "tokens/s: median run; GFLOP/s: best run, of the encoder; of peak: of fp32 products"
    return [*table(header, rows), note] if rows else []
