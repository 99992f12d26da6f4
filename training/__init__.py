"""Training of ALBERT: vocabulary, pretraining, finetuning, evaluation. Run from a checkout."""

from training.requirements import check_packages

check_packages("torch", "safetensors", "sentencepiece", "zstandard")
