"""The graphs of the heads: rows of hidden states (R, H) to rows of logits (R, K)."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto, TensorProto, helper

from albert_serve.config import AlbertConfig
from albert_serve.weights import OUTPUT_LAYERS, UNPOOLED_TASKS, StoredTensor, TaskName
from export.graph import Initializers, Nodes, make_model
from export.layers import activate, matmul, norm


def build_head(
    config: AlbertConfig, task: TaskName, num_outputs: int, stored: Mapping[str, StoredTensor]
) -> ModelProto:
    """The graph rows (R, H) -> logits (R, num_outputs) of one task, its pooler included."""
    nodes = Nodes(Initializers(stored))
    if task == "fill-mask":
        logits_RK = _fill_mask(nodes, config)
    else:
        rows_RH = "rows" if task in UNPOOLED_TASKS else _pool(nodes)
        output = OUTPUT_LAYERS[task]
        logits_RK = _gemm(nodes, rows_RH, f"{output}.weight", f"{output}.bias")
    nodes.return_as(logits_RK, "logits")
    rows = helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["rows", config.hidden_size])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", num_outputs])
    return make_model(task.replace("-", "_"), nodes, [rows], [logits])


def _pool(nodes: Nodes) -> str:
    dense_RH = _gemm(nodes, "rows", "albert.pooler.weight", "albert.pooler.bias")
    return nodes.add("Tanh", [dense_RH])


def _fill_mask(nodes: Nodes, config: AlbertConfig) -> str:
    """H to E, then to V through the word embeddings that the encoder reads too."""
    dense = "predictions.dense"
    dense_RE = activate(nodes, config, matmul(nodes, "rows", dense), dense)
    normed_RE = norm(nodes, config, dense_RE, "predictions.LayerNorm")
    word = "albert.embeddings.word_embeddings.weight"
    return _gemm(nodes, normed_RE, word, "predictions.bias")


def _gemm(nodes: Nodes, x: str, weight: str, bias: str) -> str:
    """Rows x (R, in) times weight [out, in] transposed, plus bias."""
    inputs = [x, nodes.weight(weight), nodes.weight(bias)]
    return nodes.add("Gemm", inputs, attributes={"transB": 1})
