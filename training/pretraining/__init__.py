"""Pretraining from text: configuration, recipes, streams and the run."""
