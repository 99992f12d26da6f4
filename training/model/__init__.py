"""ALBERT in torch, its heads, and its checkpoints."""
