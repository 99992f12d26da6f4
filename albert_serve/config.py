"""The sizes of an ALBERT, values derived from them, and the paper's presets.

The table `_HF_KEYS` maps the package's names to the keys of Hugging Face's `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, get_args

from albert_serve.errors import ConfigError

Sharing = Literal["all", "attention", "ffn", "none"]
Activation = Literal["gelu_tanh", "gelu"]
# The storage type of matrices.
Precision = Literal["fp32", "fp16", "int8"]

# This maps our names to the keys of Hugging Face's config.json.
_HF_KEYS: Final[dict[str, str]] = {
    "vocab_size": "vocab_size",
    "embedding_size": "embedding_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_groups": "num_hidden_groups",
    "num_inner_layers": "inner_group_num",
    "num_heads": "num_attention_heads",
    "ffn_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "num_token_types": "type_vocab_size",
    "activation": "hidden_act",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "classifier_dropout": "classifier_dropout_prob",
    "initializer_range": "initializer_range",
    "layer_norm_eps": "layer_norm_eps",
    "pad_id": "pad_token_id",
    "cls_id": "bos_token_id",
    "sep_id": "eos_token_id",
    "sharing": "albert_sharing",  # Hugging Face has no such key
}
# These defaults of Hugging Face's keys differ from ours.
_HF_DEFAULTS: Final[dict[str, Any]] = {
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "intermediate_size": 16384,
}
# A limit is needed, because each layer has an entry in `AlbertConfig.layer_plan`.
_MAX_LAYERS: Final = 4096
_HF_ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AlbertConfig:
    """The sizes of an ALBERT, by default of the paper's base model (Table 1, v2 dropout).

    Attributes:
        embedding_size: E, independent of H (section 3.1, factorised embedding).
        num_layers: L, the number of times that groups of layers are applied.
        num_groups: G, the number of groups with distinct weights.
        num_inner_layers: number of distinct layers in a group.
        sharing: part of a layer whose weights all applications of a group share (section 3.1).
    """

    vocab_size: int = 30000
    embedding_size: int = 128
    hidden_size: int = 768
    num_layers: int = 12
    num_groups: int = 1
    num_inner_layers: int = 1
    num_heads: int = 12
    ffn_size: int = 3072
    max_positions: int = 512
    num_token_types: int = 2
    activation: Activation = "gelu_tanh"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    classifier_dropout: float = 0.1
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_id: int = 0
    cls_id: int = 2
    sep_id: int = 3
    sharing: Sharing = "all"

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_field(field.name, getattr(self, field.name))
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}. "
                "Choose a number of heads that divides it."
            )
        if self.num_layers * self.num_inner_layers > _MAX_LAYERS:
            raise ConfigError(
                f"num_layers {self.num_layers} times num_inner_layers {self.num_inner_layers} is "
                f"more than {_MAX_LAYERS}. Choose fewer layers."
            )
        if self.num_groups > self.num_layers:
            raise ConfigError(
                f"num_groups {self.num_groups} is more than num_layers {self.num_layers}. Choose "
                "at most one group per layer."
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def layer_plan(self) -> tuple[tuple[int, int], ...]:
        """The indices of each layer's attention and FFN, in order of application.

        Layer i uses group int(i / L * G), as in the original code and `transformers`. Equal indices
        mean that the weights are shared.
        """
        plan: list[tuple[int, int]] = []
        for layer in range(self.num_layers):
            group = int(layer / (self.num_layers / self.num_groups))
            for inner in range(self.num_inner_layers):
                shared_index = group * self.num_inner_layers + inner
                own_index = layer * self.num_inner_layers + inner
                plan.append(
                    (
                        shared_index if self.sharing in ("all", "attention") else own_index,
                        shared_index if self.sharing in ("all", "ffn") else own_index,
                    )
                )
        return tuple(plan)

    @property
    def num_attentions(self) -> int:
        """Number of attention blocks with distinct weights."""
        return len({attention for attention, _ in self.layer_plan})

    @property
    def num_ffns(self) -> int:
        """Number of feed-forward blocks with distinct weights."""
        return len({ffn for _, ffn in self.layer_plan})

    def to_hf(self) -> dict[str, Any]:
        """Return the config as the keys of Hugging Face's `config.json`."""
        hf = {key: getattr(self, name) for name, key in _HF_KEYS.items()}
        hf["hidden_act"] = "gelu_new" if self.activation == "gelu_tanh" else "gelu"
        return {"model_type": "albert", **hf}

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> AlbertConfig:
        """Read the keys of a Hugging Face `config.json`, ignoring unsupported keys."""
        if hf.get("model_type", "albert") != "albert":
            raise ConfigError(f"model_type is {hf['model_type']!r}; only 'albert' is supported.")
        values = _HF_DEFAULTS | {key: value for key, value in hf.items() if value is not None}
        values_by_name = {name: values[key] for name, key in _HF_KEYS.items() if key in values}
        if "activation" in values_by_name:
            values_by_name["activation"] = _read_activation(values_by_name["activation"])
        if values_by_name.get("sharing") == "none":
            values_by_name["num_groups"] = 1  # the file has a group per layer for `transformers`
        return cls(**values_by_name)


def preset(name: str, **changes: Any) -> AlbertConfig:
    """Return one of the paper's models (Table 1), or `small`, with `changes` applied."""
    if name not in PRESETS:
        raise ConfigError(f"There is no preset {name!r}. Choose one of {', '.join(PRESETS)}.")
    return replace(PRESETS[name], **changes)


def _check_field(name: str, value: object) -> None:
    if name == "sharing" or name == "activation":
        allowed = get_args(Sharing if name == "sharing" else Activation)
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}. Choose one of {', '.join(allowed)}.")
    elif name.endswith("_dropout"):
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise ConfigError(f"{name} is {value!r}. It must be at least 0 and less than 1.")
    elif name in ("initializer_range", "layer_norm_eps"):
        if not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{name} is {value!r}. It must be a positive number.")
    else:
        minimum = 0 if name.endswith("_id") else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ConfigError(f"{name} is {value!r}. It must be a whole number from {minimum}.")


def _read_activation(name: object) -> Activation:
    if not isinstance(name, str) or name not in _HF_ACTIVATIONS:
        allowed = ", ".join(_HF_ACTIVATIONS)
        raise ConfigError(f"hidden_act is {name!r}. Choose one of {allowed}.")
    return _HF_ACTIVATIONS[name]


PRESETS: Final[dict[str, AlbertConfig]] = {
    "base": AlbertConfig(),
    "large": AlbertConfig(hidden_size=1024, num_layers=24, num_heads=16, ffn_size=4096),
    # The released checkpoint has 16 heads of size 128, not H/64 heads.
    "xlarge": AlbertConfig(hidden_size=2048, num_layers=24, num_heads=16, ffn_size=8192),
    "xxlarge": AlbertConfig(hidden_size=4096, num_layers=12, num_heads=64, ffn_size=16384),
    # This model is not in the paper. A CPU pretrains it within hours.
    "small": AlbertConfig(
        hidden_size=256, num_layers=6, num_heads=4, ffn_size=1024, max_positions=128
    ),
}
