"""Training of ALBERT: vocabulary, pretraining, finetuning, evaluation. Run from a checkout."""
