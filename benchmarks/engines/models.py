"""The model in the forms that contestants read, each made in a process of its own.

A checkpoint is made at random, or read; from it come the ONNX and OpenVINO files and our bundles.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.engines.jobs import TaskName
from benchmarks.harness.errors import BenchmarkError, last_line
from training.errors import TrainingError

TOKENIZER_FILE: Final = "tokenizer.json"
_REPOSITORY: Final = Path(__file__).parents[2]
_EXAMPLE_SHAPE: Final = (2, 16)
_INPUTS: Final = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A form to make.

    Attributes:
        form: one of `FORMS`.
        source: a checkpoint to read; for the form "checkpoint" None makes one at random.
        preset: its sizes.
        tokenizer: the `tokenizer.json` of all contestants.
        inputs: the file of `inputs.Inputs`.
        target: the folder to write.
    """

    form: str
    task: TaskName
    source: Path | None
    preset: str
    tokenizer: Path
    inputs: Path
    target: Path
    max_tokens: int
    num_threads: int

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), default=lambda path: str(path))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote."""
        fields = json.loads(text)
        paths = {name: Path(fields[name]) for name in ("tokenizer", "inputs", "target")}
        source = None if fields["source"] is None else Path(fields["source"])
        return cls(**{**fields, **paths, "source": source})


def make(plan: Plan, log: Path) -> None:
    """Make a form in a process that ends.

    Args:
        log: file for the process' output.

    Raises:
        BenchmarkError: it could not be made.
    """
    shutil.rmtree(plan.target, ignore_errors=True)
    plan.target.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(plan.num_threads)}
    with log.open("w", encoding="utf-8") as stream:
        status = subprocess.run(
            [sys.executable, "-m", "benchmarks.engines.models", plan.to_json()],
            cwd=_REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if status:
        raise BenchmarkError(f"{plan.form} could not be made: {last_line(log)} (see {log})")


def disk_bytes(folder: Path) -> int:
    """Return the size of a form's files, without the tokenizer, which all read."""
    files = [file for file in folder.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files if not file.name.startswith("tokenizer"))


def make_checkpoint(plan: Plan) -> None:
    """A Hugging Face directory with the head of the task, at random where there is none.

    A standard deviation of H^-0.5 keeps the size of what goes through a matrix, so that the answers
    depend on the text; with the 0.02 of training's start they hardly do.
    """
    import torch
    import transformers

    from albert_serve.config import PRESETS

    classes: dict[TaskName, Any] = {
        "text-classification": transformers.AlbertForSequenceClassification,
        "question-answering": transformers.AlbertForQuestionAnswering,
    }
    torch.manual_seed(0)
    if plan.source is None:
        sizes = PRESETS[plan.preset]
        config = transformers.AlbertConfig.from_dict(sizes.to_hf())
        config.initializer_range = sizes.hidden_size**-0.5
        model = classes[plan.task](config)
    else:
        model = classes[plan.task].from_pretrained(plan.source, dtype=torch.float32)
    model.save_pretrained(plan.target)
    shutil.copyfile(plan.tokenizer, plan.target / TOKENIZER_FILE)


def _load(plan: Plan) -> tuple[Any, dict[str, Any]]:
    """The model and an example of its inputs, of which the first row has padding."""
    import torch
    import transformers

    assert plan.source is not None
    model = transformers.AutoModelForSequenceClassification.from_pretrained(plan.source)
    arrays = {name: torch.zeros(_EXAMPLE_SHAPE, dtype=torch.int64) for name in _INPUTS}
    arrays["input_ids"] += 1
    arrays["attention_mask"][0, : _EXAMPLE_SHAPE[1] // 2] = 1
    arrays["attention_mask"][1] = 1
    return model.eval(), arrays


def _make_onnx(plan: Plan) -> None:
    import torch

    from benchmarks.engines.plain_onnx import GRAPH_FILE

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


def _make_openvino(plan: Plan) -> None:
    import openvino

    from benchmarks.engines.openvino_ir import GRAPH_FILE

    model, example = _load(plan)
    converted = openvino.convert_model(model, example_input=example)
    openvino.save_model(converted, plan.target / GRAPH_FILE, compress_to_fp16=False)


def _make_openvino_int8(plan: Plan) -> None:
    import nncf
    import openvino

    from benchmarks.engines.inputs import Inputs, pad, plain_encoder
    from benchmarks.engines.openvino_ir import GRAPH_FILE

    model, example = _load(plan)
    converted = openvino.convert_model(model, example_input=example)
    encode = plain_encoder(plan.tokenizer, plan.max_tokens)
    texts = Inputs.read(plan.inputs).calibration
    dataset = nncf.Dataset([pad([ids]).feed() for ids in encode(texts)])
    quantized = nncf.quantize(
        converted, dataset, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(texts)
    )
    openvino.save_model(quantized, plan.target / GRAPH_FILE, compress_to_fp16=False)


def _make_bundle(plan: Plan) -> None:
    from export.write import export_bundle

    assert plan.source is not None
    precision: Any = plan.form.removeprefix("bundle-")
    export_bundle(plan.source, plan.target, precision=precision)


FORMS: Final[dict[str, Callable[[Plan], None]]] = {
    "checkpoint": make_checkpoint,
    "onnx": _make_onnx,
    "openvino": _make_openvino,
    "openvino-int8": _make_openvino_int8,
    "bundle-fp32": _make_bundle,
    "bundle-int8": _make_bundle,
}


def main() -> int:
    """Make the form that the first argument plans."""
    plan = Plan.from_json(sys.argv[1])
    try:
        FORMS[plan.form](plan)
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
