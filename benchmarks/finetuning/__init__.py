"""Finetuning with this package and with `transformers`, measured side by side."""
