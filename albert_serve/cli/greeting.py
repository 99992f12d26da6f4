"""The startup message of `albert-serve serve`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from albert_serve.api.examples import EXAMPLES
from albert_serve.api.schemas import MODEL_PATH
from albert_serve.bundle.manifest import Bundle
from albert_serve.tasks.load import task_names


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
            body = shlex.quote(json.dumps(EXAMPLES[task][0].body))
            lines += [f"curl {url}{prefix}/{task} {headers} \\", f"  -d {body}"]
    return "\n".join([*lines, ""])
