"""ALBERT in torch: backbone, heads, initialization and checkpoints."""
