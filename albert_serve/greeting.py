"""What `albert-serve serve` says before it serves."""

from __future__ import annotations

import json
import shlex
from typing import Any, Final

from albert_serve.bundle import Bundle
from albert_serve.tasks import TASKS

# What to try first, for each endpoint.
_REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "fill-mask": {"inputs": "He was born in the United [MASK].", "parameters": {"top_k": 3}},
    "text-classification": {"inputs": "A moving film with a wonderful cast."},
    "question-answering": {
        "inputs": {
            "question": "When was the bridge built?",
            "context": "The bridge over the river was built in 1932.",
        }
    },
    "sentence-order": {
        "inputs": {
            "text": "He was born in Vienna in 1901. He studied physics there.",
            "text_pair": "After that, he moved to Berlin and worked as a teacher until 1970.",
        }
    },
}


def greeting(bundle: Bundle, host: str, port: int) -> str:
    """Where the service will answer, and a request to try for each task that it has."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
    lines = [f"{bundle.folder} on {url} (API: {url}/docs; ready when {url}/readyz answers 200)", ""]
    for task in bundle.manifest.tasks:
        if task in TASKS:
            body = shlex.quote(json.dumps(_REQUESTS[task]))
            lines += [f"curl {url}/{task} -H 'Content-Type: application/json' \\", f"  -d {body}"]
    return "\n".join([*lines, ""])
