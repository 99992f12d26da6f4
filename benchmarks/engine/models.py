"""Conversion of a checkpoint to the formats of the contestants, each in its own process."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.process import run_in_process

TOKENIZER_FILE: Final = "tokenizer.json"
_EXAMPLE_SHAPE: Final = (2, 16)
_INPUTS: Final = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionPlan:
    """A conversion of a checkpoint.

    Attributes:
        model_format: format to write, a key of `CONVERTERS`.
        checkpoint: folder of the checkpoint.
        target: folder to write.
        max_tokens: maximum number of tokens in a text.
        calibration: texts for formats whose quantiser needs examples.
    """

    model_format: str
    checkpoint: Path
    target: Path
    max_tokens: int
    calibration: Sequence[str]


def convert(plan: ConversionPlan) -> int:
    """Convert in a temporary process; return the size in bytes, without the tokenizer."""
    shutil.rmtree(plan.target, ignore_errors=True)
    run_in_process(CONVERTERS[plan.model_format], plan)
    return size_on_disk(plan.target)


def size_on_disk(folder: Path) -> int:
    """Return the size of a model's files in bytes, without the tokenizer."""
    files = [file for file in folder.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files if not file.name.startswith("tokenizer"))


def _load(plan: ConversionPlan) -> tuple[Any, dict[str, Any]]:
    """Return the model and example inputs whose first row has padding."""
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(plan.checkpoint)
    arrays = {name: torch.zeros(_EXAMPLE_SHAPE, dtype=torch.int64) for name in _INPUTS}
    arrays["input_ids"] += 1
    arrays["attention_mask"][0, : _EXAMPLE_SHAPE[1] // 2] = 1
    arrays["attention_mask"][1] = 1
    return model.eval(), arrays


def _make_onnx(plan: ConversionPlan) -> None:
    import torch

    from benchmarks.engine.plain_onnx import GRAPH_FILE

    model, example = _load(plan)
    plan.target.mkdir()
    free = torch.export.Dim.DYNAMIC
    torch.onnx.export(
        model,
        (),
        str(plan.target / GRAPH_FILE),
        kwargs=example,
        input_names=list(_INPUTS),
        output_names=["logits"],
        dynamic_shapes={name: {0: free, 1: free} for name in _INPUTS},
        dynamo=True,
    )


def _make_openvino(plan: ConversionPlan) -> None:
    import openvino

    from benchmarks.engine.openvino_ir import GRAPH_FILE

    model, example = _load(plan)
    converted = openvino.convert_model(model, example_input=example)
    if plan.model_format == "openvino-int8":
        converted = _quantize(converted, plan)
    openvino.save_model(converted, plan.target / GRAPH_FILE, compress_to_fp16=False)


def _quantize(converted: Any, plan: ConversionPlan) -> Any:
    import nncf

    from benchmarks.engine.player import pad, plain_encoder

    encode = plain_encoder(plan.checkpoint / TOKENIZER_FILE, plan.max_tokens)
    texts = list(plan.calibration)
    dataset = nncf.Dataset([pad([ids]) for ids in encode(texts)])
    return nncf.quantize(
        converted, dataset, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(texts)
    )


def _make_bundle(plan: ConversionPlan) -> None:
    from export.job import ExportConfig, export

    precision: Any = plan.model_format.removeprefix("bundle-")
    export(
        ExportConfig(
            checkpoint=plan.checkpoint, bundle=plan.target, precision=precision, quality=False
        )
    )


CONVERTERS: Final[dict[str, Callable[[ConversionPlan], None]]] = {
    "onnx": _make_onnx,
    "openvino": _make_openvino,
    "openvino-int8": _make_openvino,
    "bundle-fp32": _make_bundle,
    "bundle-int8": _make_bundle,
    "bundle-fp16": _make_bundle,
}
