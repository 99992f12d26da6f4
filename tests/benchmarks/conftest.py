"""A small vocabulary and corpus, and a small model, shared with the tests of the packages."""

from tests.albert_serve.conftest import bundle_dir, checkpoint_dir
from tests.training.conftest import one_thread, shards, tokenizer, vocab_dir

__all__ = ["bundle_dir", "checkpoint_dir", "one_thread", "shards", "tokenizer", "vocab_dir"]
