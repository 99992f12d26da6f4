"""Who takes part, in which ways, and at what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Kind = Literal["shapes", "texts", "questions"]
KINDS: Final[tuple[Kind, ...]] = ("shapes", "texts", "questions")
_SIZES: Final = (1, 2, 4, 8, 16)
# Packs the weights for the processor's own products when it compiles.
_FREEZES: Final = {"TORCHINDUCTOR_FREEZING": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way of a contestant to run; the best one counts.

    Attributes:
        program: the module of `benchmarks.engines` whose process runs it.
        form: what the model is kept as; see `models.FORMS`.
        kinds: what it takes part in.
        settings: what its program needs to know.
        environment: variables that its process has besides.
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
    def from_mapping(cls, given: Mapping[str, Any]) -> Variant:
        """A variant from its fields, lists instead of tuples."""
        return cls(**{**given, "kinds": tuple(given["kinds"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """A contestant.

    Attributes:
        batch_sizes: of a stream, rising, among which it looks for its best; 0: it forms its batches
            itself.
        part: of the stream's items that it does in a turn.
        modules: what has to be installed.
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
    variant = Variant(name="", program="hf_pipeline", form="checkpoint", kinds=("texts",))
    return Contestant(
        name=f"pipeline, batch {batch_size}",
        variants=(variant,),
        batch_sizes=(batch_size,),
        part="third",
    )


def _openvino(name: str, form: str, precision: str) -> Contestant:
    """Without a precision the runtime takes what it likes best for what is not int8."""
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


_HINTS: Final[dict[str, tuple[Kind, ...]]] = {
    "latency": ("shapes", "texts"),
    "throughput": ("texts",),
}
# The first is what all others' answers are compared with, and the baseline of ratios.
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
BASELINE: Final = "transformers-fp32"
