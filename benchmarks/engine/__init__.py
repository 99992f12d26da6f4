"""Inference with this package, against others and the hardware's peak."""
