"""The checks of a new bundle find wrong weights, graphs and outputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from albert_serve.bundle.manifest import Precision
from albert_serve.bundle.weights import read_header
from albert_serve.config import AlbertConfig, preset
from albert_serve.tokenizer import SPECIAL_TOKENS
from export import layers, write
from export.encoder import build_encoder
from export.errors import ExportError
from export.graph import CPU_FORM, Compute, Form
from export.source import read_source
from export.verify import (
    MAX_CUDA_SHARE,
    check_parity,
    check_references,
    measure_parity,
    random_batches,
)
from export.write import Limits, export_bundle
from tests.export.exporting import ALL_TASKS, TINY, write_checkpoint, write_tokenizer
from training.model.albert import Batch
from training.model.checkpoint import save_checkpoint
from training.model.heads import AlbertForTasks, head_sizes

CLS, SEP, MASK = (SPECIAL_TOKENS.index(token) for token in ("[CLS]", "[SEP]", "[MASK]"))
LARGEST_FP16 = float(np.finfo(np.float16).max)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A folder with a checkpoint and its bundle."""
    write_checkpoint(tmp_path / "checkpoint")
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    return tmp_path


def test_parity_is_measured_of_the_encoder_and_each_task(exported: Path) -> None:
    model = write_checkpoint(exported / "again")
    heads = read_source(exported / "checkpoint").heads

    parity = measure_parity(exported / "bundle", heads, model)

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
    heads = read_source(exported / "checkpoint").heads

    parity = measure_parity(exported / "bundle", heads, model)

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


def test_samples_have_the_special_tokens_of_real_inputs() -> None:
    for sample in random_batches(replace(TINY, vocab_size=30_000)):
        for ids, length in zip(sample.ids, sample.lengths, strict=True):
            assert ids[length - 1] == SEP
            assert length < 2 or ids[0] == CLS
            assert length < 3 or MASK in ids[:length]


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


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize(
    ("compute", "least", "most"), [("fp32", 0, 1e-5), ("fp16", 2e-4, 0.06), ("bf16", 2e-3, 0.3)]
)
def test_parity_of_the_graphs_for_cuda_shows_their_rounding(
    checkpoint: Path,
    tmp_path: Path,
    precision: Precision,
    compute: Compute,
    least: float,
    most: float,
) -> None:
    target = tmp_path / "bundle"
    bundle = export_bundle(checkpoint, target, precision=precision, cuda_precision=compute).bundle
    assert bundle.manifest.cuda_precision == compute
    parity = bundle.manifest.cuda_parity
    assert parity.keys() == {"encoder", *ALL_TASKS}
    assert all(least < value < most for value in parity.values()), parity
    cuda_heads = {name for name in bundle.manifest.files if name.endswith(".cuda.onnx")}
    in_int8 = ("fill-mask", "sentence-order", "text-classification")
    own = {f"{task}.cuda.onnx" for task in in_int8} if precision == "int8" else set()
    assert cuda_heads == {"encoder.cuda.onnx", *own}
    assert not (target / ".emulated.onnx").exists()


def overflowing(folder: Path) -> Path:
    """A checkpoint whose feed-forward part gives up to 1e6, which the norm then divides."""
    model = write_checkpoint(folder)
    with torch.no_grad():
        weights = dict(model.named_parameters())
        weights["albert.encoder.ffns.0.down.weight"].mul_(1e6)
    save_checkpoint(model, folder)
    return folder


def test_values_too_large_for_fp16_are_found(tmp_path: Path) -> None:
    folder = overflowing(tmp_path / "checkpoint")
    limits = Limits(max_difference=1e-3)
    with pytest.raises(ExportError, match=r"in fp16, .*encoder nan.*--cuda-precision bf16"):
        export_bundle(folder, tmp_path / "bundle", limits=limits)
    assert not (tmp_path / "bundle").exists()

    exported = export_bundle(folder, tmp_path / "bundle", cuda_precision="bf16", limits=limits)

    assert exported.bundle.manifest.cuda_precision == "bf16"


def largest_ffn_output(model: AlbertForTasks) -> float:
    """Before its bias, which the graph for CUDA adds in the kernel of the norm."""
    outputs = []

    def measure(ffn: Any, inputs: tuple[torch.Tensor]) -> None:
        outputs.append(float((ffn.activation(ffn.up(*inputs)) @ ffn.down.weight.T).abs().max()))

    handles = [ffn.register_forward_pre_hook(measure) for ffn in model.albert.encoder.ffns]
    with torch.inference_mode():
        for sample in random_batches(model.config):
            arrays = (sample.ids, sample.types, sample.lengths)
            ids, types, lengths = (torch.from_numpy(array) for array in arrays)
            model(Batch(ids=ids, types=types, lengths=lengths))
    for handle in handles:
        handle.remove()
    return max(outputs)


@pytest.mark.parametrize("times", [0.5, 2])
def test_the_bound_of_fp16_is_its_largest_value(tmp_path: Path, times: float) -> None:
    """A feed-forward output of half of it is exported, and one of twice as much is refused."""
    folder = tmp_path / "checkpoint"
    model = write_checkpoint(folder)
    for aim in (1e3, times * LARGEST_FP16):  # the norm hides how large it was from the next layer
        factor = aim / largest_ffn_output(model)
        with torch.no_grad():
            cast("Any", model.albert.encoder.ffns[0]).down.weight.mul_(factor)
    assert largest_ffn_output(model) == pytest.approx(times * LARGEST_FP16, rel=0.1)
    save_checkpoint(model, folder)
    limits = Limits(max_difference=1e-3, max_cuda_difference=0.3)
    if times < 1:
        parity = export_bundle(folder, tmp_path / "bundle", limits=limits).bundle.manifest
        assert np.isfinite(list(parity.cuda_parity.values())).all()
    else:
        with pytest.raises(ExportError, match=r"in fp16, .*encoder nan"):
            export_bundle(folder, tmp_path / "bundle", limits=limits)


def test_a_value_that_only_a_special_token_has_is_found(tmp_path: Path) -> None:
    """Among 30,000 tokens random ones would miss it; every real input has it."""
    folder = tmp_path / "checkpoint"
    model = write_checkpoint(folder, replace(TINY, vocab_size=30_000), tasks=("sentence-order",))
    with torch.no_grad():
        model.albert.embeddings.word.weight[SEP].mul_(1e6)
    save_checkpoint(model, folder)
    with pytest.raises(ExportError, match=r"in fp16, .*encoder nan.*bf16 or fp32 has the range"):
        export_bundle(folder, tmp_path / "bundle")
    for compute in ("bf16", "fp32"):
        export_bundle(folder, tmp_path / compute, cuda_precision=compute)


@pytest.mark.slow
def test_a_model_of_the_shape_of_xxlarge_is_exported_in_fp16(tmp_path: Path) -> None:
    """H 4096 and 64 heads, new weights; fewer layers, positions and tokens only save time."""
    folder = tmp_path / "checkpoint"
    config = replace(preset("xxlarge"), num_layers=3, max_positions=16, vocab_size=1000)
    model = AlbertForTasks(config, head_sizes(config, ("fill-mask", "sentence-order")))
    save_checkpoint(model, folder)
    del model
    write_tokenizer(folder)
    manifest = export_bundle(folder, tmp_path / "bundle").bundle.manifest
    assert manifest.cuda_parity.keys() == {"encoder", "fill-mask", "sentence-order"}
    assert all(0 < share < MAX_CUDA_SHARE["fp16"] for share in manifest.cuda_parity.values())


def test_a_difference_on_cuda_over_the_limit_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    limits = Limits(max_cuda_difference=1e-5)
    with pytest.raises(ExportError, match=r"in fp16, .*--max-cuda-difference raises"):
        export_bundle(checkpoint, tmp_path / "bundle", limits=limits)


def test_a_wrong_graph_for_cuda_is_found(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(*arguments: Any) -> str:
        nodes, config, x, residual, name, biased_as = arguments
        wrong = biased_as.replace("ffn_output", "attention.dense")
        return str(add_norm(nodes, config, x, residual, name, wrong))

    add_norm = layers._add_norm
    export_bundle(checkpoint, checkpoint.parent / "right", cuda_precision="fp32")

    def build(
        config: AlbertConfig, stored: Any, form: Form = CPU_FORM, **options: Any
    ) -> onnx.ModelProto:
        if form.kernels == "cuda":
            monkeypatch.setattr(layers, "_add_norm", swapped)
        return build_encoder(config, stored, form, **options)

    monkeypatch.setattr(write, "build_encoder", build)
    with pytest.raises(ExportError, match="in fp32, the graphs for CUDA differ"):
        export_bundle(checkpoint, checkpoint.parent / "wrong", cuda_precision="fp32")
