"""The startup message of `albert-serve serve`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any, Final

from albert_serve.api.schemas import MODEL_PATH
from albert_serve.bundle.manifest import Bundle
from albert_serve.tasks.load import task_names

# An example request for each endpoint.
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
    "multiple-choice": {
        "inputs": {
            "context": "The bridge over the river was built in 1932.",
            "question": "When was the bridge built?",
            "choices": ["in 1832", "in 1932"],
        }
    },
    "feature-extraction": {"inputs": "He moved to Berlin.", "parameters": {"normalize": True}},
}


def greeting(
    bundles: Mapping[str, Bundle], default: str, host: str, port: int, *, needs_key: bool = False
) -> str:
    """Return the service's address, and an example request for each task of each model.

    Args:
        bundles: by model name.
        default: the name of the default model.
        needs_key: whether requests need a key, which is read from ALBERT_API_KEY.
    """
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
    hint = f"(API: {url}/docs; ready when {url}/readyz answers 200)"
    lines = [f"{', '.join(str(bundle.folder) for bundle in bundles.values())} on {url} {hint}", ""]
    headers = "-H 'Content-Type: application/json'"
    if needs_key:
        headers += ' -H "Authorization: Bearer $ALBERT_API_KEY"'
    for name, bundle in bundles.items():
        prefix = "" if name == default else MODEL_PATH.format(model=name)
        for task in task_names(bundle.manifest):
            body = shlex.quote(json.dumps(_REQUESTS[task]))
            lines += [f"curl {url}{prefix}/{task} {headers} \\", f"  -d {body}"]
    return "\n".join([*lines, ""])
