"""Inference with this package and with others, measured side by side on one machine."""
