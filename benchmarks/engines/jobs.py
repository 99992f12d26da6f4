"""The contestants and their variants, and the messages between parent and processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.harness.errors import BenchmarkError

Kind = Literal["shapes", "texts", "questions"]
KINDS: Final[tuple[Kind, ...]] = ("shapes", "texts", "questions")
_SIZES: Final = (1, 2, 4, 8, 16)
# Packs the weights for the processor's own products when it compiles.
_FREEZES: Final = {"TORCHINDUCTOR_FREEZING": "1"}
_HINTS: Final[dict[str, tuple[Kind, ...]]] = {
    "latency": ("shapes", "texts"),
    "throughput": ("texts",),
}
BASELINE: Final = "transformers-fp32"
TaskName = Literal["text-classification", "question-answering"]
# The cases of a request, besides a shape such as "4x128".
TEXTS: Final = "texts"
QUESTIONS: Final = "questions"
PEAK: Final = "peak"
MEMORY: Final = "memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way of a contestant to run; the best one counts.

    Attributes:
        program: the module of `benchmarks.engines` whose process runs it.
        form: the format of the model's files; see `models.FORMS`.
        kinds: the kinds of cases that it runs.
        settings: options of its program.
        environment: additional variables of its process.
    """

    name: str
    program: str
    form: str
    kinds: tuple[Kind, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def compiles(self) -> bool:
        """Whether it is long in getting ready."""
        return self.settings.get("compile") == "yes"

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> Variant:
        """A variant from its fields, lists instead of tuples."""
        return cls(**{**fields, "kinds": tuple(fields["kinds"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """A contestant.

    Attributes:
        batch_sizes: of a stream, rising, among which it looks for its best; 0: it forms its batches
            itself.
        part: of the stream's items that it does in a turn.
        modules: Python modules that must be installed.
        install: the packages that bring them.
    """

    name: str
    variants: tuple[Variant, ...]
    batch_sizes: tuple[int, ...] = _SIZES
    part: str = "all"
    modules: tuple[str, ...] = ()
    install: str = ""

    def takes_part(self, kind: Kind) -> list[Variant]:
        """The variants that take part in such cases."""
        return [variant for variant in self.variants if kind in variant.kinds]


def _hf(name: str, *kinds: Kind, **settings: str) -> Variant:
    compiled = settings.get("compile") == "yes"
    return Variant(
        name=name,
        program="hf",
        form="checkpoint",
        kinds=kinds,
        settings=settings,
        environment=_FREEZES if compiled else {},
    )


def _pipeline(batch_size: int) -> Contestant:
    variant = Variant(
        name="", program="hf", form="checkpoint", kinds=("texts",), settings={"pipeline": "yes"}
    )
    return Contestant(
        name=f"pipeline, batch {batch_size}",
        variants=(variant,),
        batch_sizes=(batch_size,),
        part="third",
    )


def _openvino(name: str, form: str, precision: str) -> Contestant:
    """Return OpenVINO's contestant; without a precision the runtime chooses one."""
    variants = [
        Variant(
            name=f"{hint} hint",
            program="openvino_ir",
            form=form,
            kinds=kinds,
            settings={"hint": hint, "precision": precision},
        )
        for hint, kinds in _HINTS.items()
    ]
    return Contestant(
        name=f"OpenVINO {name}",
        variants=tuple(variants),
        modules=("openvino", "nncf") if name == "int8" else ("openvino",),
        install="openvino nncf",
    )


def _ours(precision: str) -> Contestant:
    variant = Variant(name="", program="ours", form=f"bundle-{precision}", kinds=KINDS)
    return Contestant(name=f"ours {precision}", variants=(variant,), batch_sizes=(0,))


# The first is the reference of answers and the baseline of ratios.
CONTESTANTS: Final[dict[str, Contestant]] = {
    "transformers-fp32": Contestant(
        name="transformers fp32",
        variants=(
            _hf("sdpa", *KINDS, attention="sdpa", dtype="fp32"),
            _hf("eager attention", *KINDS, attention="eager", dtype="fp32"),
        ),
    ),
    "transformers-fp32-compiled": Contestant(
        name="transformers fp32, compiled",
        variants=(_hf("", "shapes", "texts", attention="sdpa", dtype="fp32", compile="yes"),),
    ),
    "transformers-bf16": Contestant(
        name="transformers bf16",
        variants=(
            _hf("weights", *KINDS, attention="sdpa", dtype="bf16"),
            _hf("autocast", *KINDS, attention="sdpa", dtype="autocast"),
            _hf("weights, compiled", "shapes", "texts", dtype="bf16", compile="yes"),
            _hf("autocast, compiled", "shapes", "texts", dtype="autocast", compile="yes"),
        ),
    ),
    "pipeline-1": _pipeline(1),
    "pipeline-8": _pipeline(8),
    "example-qa": Contestant(
        name="transformers' example, batch 8",
        variants=(_hf("", "questions", dtype="fp32", padding="full"),),
        batch_sizes=(8,),
        part="third",
    ),
    "onnxruntime": Contestant(
        name="ONNX Runtime, plain export",
        variants=(Variant(name="", program="plain_onnx", form="onnx", kinds=("shapes", "texts")),),
        modules=("onnxruntime", "onnxscript"),
        install="onnxruntime onnxscript",
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
        """The shape that `4x128` stands for: 4 sequences of 128 tokens.

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
class Job:
    """The model that a process opens, and its inputs.

    Attributes:
        contestant: its name.
        variant: which way of it.
        model: folder of the model in the form that the variant reads.
        tokenizer: the `tokenizer.json` of all contestants.
        inputs: the file of `inputs.Inputs`.
        max_tokens: of one sequence, special tokens included.
    """

    contestant: str
    variant: Variant
    task: TaskName
    model: Path
    tokenizer: Path
    inputs: Path
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
        return {**threads, **quiet, **self.variant.environment}

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that `to_json` wrote."""
        fields = json.loads(text)
        paths = {name: Path(fields[name]) for name in ("model", "tokenizer", "inputs")}
        return cls(**{**fields, **paths, "variant": Variant.from_mapping(fields["variant"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The message that asks a process for something.

    Attributes:
        case: a shape, "texts", "questions", "peak" or "memory".
        batch_size: of a stream; 0 where the contestant chooses itself.
        part: which of the stream's items; see `inputs.Inputs.part`.
        seconds: for how long calls of a shape are repeated, at least.
    """

    case: str
    batch_size: int = 0
    part: str = "all"
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """The start of a contestant.

    Attributes:
        load_s: from the files to a model that can be called; imports are not counted.
        import_bytes: resident memory before that.
    """

    load_s: float
    import_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """A process' memory: resident; with its proportional share of shared pages; anonymous."""

    rss_bytes: int
    pss_bytes: int
    anonymous_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The measurement of one turn.

    Attributes:
        seconds: of wall clock, of one call or one pass over the stream.
        cpu_seconds: of all its threads together.
        num_items: texts, questions or rows.
        num_tokens: real ones.
        num_computed: tokens computed, padding included.
        outputs: of each item, in order: probabilities, or the text of an answer.
    """

    seconds: float
    cpu_seconds: float
    num_items: int
    num_tokens: int
    num_computed: int
    outputs: list[Any] = field(default_factory=list)

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
