"""A pretrained model, shared with the tests of training."""

from tests.training.conftest import (
    easy_corpus,
    labelled,
    pretrain_options,
    pretrained,
    tokenizer,
    tokenizer_file,
    vocab_dir,
)

__all__ = [
    "easy_corpus",
    "labelled",
    "pretrain_options",
    "pretrained",
    "tokenizer",
    "tokenizer_file",
    "vocab_dir",
]
