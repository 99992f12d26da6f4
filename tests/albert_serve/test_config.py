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

TINY = AlbertConfig(
    vocab_size=50,
    embedding_size=8,
    hidden_size=12,
    num_layers=6,
    num_heads=3,
    ffn_size=20,
    max_positions=16,
)
SIZES = st.integers(1, 9)


@st.composite
def configs(draw: st.DrawFn) -> AlbertConfig:
    num_heads = draw(SIZES)
    num_layers = draw(SIZES)
    return AlbertConfig(
        vocab_size=draw(st.integers(1, 60000)),
        embedding_size=draw(SIZES),
        hidden_size=num_heads * draw(SIZES),
        num_layers=num_layers,
        num_groups=draw(st.integers(1, num_layers)),
        num_inner_layers=draw(SIZES),
        num_heads=num_heads,
        ffn_size=draw(SIZES),
        max_positions=draw(SIZES),
        num_token_types=draw(SIZES),
        activation=draw(st.sampled_from(get_args(Activation))),
        hidden_dropout=draw(st.floats(0, 0.99)),
        attention_dropout=draw(st.floats(0, 0.99)),
        classifier_dropout=draw(st.floats(0, 0.99)),
        initializer_range=draw(st.floats(1e-4, 1)),
        layer_norm_eps=draw(st.floats(1e-12, 1e-3)),
        pad_id=draw(st.integers(0, 9)),
        cls_id=draw(st.integers(0, 9)),
        sep_id=draw(st.integers(0, 9)),
        sharing=draw(st.sampled_from(get_args(Sharing))),
    )


def hf_model(config: AlbertConfig) -> Any:
    """Create the model of transformers without allocating its weights."""
    values = {key: value for key, value in config.to_hf().items() if key != "albert_sharing"}
    with torch.device("meta"):
        return transformers.AlbertModel(transformers.AlbertConfig(**values))


# The millions are from table 1 of the paper. The released xxlarge has 223 million.
@pytest.mark.parametrize(
    ("name", "num_params", "millions"),
    [
        ("base", 11_683_584, 12),
        ("large", 17_683_968, 18),
        ("xlarge", 58_724_864, 60),
        ("xxlarge", 222_595_584, 235),
    ],
)
def test_presets_have_the_sizes_in_the_paper_and_in_transformers(
    name: str, num_params: int, millions: int
) -> None:
    assert hf_model(preset(name)).num_parameters() == num_params
    assert num_params / 1e6 == pytest.approx(millions, rel=0.06)


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


def test_missing_keys_have_the_defaults_of_transformers() -> None:
    config = AlbertConfig.from_hf({"model_type": "albert"})
    assert config == AlbertConfig.from_hf(transformers.AlbertConfig().to_dict())
    assert (config.hidden_size, config.num_heads, config.ffn_size) == (4096, 64, 16384)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 10}, "hidden_size 10 is not a multiple of num_heads 3"),
        ({"num_groups": 7}, "num_groups 7 .* num_layers 6"),
        ({"vocab_size": 0}, "vocab_size is 0. It must be a whole number from 1"),
        ({"num_layers": 4097}, "num_layers 4097 times"),
        ({"hidden_dropout": 1.0}, "hidden_dropout is 1.0"),
        ({"activation": "relu"}, "activation is 'relu'. Choose one of gelu_tanh, gelu"),
    ],
)
def test_an_invalid_value_is_rejected(changes: dict[str, Any], message: str) -> None:
    assert replace(TINY, num_layers=4096, num_groups=4096, hidden_dropout=0, pad_id=0)
    with pytest.raises(ConfigError, match=message):
        replace(TINY, **changes)
