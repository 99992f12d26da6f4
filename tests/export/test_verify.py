"""The checks before a bundle is given out find what they are there to find."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from albert_serve.bundle.weights import read_header
from export.encoder import build_encoder
from export.errors import ExportError
from export.source import read_source
from export.verify import check_parity, check_references, measure_parity, random_batches
from export.write import export_bundle
from tests.export.exporting import ALL_TASKS, TINY, write_checkpoint


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A folder with a checkpoint and its bundle."""
    write_checkpoint(tmp_path / "checkpoint")
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    return tmp_path


def test_parity_is_measured_of_the_encoder_and_each_task(exported: Path) -> None:
    model = write_checkpoint(exported / "again")
    tasks = read_source(exported / "checkpoint").tasks

    parity = measure_parity(exported / "bundle", tasks, model)

    assert parity.keys() == {"encoder", *ALL_TASKS}
    assert all(0 < value < 5e-5 for value in parity.values())  # processors differ


@pytest.mark.parametrize(
    ("weight", "worse"),
    [
        pytest.param("albert.encoder.attentions.0.key.bias", "", id="cancels-in-the-softmax"),
        pytest.param("albert.encoder.attentions.0.value.bias", "encoder", id="attention"),
        pytest.param("albert.encoder.ffns.0.up.weight", "encoder", id="ffn"),
        pytest.param("albert.embeddings.norm.bias", "encoder", id="embeddings"),
        pytest.param("heads.fill-mask.decoder.bias", "fill-mask", id="fill-mask"),
        pytest.param("pooler.dense.bias", "sentence-order", id="pooler"),
        pytest.param("heads.question-answering.output.bias", "question-answering", id="qa"),
    ],
)
def test_one_weight_that_differs_is_found(exported: Path, weight: str, worse: str) -> None:
    model = write_checkpoint(exported / "again")
    with torch.no_grad():
        dict(model.named_parameters())[weight].add_(0.01)
    tasks = read_source(exported / "checkpoint").tasks

    parity = measure_parity(exported / "bundle", tasks, model)

    if worse:
        assert parity[worse] > 1e-4
        with pytest.raises(ExportError, match=worse):
            check_parity(parity, 1e-4)
    else:
        check_parity(parity, 1e-4)


def test_nan_is_no_parity() -> None:
    with pytest.raises(ExportError, match="encoder nan"):
        check_parity({"encoder": float("nan")}, 1e-4)


def test_samples_reach_from_one_token_to_all_positions() -> None:
    samples = list(random_batches(TINY))
    lengths = np.concatenate([sample.lengths for sample in samples])
    assert lengths.min() == 1
    assert lengths.max() == TINY.max_positions
    assert any((sample.lengths < sample.ids.shape[1]).any() for sample in samples)
    assert any((sample.lengths == sample.ids.shape[1]).all() for sample in samples)


def test_a_weight_inside_a_graph_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tasks=())
    stored = read_header(tmp_path / "model.safetensors")
    model = build_encoder(TINY, stored)
    extra = numpy_helper.from_array(np.zeros(2000, np.float32), "smuggled")
    model.graph.initializer.append(extra)
    onnx.save(model, tmp_path / "encoder.onnx")
    with pytest.raises(ExportError, match="holds smuggled itself"):
        check_references([tmp_path / "encoder.onnx"], stored)


def test_a_weight_under_two_names_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tasks=())
    stored = read_header(tmp_path / "model.safetensors")
    model = build_encoder(TINY, stored)
    onnx.save(model, tmp_path / "encoder.onnx")
    assert check_references([tmp_path / "encoder.onnx"], stored) == []
    twin = model.graph.initializer.add()
    twin.CopyFrom(next(each for each in model.graph.initializer if each.external_data))
    twin.name += ".twin"
    onnx.save(model, tmp_path / "encoder.onnx")
    with pytest.raises(ExportError, match="wrong range"):
        check_references([tmp_path / "encoder.onnx"], stored)
