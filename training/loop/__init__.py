"""The training loop: steps, checkpoints, metrics, several processes."""
