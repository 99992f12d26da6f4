"""Text output of a bundle's description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from albert_serve.config import AlbertConfig
from albert_serve.doctor.description import Description, Sharing, Sizes
from albert_serve.doctor.layout import columns, in_bytes, section, table, tree


def description_text(described: Description) -> str:
    """Return a description as text."""
    num_files = len(described.sizes.files)
    lines = [f"{described.folder}: whole, {num_files} files of format {described.format_version}"]
    lines += section("model", _model_lines(described.config))
    lines += section("sizes on disk", _size_lines(described.sizes))
    lines += section("sharing", _sharing_lines(described.sharing))
    lines += section("precision", _precision_lines(described))
    lines += section("tasks", columns(_task_rows(described.tasks)))
    lines += section("quality on real text, in percent", _quality_lines(described.quality))
    parity = [(name, f"{value:.1e}") for name, value in described.parity.items()]
    lines += section("largest difference from torch", columns(parity))
    lines += section("evaluation", tree(described.evaluation))
    lines += section("provenance", tree(described.provenance))
    return "\n".join(lines)


def _model_lines(config: AlbertConfig) -> list[str]:
    numbers = {
        "layers": config.num_layers * config.num_inner_layers,
        "hidden size": config.hidden_size,
        "embedding size": config.embedding_size,
        "heads": config.num_heads,
        "feed-forward size": config.ffn_size,
        "vocabulary": config.vocab_size,
        "positions": config.max_positions,
    }
    return tree(numbers)


def _size_lines(sizes: Sizes) -> list[str]:
    times = f"{sizes.bundle_over_weights:.3f} times the weights"
    rows = [
        ("weights", in_bytes(sizes.weights_bytes)),
        ("tokenizer", in_bytes(sizes.tokenizer_bytes)),
        ("graphs", in_bytes(sizes.graphs_bytes)),
        ("manifest", in_bytes(sizes.manifest_bytes)),
        ("bundle", f"{in_bytes(sizes.bundle_bytes)}, {times}"),
    ]
    return columns(rows)


def _sharing_lines(sharing: Sharing) -> list[str]:
    stored, unshared = sharing.num_params, sharing.num_params_unshared
    lines = [
        _layers_line(sharing),
        f"{stored:,} parameters stored",
        f"{unshared:,} if every layer had its own, {unshared / stored:.2f} times as many",
        f"{sharing.num_graphs} graphs refer to {sharing.num_ranges} ranges of one weight file",
    ]
    if sharing.num_params_unused:
        lines.append(f"{sharing.num_params_unused:,} parameters in the file that no task needs")
    return lines


def _layers_line(sharing: Sharing) -> str:
    attentions, ffns = sharing.num_attentions_stored, sharing.num_ffns_stored
    if attentions == ffns == 1:
        return f"layer stored once, applied {sharing.num_layers_applied} times"
    stored = f"{attentions} layers"
    if attentions != ffns:
        stored = f"{attentions} attention and {ffns} feed-forward blocks"
    return f"{stored} stored, {sharing.num_layers_applied} layers applied"


def _precision_lines(described: Description) -> list[str]:
    total = sum(described.bytes_by_dtype.values())
    kept = ", ".join(described.kept_fp32)
    rows = [
        (dtype, f"{in_bytes(size)}, {100 * size / total:.1f} %")
        for dtype, size in described.bytes_by_dtype.items()
    ]
    return [described.precision + (f", but fp32: {kept}" if kept else ""), *columns(rows)]


def _task_rows(tasks: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    rows = []
    for name, task in tasks.items():
        outputs = f"{task['num_outputs']:,} output{'s' if task['num_outputs'] > 1 else ''}"
        labels = ", ".join(task["labels"] or [])
        kind = f"({task['problem_type']})" if task["problem_type"] else ""
        threshold = task.get("null_score_diff_threshold")
        if threshold is not None:
            kind = f"(no answer: null score over {threshold:.4g})"
        if task.get("question_head"):
            kind = f"{task['question_head']} {kind}"
        rows.append((name, outputs, f"{labels} {kind}".strip()))
    return rows


def _quality_lines(quality: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [
        (
            name,
            result["metric"],
            *(f"{result[key]:.2f}" for key in ("torch", "bundle", "cost")),
            f"{result['count']:,}",
            ", ".join(result["data"]),
        )
        for name, result in quality.items()
    ]
    return table(("task", "metric", "torch", "bundle", "cost", "predictions", "data"), rows)
