"""Finetuning: text classification, hyperparameters, and the model that a run starts from."""
