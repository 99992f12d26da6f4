"""A small vocabulary and corpus, shared with the tests of training."""

from tests.training.conftest import shards, tokenizer, vocab_dir

__all__ = ["shards", "tokenizer", "vocab_dir"]
