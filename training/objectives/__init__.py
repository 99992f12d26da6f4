"""Losses of the tasks, and the task streams that supply their micro-batches."""
