"""The contestants with their settings, and the messages to and from their processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from benchmarks.harness.process import BenchmarkError

CaseKind = Literal["shapes", "texts"]
KINDS: Final[tuple[CaseKind, ...]] = ("shapes", "texts")
# Name of the case of one pass over the stream of texts. Other cases are shapes, such as "4x128".
TEXTS: Final = "texts"
BASELINE: Final = "transformers-fp32"
DeviceName = Literal["cpu", "cuda"]
_CUDA: Final[tuple[DeviceName, ...]] = ("cuda",)
_CUDA_BATCH: Final = 32
# A frozen model lets torch's compiler prepack the weights.
_FREEZES: Final = {"TORCHINDUCTOR_FREEZING": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """One way to run a model.

    Attributes:
        module: module of `benchmarks.engine` whose `open_player` opens the model.
        model_format: format of the model's files, a key of `models.CONVERTERS`.
        kinds: kinds of cases in which it takes part.
        batch_size: number of texts per batch of the stream, or 0 if the contestant forms batches.
        settings: options that its module reads.
        devices: devices on which it takes part by default.
    """

    name: str
    module: str
    model_format: str
    kinds: tuple[CaseKind, ...] = KINDS
    batch_size: int = 2
    settings: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[DeviceName, ...] = ("cpu",)

    def on(self, device: DeviceName) -> Contestant:
        """Return the contestant with the batch size for a device."""
        is_batched = device == "cuda" and self.batch_size > 0
        return replace(self, batch_size=_CUDA_BATCH) if is_batched else self


def _openvino(precision: str, hint: str, kinds: tuple[CaseKind, ...] = KINDS) -> Contestant:
    """Return an OpenVINO contestant. In int8, the graph itself defines the precision."""
    is_int8 = precision == "int8"
    hint_precision = {"fp32": "f32", "bf16": "bf16", "int8": ""}[precision]
    return Contestant(
        name=f"OpenVINO {precision}, {hint} hint",
        module="openvino_ir",
        model_format="openvino-int8" if is_int8 else "openvino",
        kinds=kinds,
        batch_size=4 if is_int8 else 2,
        settings={"hint": hint, "precision": hint_precision},
    )


def _ours(precision: str, devices: tuple[DeviceName, ...] = ("cpu",)) -> Contestant:
    return Contestant(
        name=f"ours {precision}",
        module="ours",
        model_format=f"bundle-{precision}",
        batch_size=0,
        devices=devices,
    )


def _scoring(precision: str) -> Contestant:
    """Return a contestant that scores a file, as `albert-serve score` does."""
    ours = _ours(precision)
    name = f"{ours.name}, scoring a file"
    return replace(ours, name=name, kinds=("texts",), settings={"scores": "file"})


def _half(name: str, kinds: tuple[CaseKind, ...] = KINDS, **settings: str) -> Contestant:
    """Return a contestant that runs `transformers` in fp16 on a GPU."""
    return Contestant(
        name=f"transformers fp16{name}",
        module="hf",
        model_format="checkpoint",
        kinds=kinds,
        settings={"dtype": "fp16", **settings},
        devices=_CUDA,
    )


# Answers and speeds are compared with the first contestant's. The settings were the fastest that we
# tried on an AMD EPYC with AVX-512. The texts in a batch have similar lengths.
CONTESTANTS: Final[dict[str, Contestant]] = {
    "transformers-fp32": Contestant(
        name="transformers fp32", module="hf", model_format="checkpoint", devices=("cpu", "cuda")
    ),
    "transformers-bf16": Contestant(
        name="transformers bf16, compiled",
        module="hf",
        model_format="checkpoint",
        batch_size=1,
        settings={"dtype": "bf16", "compile": "dynamic"},
    ),
    "transformers-fp16": _half(""),
    # Static compilation makes one CUDA graph per shape. A stream has too many lengths for that.
    "transformers-fp16-compiled": _half(", compiled", ("shapes",), compile="static"),
    "transformers-fp16-dynamic": _half(", compiled for any shape", ("texts",), compile="dynamic"),
    "pipeline-1": Contestant(
        name="pipeline, batch 1",
        module="hf",
        model_format="checkpoint",
        kinds=("texts",),
        batch_size=1,
        settings={"pipeline": "yes"},
    ),
    "onnxruntime": Contestant(
        name="ONNX Runtime, plain export",
        module="plain_onnx",
        model_format="onnx",
    ),
    "openvino-fp32": _openvino("fp32", "latency"),
    "openvino-fp32-stream": _openvino("fp32", "throughput", ("texts",)),
    "openvino-bf16": _openvino("bf16", "latency"),
    "openvino-bf16-stream": _openvino("bf16", "throughput", ("texts",)),
    "openvino-int8": _openvino("int8", "latency"),
    "ours-fp32": _ours("fp32"),
    "ours-int8": _ours("int8"),
    "ours-fp16": _ours("fp16", _CUDA),
    "score-fp32": _scoring("fp32"),
    "score-int8": _scoring("int8"),
}


def parse_shape(text: str) -> tuple[int, int]:
    """Return the number of sequences and their length in tokens: 4 and 128 for `4x128`.

    Raises:
        BenchmarkError: the text is not a shape.
    """
    num_rows, sign, length = text.partition("x")
    if not (sign and num_rows.isdecimal() and length.isdecimal() and int(num_rows)):
        raise BenchmarkError(f"{text!r} is not a shape. Use ROWSxTOKENS, such as 4x128.")
    if int(length) < 2:
        raise BenchmarkError(f"{text!r}: a sequence has at least 2 tokens, [CLS] and [SEP].")
    return int(num_rows), int(length)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelJob:
    """The model that a process opens, and its inputs.

    Attributes:
        model: folder of the model in the contestant's format.
        tokenizer: the `tokenizer.json` of all contestants.
        texts: texts of the stream, in random order.
        pool: token ids of real text, which fill the batches of fixed shapes.
        max_tokens: maximum number of tokens in a sequence, including special tokens.
        shape_s: minimum duration of a turn for one shape, in seconds.
    """

    contestant: Contestant
    model: Path
    tokenizer: Path
    num_threads: int
    max_tokens: int
    device: DeviceName = "cpu"
    texts: Sequence[str] = ()
    pool: Sequence[int] = ()
    shape_s: float = 0.0

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the process, which set every library's number of threads."""
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
        threads = dict.fromkeys(names, str(self.num_threads))
        quiet = {"TOKENIZERS_PARALLELISM": "true", "TRANSFORMERS_VERBOSITY": "error"}
        return {**threads, **quiet, **(_FREEZES if "compile" in self.contestant.settings else {})}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTurn:
    """The measurement of one turn.

    Attributes:
        seconds: median duration of a call, or duration of one pass over the stream.
        num_items: number of texts or rows.
        outputs: probabilities of each item, in order.
        rss_bytes: resident memory of the process after the turn.
    """

    seconds: float
    num_items: int
    outputs: Sequence[Sequence[float]]
    rss_bytes: int = 0

    @property
    def items_per_s(self) -> float:
        """Number of items per second."""
        return self.num_items / self.seconds
