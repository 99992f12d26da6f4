"""The graph of a start-conditioned head, and that its comparison with torch finds what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch

from albert_serve.bundle.manifest import Precision
from albert_serve.bundle.weights import NUM_BEAMS, QUESTION_OUTPUTS, read_header
from export.bundle import export_bundle
from export.heads import build_head
from export.precision import PARTS, part_of, write_weights
from export.source import Source, read_source
from export.verify import measure_parity
from tests.export.exporting import TINY, randomize, run_graph, write_tokenizer
from tests.export.test_graphs import assert_golden
from training.model.checkpoint import load_checkpoint, save_checkpoint
from training.model.heads import AlbertForTasks, head_sizes

TASK: Final = "question-answering"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("beams") / "checkpoint"
    tasks = head_sizes(TINY, (TASK, "fill-mask"), question_head="start-conditioned")
    model = AlbertForTasks(TINY, tasks)
    randomize(model)
    save_checkpoint(model.eval(), folder)
    write_tokenizer(folder)
    return read_source(folder)


@pytest.fixture(scope="module")
def bundle(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("bundles") / "fp32"
    return export_bundle(source.folder, target).bundle.folder


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_graph(precision: Precision, source: Source, tmp_path: Path) -> None:
    write_weights(source, tmp_path / "model.safetensors", precision, (), {})
    stored = read_header(tmp_path / "model.safetensors")
    model = build_head(TINY, TASK, QUESTION_OUTPUTS["start-conditioned"], stored)
    assert_golden(model, f"{TASK}.start-conditioned.{precision}")


@pytest.mark.parametrize(
    "weight",
    [
        *("start.weight", "start.bias", "end_dense.weight", "end_dense.bias", "end_norm.weight"),
        *("end_output.weight", "end_output.bias", "answer_dense.bias", "answer_output.weight"),
    ],
)
def test_one_weight_that_differs_is_found(weight: str, bundle: Path, source: Source) -> None:
    model = load_checkpoint(source.folder)
    assert max(measure_parity(bundle, source.heads, model).values()) < 5e-5
    with torch.no_grad():
        model.heads[TASK].get_parameter(weight).add_(0.01)
    parity = measure_parity(bundle, source.heads, model)
    assert parity[TASK] > 1e-4
    assert parity["fill-mask"] < 5e-5


def test_its_matrices_are_of_the_heads_that_can_stay_fp32(source: Source) -> None:
    large = {name for name in source.names if part_of(name) == "heads"}
    assert {name for name in large if "predictions" not in name} == {
        "end_logits.dense_0.weight",
        "answer_class.dense_0.weight",
    }
    assert part_of("start_logits.dense.weight") is None
    assert "dense_0" in PARTS["heads"]


def test_rows_of_other_sequences_do_not_matter(bundle: Path) -> None:
    """Nor do positions that are not asked for: only their sums of rows, which weigh nothing."""
    generator = np.random.default_rng(0)
    hidden_BSH = generator.normal(size=(3, 9, TINY.hidden_size)).astype(np.float32)
    within = np.array([0, 4, 5, 6, 7])
    rows = np.concatenate([9 * sequence + within for sequence in (0, 2)])
    together = run_graph(bundle / f"{TASK}.onnx", {"hidden_states": hidden_BSH, "rows": rows})
    changed = hidden_BSH.copy()
    changed[1] = 7
    changed[:, [1, 2, 3, 8]] = -5
    again = run_graph(bundle / f"{TASK}.onnx", {"hidden_states": changed, "rows": rows})
    assert together.shape == (10, 2 + NUM_BEAMS)
    np.testing.assert_allclose(again, together, atol=1e-6)
    for number, sequence in enumerate((0, 2)):
        alone = run_graph(
            bundle / f"{TASK}.onnx",
            {"hidden_states": hidden_BSH[sequence : sequence + 1], "rows": within},
        )
        np.testing.assert_allclose(together[5 * number : 5 * number + 5], alone, atol=1e-5)
