"""ALBERT in production: one stored layer, seven tasks, over HTTP, from Python and in batch."""

import os

__version__ = "0.1.0.dev0"

# Disables ONNX Runtime's telemetry, which it reads at import; to enable it,
# set the variable to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
