"""The contestants with their variants, and the messages between parent and processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.harness.process import BenchmarkError

CaseKind = Literal["shapes", "texts"]
KINDS: Final[tuple[CaseKind, ...]] = ("shapes", "texts")
# The case of a request that is a stream of texts; the others are shapes such as "4x128".
TEXTS: Final = "texts"
BASELINE: Final = "transformers-fp32"
_BATCH_SIZES: Final = (1, 2, 4, 8, 16)
# Packs the weights for the processor's own products when it compiles.
_FREEZES: Final = {"TORCHINDUCTOR_FREEZING": "1"}
_NUM_FEW: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way of a contestant to run; the best one counts.

    Attributes:
        module: of `benchmarks.engine`; its process runs the variant.
        form: the format of the model's files; see `models.FORMS`.
        settings: options of its module.
    """

    name: str
    module: str
    form: str
    kinds: tuple[CaseKind, ...] = KINDS
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def compiles(self) -> bool:
        """Whether it is long in getting ready."""
        return self.settings.get("compile") == "yes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """A contestant.

    Attributes:
        batch_sizes: of the stream, rising, among which it looks for its best; 0: it forms its
            batches itself.
        part: of the stream's texts that it does in a turn; see `Inputs.indices`.
        modules: Python modules that must be installed.
    """

    name: str
    variants: tuple[Variant, ...]
    batch_sizes: tuple[int, ...] = _BATCH_SIZES
    part: str = "all"
    modules: tuple[str, ...] = ()


def _hf(name: str, **settings: str) -> Variant:
    return Variant(name=name, module="hf", form="checkpoint", settings=settings)


_PIPELINE: Final = Variant(
    name="", module="hf", form="checkpoint", kinds=("texts",), settings={"pipeline": "yes"}
)


def _openvino(name: str, form: str, precision: str) -> Contestant:
    """Return OpenVINO's contestant; without a precision the runtime chooses one."""
    hints: dict[str, tuple[CaseKind, ...]] = {"latency": KINDS, "throughput": ("texts",)}
    variants = [
        Variant(
            name=f"{hint} hint",
            module="openvino_ir",
            form=form,
            kinds=kinds,
            settings={"hint": hint, "precision": precision},
        )
        for hint, kinds in hints.items()
    ]
    return Contestant(
        name=f"OpenVINO {name}",
        variants=tuple(variants),
        modules=("openvino", "nncf") if name == "int8" else ("openvino",),
    )


def _ours(precision: str) -> Contestant:
    variant = Variant(name="", module="ours", form=f"bundle-{precision}")
    return Contestant(name=f"ours {precision}", variants=(variant,), batch_sizes=(0,))


# The first is the reference of answers and the baseline of ratios.
CONTESTANTS: Final[dict[str, Contestant]] = {
    "transformers-fp32": Contestant(
        name="transformers fp32",
        variants=(
            _hf("sdpa", attention="sdpa", dtype="fp32"),
            _hf("eager attention", attention="eager", dtype="fp32"),
        ),
    ),
    "transformers-bf16": Contestant(
        name="transformers bf16",
        variants=(
            _hf("weights", dtype="bf16"),
            _hf("autocast", dtype="autocast"),
            _hf("weights, compiled", dtype="bf16", compile="yes"),
            _hf("autocast, compiled", dtype="autocast", compile="yes"),
        ),
    ),
    "pipeline-1": Contestant(
        name="pipeline, batch 1",
        variants=(_PIPELINE,),
        batch_sizes=(1,),
        part="third",
    ),
    "onnxruntime": Contestant(
        name="ONNX Runtime, plain export",
        variants=(Variant(name="", module="plain_onnx", form="onnx"),),
        modules=("onnxruntime", "onnxscript"),
    ),
    "openvino-fp32": _openvino("fp32", "openvino", "f32"),
    "openvino-bf16": _openvino("bf16", "openvino", "bf16"),
    "openvino-int8": _openvino("int8", "openvino-int8", ""),
    "ours-fp32": _ours("fp32"),
    "ours-int8": _ours("int8"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sequences of one length, without padding."""

    num_rows: int
    length: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Return the shape that `4x128` stands for: 4 sequences of 128 tokens.

        Raises:
            BenchmarkError: it is not written so.
        """
        num_rows, sign, length = text.partition("x")
        if not (sign and num_rows.isdecimal() and length.isdecimal() and int(num_rows)):
            raise BenchmarkError(f"{text!r} is no shape; write ROWSxTOKENS, such as 4x128")
        if int(length) < 2:
            raise BenchmarkError(f"{text!r}: a sequence has at least 2 tokens, [CLS] and [SEP]")
        return cls(num_rows=int(num_rows), length=int(length))

    def __str__(self) -> str:
        return f"{self.num_rows}x{self.length}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The inputs of all contestants.

    Attributes:
        texts: of the stream, in random order.
        lengths: their tokens, special ones included.
        calibration: further texts, for those who quantise by example.
        pool: ids of real text, of which the fixed shapes are cut.
    """

    texts: Sequence[str]
    lengths: Sequence[int]
    calibration: Sequence[str]
    pool: Sequence[int]

    def indices(self, part: str) -> list[int]:
        """Return the indices of "all" texts, every "third" by length, or a "few".

        The lengths of a part are distributed as those of all texts.
        """
        order = sorted(range(len(self.lengths)), key=lambda index: self.lengths[index])
        step = {"all": 1, "third": 3, "few": max(1, len(order) // _NUM_FEW)}[part]
        return sorted(order[min(step // 2, len(order) - 1) :: step])

    def part(self, part: str) -> list[str]:
        """Return the texts of a part."""
        return [self.texts[index] for index in self.indices(part)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelJob:
    """The model that a process opens, and its inputs.

    Attributes:
        contestant: its name.
        model: folder of the model in the form that the variant reads.
        tokenizer: the `tokenizer.json` of all contestants.
        max_tokens: of one sequence, special tokens included.
    """

    contestant: str
    variant: Variant
    model: Path
    tokenizer: Path
    inputs: Inputs
    num_threads: int
    max_tokens: int

    @property
    def name(self) -> str:
        """The contestant and its variant."""
        return f"{self.contestant} ({self.variant.name})" if self.variant.name else self.contestant

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its process: as many threads for everything that has some."""
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
        threads = dict.fromkeys(names, str(self.num_threads))
        quiet = {"TOKENIZERS_PARALLELISM": "true", "TRANSFORMERS_VERBOSITY": "error"}
        return {**threads, **quiet, **(_FREEZES if self.variant.compiles else {})}


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """The message that asks a process for a turn.

    Attributes:
        case: a shape, or "texts".
        batch_size: of the stream; 0 where the contestant chooses itself.
        part: which of the stream's texts.
        seconds: for how long calls of a shape are repeated, at least.
    """

    case: str
    batch_size: int = 0
    part: str = "all"
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """The start of a contestant.

    Attributes:
        load_s: from the files to a model that can be called; imports are not counted.
        import_bytes: resident memory before that.
    """

    load_s: float
    import_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTurn:
    """The measurement of one turn.

    Attributes:
        seconds: of wall clock, of one call or one pass over the stream.
        cpu_seconds: of all its threads together.
        num_items: texts or rows.
        num_tokens: real ones.
        num_computed: tokens computed, padding included.
        outputs: probabilities of each item, in order.
        rss_bytes: resident memory of the process after it.
    """

    seconds: float
    cpu_seconds: float
    num_items: int
    num_tokens: int
    num_computed: int
    outputs: Any
    rss_bytes: int = 0

    @property
    def items_per_s(self) -> float:
        """Items a second of wall clock."""
        return self.num_items / self.seconds

    @property
    def padding(self) -> float:
        """Part of the computed tokens that is padding."""
        return 1 - self.num_tokens / self.num_computed


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The speed of plain square products, floating-point operations a second.

    Attributes:
        fp32: of the fastest library and size.
        bf16: by torch; 0 where it has none.
        fp32_by, bf16_by: which library and size it was.
    """

    fp32: float
    bf16: float
    fp32_by: str
    bf16_by: str
