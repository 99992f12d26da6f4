"""ALBERT in production: one stored layer, seven tasks, over HTTP, from Python and in batch."""

import os

__version__ = "1.0.0"

# This disables ONNX Runtime's telemetry before ONNX Runtime is imported. To enable telemetry, set
# the variable to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
