"""ONNX Runtime over a bundle."""
