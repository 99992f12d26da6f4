"""Finetuning: the configuration, tasks, plan and model of a run on labelled data."""
