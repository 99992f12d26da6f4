"""Configurations: sizes in the paper and in transformers, conversion, and invalid values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from albert_serve.config import Activation, AlbertConfig, Sharing, preset
from albert_serve.errors import ConfigError
from tests.training.support import TINY

SIZES = st.integers(1, 9)


@st.composite
def configs(draw: st.DrawFn) -> AlbertConfig:
    num_heads, num_layers = draw(SIZES), draw(SIZES)
    sizes = ("embedding_size", "num_inner_layers", "ffn_size", "max_positions", "num_token_types")
    values: dict[str, Any] = {name: draw(SIZES) for name in sizes}
    for part in ("hidden", "attention", "classifier"):
        values[f"{part}_dropout"] = draw(st.floats(0, 0.99))
    return AlbertConfig(
        vocab_size=draw(st.integers(1, 60000)),
        hidden_size=num_heads * draw(SIZES),
        num_layers=num_layers,
        num_groups=draw(st.integers(1, num_layers)),
        num_heads=num_heads,
        activation=draw(st.sampled_from(get_args(Activation))),
        initializer_range=draw(st.floats(1e-4, 1)),
        layer_norm_eps=draw(st.floats(1e-12, 1e-3)),
        **{name: draw(st.integers(0, 9)) for name in ("pad_id", "cls_id", "sep_id")},
        sharing=draw(st.sampled_from(get_args(Sharing))),
        **values,
    )


def hf_model(config: AlbertConfig) -> Any:
    """Create the model of transformers without allocating its weights."""
    values = {key: value for key, value in config.to_hf().items() if key != "albert_sharing"}
    with torch.device("meta"):
        return transformers.AlbertModel(transformers.AlbertConfig(**values))


def test_presets_have_the_sizes_in_the_paper() -> None:
    """Table 1 of the paper has rounded sizes. The released xxlarge has 223 million, not 235."""
    configs = [preset(name) for name in ("base", "large", "xlarge", "xxlarge")]
    assert [config.num_layers for config in configs] == [12, 24, 24, 12]
    assert [config.num_heads for config in configs] == [12, 16, 16, 64]
    sizes = [hf_model(config).num_parameters() for config in configs]
    assert sizes == [11_683_584, 17_683_968, 58_724_864, 222_595_584]
    assert [size / 1e6 for size in sizes] == pytest.approx([12, 18, 60, 235], rel=0.06)


@pytest.mark.parametrize(
    ("num_layers", "num_groups", "num_inner_layers"), [(6, 4, 1), (7, 3, 2), (12, 5, 1), (3, 3, 2)]
)
def test_the_order_of_layers_equals_transformers(
    num_layers: int, num_groups: int, num_inner_layers: int
) -> None:
    config = replace(
        TINY, num_layers=num_layers, num_groups=num_groups, num_inner_layers=num_inner_layers
    )
    model = hf_model(config)
    order: list[int] = []
    layers = [layer for group in model.encoder.albert_layer_groups for layer in group.albert_layers]
    for index, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, index=index: order.append(index))
    model(torch.zeros(1, 4, dtype=torch.long, device="meta"))
    assert config.layer_plan == tuple((index, index) for index in order)


def test_partial_sharing_shares_only_attention_or_only_ffn_in_each_group() -> None:
    config = replace(TINY, num_layers=4, num_groups=2)
    plans = [replace(config, sharing=sharing).layer_plan for sharing in ("attention", "ffn")]
    assert plans == [((0, 0), (0, 1), (1, 2), (1, 3)), ((0, 0), (1, 0), (2, 1), (3, 1))]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(configs())
def test_a_configuration_of_transformers_stores_all_values(config: AlbertConfig) -> None:
    """The only exception is the number of groups if layers share nothing."""
    hf_config = transformers.AlbertConfig(**config.to_hf())
    expected = replace(config, num_groups=1) if config.sharing == "none" else config
    assert AlbertConfig.from_hf(hf_config.to_dict()) == expected


@pytest.mark.parametrize("name", ["relu", 3])
def test_an_unknown_activation_is_rejected(name: object) -> None:
    with pytest.raises(ConfigError, match=f"^hidden_act is {name!r}. Choose one of "):
        AlbertConfig.from_hf({"model_type": "albert", "hidden_act": name})


def test_missing_keys_have_the_defaults_of_transformers() -> None:
    config = AlbertConfig.from_hf({"model_type": "albert"})
    assert config == AlbertConfig.from_hf(transformers.AlbertConfig().to_dict())
    assert (config.hidden_size, config.num_heads, config.ffn_size) == (4096, 64, 16384)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 10}, "hidden_size 10 is not a multiple of num_heads 3"),
        ({"num_groups": 5}, "num_groups 5 .* num_layers 4"),
        ({"vocab_size": 0}, "vocab_size is 0. It must be a whole number from 1"),
        ({"vocab_size": True}, "vocab_size is True. It must be a whole number from 1"),
        ({"pad_id": -1}, "pad_id is -1. It must be a whole number from 0"),
        ({"num_layers": 241, "num_inner_layers": 17}, "num_layers 241 times num_inner_layers 17"),
        ({"hidden_dropout": 1.0}, "hidden_dropout is 1.0"),
        ({"hidden_dropout": -0.1}, "hidden_dropout is -0.1"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0. It must be a positive number"),
        ({"activation": "relu"}, "activation is 'relu'. Choose one of gelu_tanh, gelu"),
    ],
)
def test_an_invalid_value_is_rejected(changes: dict[str, Any], message: str) -> None:
    assert replace(TINY, num_layers=4096, num_groups=4096, hidden_dropout=0, pad_id=0)
    with pytest.raises(ConfigError, match=message):
        replace(TINY, **changes)
