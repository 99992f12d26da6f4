"""A model's figures have names for people."""

from __future__ import annotations

from albert_serve.api.model_card import figure_name


def test_a_figure_of_single_sentences_says_so() -> None:
    name = figure_name("single_sentence_order_paired_accuracy", ())
    assert name == "sentence-order: accuracy when both orders are compared, single sentences"
