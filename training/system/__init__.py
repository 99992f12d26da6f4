"""The machine: precision of products, memory, signals, and locks on folders."""
