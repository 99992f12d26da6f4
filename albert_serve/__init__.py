"""ALBERT in production: one stored layer, four tasks, over HTTP, from Python and in batch."""

import os

__version__ = "0.1.0"

# ONNX Runtime reports to its makers unless told not to before it is imported; who wants that can
# set it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
