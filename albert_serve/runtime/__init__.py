"""Inference on a bundle's model with ONNX Runtime."""
