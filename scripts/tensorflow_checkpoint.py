"""Write the checkpoint in `tests/data/albert_tensorflow`, with TensorFlow.

Run in an environment of its own: `pip install tensorflow-cpu`, then
`python scripts/tensorflow_checkpoint.py tests/data/albert_tensorflow`.

A tiny ALBERT by the names, shapes and operations of google-research/albert (`modeling.py`,
`run_pretraining.py`), with its optimizer's variables, as in the archives that Google published;
and `outputs.npz`, what TensorFlow computes with it: input ids and types (B, S), log probabilities
of tokens at each fourth position (B, S / 4, V), and of sentence order (B, 2).
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import numpy as np
import tensorflow.compat.v1 as tf

CONFIG = {
    "attention_probs_dropout_prob": 0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0,
    "embedding_size": 8,
    "hidden_size": 12,
    "initializer_range": 0.02,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
    "num_attention_heads": 3,
    "num_hidden_layers": 4,
    "num_hidden_groups": 2,
    "net_structure_type": 0,
    "gap_size": 0,
    "num_memory_blocks": 0,
    "inner_group_num": 1,
    "down_scale_factor": 1,
    "type_vocab_size": 2,
    "vocab_size": 600,
}


def variable(name, *shape):
    """Random values by which each weight matters, norms' among them."""
    seed = zlib.crc32(f"{tf.get_variable_scope().name}/{name}".encode()) % 2**31
    value = tf.random_normal_initializer(1.0 if name == "gamma" else 0.0, 0.3, seed=seed)
    weight = tf.get_variable(name, shape, initializer=value)
    with tf.variable_scope(name, reuse=tf.AUTO_REUSE):
        for slot in ("adam_m", "adam_v"):
            tf.get_variable(slot, shape, initializer=tf.zeros_initializer(), trainable=False)
    return weight


def dense(x, size, name):
    """A linear map of the last axis."""
    with tf.variable_scope(name):
        kernel = variable("kernel", x.shape[-1], size)
        return tf.tensordot(x, kernel, 1) + variable("bias", size)


def layer_norm(x, name):
    """Normalise the last axis."""
    with tf.variable_scope(name):
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        normal = (x - mean) / tf.sqrt(variance + 1e-12)
        return normal * variable("gamma", x.shape[-1]) + variable("beta", x.shape[-1])


def gelu(x):
    """The original's `gelu`, an approximation."""
    return x * 0.5 * (1.0 + tf.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * tf.pow(x, 3))))


def attention(x):
    """Self-attention without padding."""
    heads, size = CONFIG["num_attention_heads"], CONFIG["hidden_size"]
    batch, length = x.shape[0], x.shape[1]
    with tf.variable_scope("self"):
        query, key, value = (
            tf.transpose(tf.reshape(dense(x, size, name), [batch, length, heads, -1]), [0, 2, 1, 3])
            for name in ("query", "key", "value")
        )
        scores = tf.matmul(query, key, transpose_b=True) / np.sqrt(size // heads)
        context = tf.transpose(tf.matmul(tf.nn.softmax(scores), value), [0, 2, 1, 3])
    with tf.variable_scope("output"):
        return dense(tf.reshape(context, [batch, length, size]), size, "dense")


def layer(x):
    """One layer; its two norms are named by their order."""
    with tf.variable_scope("attention_1"):
        attended = attention(x)
    x = layer_norm(attended + x, "LayerNorm")
    with tf.variable_scope("ffn_1/intermediate"):
        inner = gelu(dense(x, CONFIG["intermediate_size"], "dense"))
        with tf.variable_scope("output"):
            out = dense(inner, CONFIG["hidden_size"], "dense")
    return layer_norm(out + x, "LayerNorm_1")


def model(ids, types):
    """Log probabilities of tokens and of the order of two segments."""
    size, num_layers = CONFIG["embedding_size"], CONFIG["num_hidden_layers"]
    with tf.variable_scope("bert"):
        with tf.variable_scope("embeddings"):
            words = variable("word_embeddings", CONFIG["vocab_size"], size)
            type_table = variable("token_type_embeddings", CONFIG["type_vocab_size"], size)
            positions = variable("position_embeddings", CONFIG["max_position_embeddings"], size)
            x = tf.gather(words, ids) + tf.gather(type_table, types) + positions[: ids.shape[1]]
            x = layer_norm(x, "LayerNorm")
        with tf.variable_scope("encoder"):
            x = dense(x, CONFIG["hidden_size"], "embedding_hidden_mapping_in")
            with tf.variable_scope("transformer", reuse=tf.AUTO_REUSE):
                for index in range(num_layers):
                    group = int(index / num_layers * CONFIG["num_hidden_groups"])
                    with tf.variable_scope(f"group_{group}/inner_group_0"):
                        x = layer(x)
        with tf.variable_scope("pooler"):
            pooled = tf.tanh(dense(x[:, 0], CONFIG["hidden_size"], "dense"))
    with tf.variable_scope("cls/predictions"):
        with tf.variable_scope("transform"):
            y = layer_norm(gelu(dense(x, size, "dense")), "LayerNorm")
        tokens = tf.tensordot(y, words, [[2], [1]]) + variable("output_bias", CONFIG["vocab_size"])
    with tf.variable_scope("cls/seq_relationship"):
        weights = variable("output_weights", 2, CONFIG["hidden_size"])
        order = tf.matmul(pooled, weights, transpose_b=True) + variable("output_bias", 2)
    return tf.nn.log_softmax(tokens), tf.nn.log_softmax(order)


def main() -> None:
    """Write the folder."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "albert_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    tf.disable_v2_behavior()
    tf.set_random_seed(0)
    generator = np.random.default_rng(0)
    ids = generator.integers(0, CONFIG["vocab_size"], (3, 9))
    types = (np.arange(9) >= [[4], [6], [9]]).astype(np.int64)
    tokens, order = model(tf.constant(ids), tf.constant(types))
    tf.train.get_or_create_global_step()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        np.savez_compressed(
            folder / "outputs.npz",
            ids=ids,
            types=types,
            tokens=session.run(tokens)[:, ::4],  # each fourth position
            order=session.run(order),
        )
        saver = tf.train.Saver()
        saver.save(session, str(folder / "model.ckpt-best"), write_meta_graph=False)
    (folder / "checkpoint").unlink()


if __name__ == "__main__":
    main()
