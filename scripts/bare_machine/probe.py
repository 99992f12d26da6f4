"""Prints what this Python can import and compute on, as a line of JSON."""

from __future__ import annotations

import json
import platform
import sys
from importlib import import_module
from typing import Any, Final

# What an installation that does not work raises.
_BROKEN: Final = (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError)


def main(names: list[str]) -> None:
    """Import the modules, and say how that went."""
    versions: dict[str, str] = {"python": platform.python_version()}
    failures: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = str(getattr(import_module(name), "__version__", "unknown"))
        except _BROKEN as error:
            failures[name] = f"{type(error).__name__}: {error}"
    device = _device(sys.modules["torch"]) if "torch" in versions else None
    print(json.dumps({"versions": versions, "failures": failures, "device": device}))


def _device(torch: Any) -> str | None:
    """The GPU in words; None where there is none to be used."""
    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(0)
    number = torch.cuda.device_count()
    return f"{number} x {facts.name}, {facts.total_memory / (1 << 30):.0f} GiB"


if __name__ == "__main__":
    main(sys.argv[1:])
