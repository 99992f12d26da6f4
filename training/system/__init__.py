"""The machine: precision of products, signals, memory."""
