"""The machine: precision of matrix products, signals, memory."""
