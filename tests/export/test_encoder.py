"""The encoder's graph computes what torch does, over weights that it does not hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from albert_serve.bundle.manifest import Precision
from albert_serve.bundle.weights import expected_shapes, read_header
from albert_serve.config import AlbertConfig
from export.bundle import export_bundle
from export.encoder import build_encoder
from export.graph import CUDA_FORM, Compute
from export.verify import external_tensors
from tests.export.exporting import TINY, ragged, run_encoder, write_checkpoint
from training.conversion.shipped import restore_weights
from training.model.albert import ModelInputs

pytestmark = pytest.mark.process

CONFIGS = [
    pytest.param(TINY, id="one-group"),
    pytest.param(replace(TINY, num_groups=2), id="two-groups"),
    pytest.param(replace(TINY, num_groups=3), id="uneven-groups"),
    pytest.param(replace(TINY, num_groups=4), id="group-a-layer"),
    pytest.param(replace(TINY, num_inner_layers=2), id="inner-layers"),
    pytest.param(replace(TINY, num_groups=2, num_inner_layers=2), id="groups-of-inner-layers"),
    pytest.param(replace(TINY, sharing="attention"), id="sharing-attention"),
    pytest.param(replace(TINY, sharing="ffn"), id="sharing-ffn"),
    pytest.param(replace(TINY, sharing="none"), id="sharing-none"),
    pytest.param(replace(TINY, sharing="ffn", num_inner_layers=2), id="sharing-ffn-inner-layers"),
    pytest.param(replace(TINY, num_layers=1), id="one-layer"),
    pytest.param(replace(TINY, embedding_size=24), id="e-equals-h"),
    pytest.param(replace(TINY, num_heads=1), id="one-head"),
    pytest.param(replace(TINY, activation="gelu"), id="exact-gelu"),
    pytest.param(replace(TINY, layer_norm_eps=0.1), id="large-epsilon"),
    pytest.param(replace(TINY, max_positions=8, num_token_types=3), id="few-positions"),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_hidden_states_are_torchs_by_weights_referred_to_once(
    config: AlbertConfig, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "checkpoint", config, tasks=())
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    sample = ragged(config)
    batch = ModelInputs(
        ids=torch.from_numpy(sample.ids),
        types=torch.from_numpy(sample.types),
        lengths=torch.from_numpy(sample.lengths).long(),
    )
    with torch.inference_mode():
        expected = model(batch).numpy()

    got = run_encoder(tmp_path / "bundle", sample)

    assert got.shape == expected.shape
    np.testing.assert_allclose(got[sample.is_real], expected[sample.is_real], atol=1e-5)
    references = external_tensors(tmp_path / "bundle/encoder.onnx")
    assert references.keys() == expected_shapes(config, {}).keys()
    assert len(set(references.values())) == len(references)


def test_what_is_in_the_padding_does_not_matter(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", tasks=())
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    sample = ragged(TINY)
    other = ragged(TINY, seed=2)
    mixed = replace(
        sample,
        ids=np.where(sample.is_real, sample.ids, other.ids),
        types=np.where(sample.is_real, sample.types, other.types),
    )
    assert (mixed.ids != sample.ids).any()

    one, two = (run_encoder(tmp_path / "bundle", each) for each in (sample, mixed))

    np.testing.assert_array_equal(one[sample.is_real], two[sample.is_real])


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize(("compute", "worst"), [("fp32", 2e-6), ("fp16", 0.004)])
def test_the_form_for_cuda_computes_the_same(
    precision: Precision, compute: Compute, worst: float, tmp_path: Path
) -> None:
    """On the CPU, which has the same operators; the weights are those of the bundle."""
    config = replace(TINY, num_groups=2)
    write_checkpoint(tmp_path / "checkpoint", config, tasks=())
    folder = export_bundle(
        tmp_path / "checkpoint", tmp_path / "b", precision=precision
    ).bundle.folder
    stored = read_header(folder / "model.safetensors")
    form = replace(CUDA_FORM, compute=compute)
    onnx.save(build_encoder(config, stored, form), folder / "cuda.onnx")
    restored = tmp_path / "restored"
    restored.mkdir()
    restore_weights(folder / "model.safetensors", restored / "model.safetensors")
    plain = build_encoder(config, read_header(restored / "model.safetensors"))
    onnx.save(plain, restored / "encoder.onnx")
    sample = ragged(config)

    got = run_encoder(folder, sample, graph="cuda.onnx")

    expected = run_encoder(restored, sample)
    np.testing.assert_allclose(got[sample.is_real], expected[sample.is_real], atol=worst)
    assert external_tensors(folder / "cuda.onnx") == external_tensors(folder / "encoder.onnx")
