"""Write the sync client from the async one (`make client`): `sync_*.py` from `async_*.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "albert_serve/client"
_NOTICE: Final = "# Generated from {source} by scripts/unasync.py; `make client` writes it.\n"
# In this order.
_SUBSTITUTIONS: Final = (
    # Only reads and writes of a thread have timeouts.
    (r"\n *asyncio\.timeout\(.*\),(?=\n)", ""),
    (r"asyncio\.sleep", "time.sleep"),
    (r"import asyncio", "import time"),
    (r" for asyncio, on one event loop at a time", "; many threads can share it"),
    # ruff removes it if it is unused.
    (r"(?<=import annotations\n)", "from collections.abc import Iterable\n"),
    (r"\nfrom \S+ import AnyIterable(?=\n)", ""),
    (r"import AnyIterable, ", "import "),
    (r"AnyIterable", "Iterable"),
    (r"AsyncGenerator\[(.+), None\]", r"Generator[\1, None, None]"),
    (r"__a(iter|next|enter|exit)__", r"__\1__"),
    (r"\b(aiter|anext|aclosing|aclose)\b", lambda name: name[1][1:]),
    (r"\baiter_bytes\b", "iter_bytes"),
    (r"\b(async|await) ", ""),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\basync_(?=client|exchange)", "sync_"),
    (r"\basync_", ""),
)


def generated() -> dict[Path, str]:
    """Return the sync modules with their content."""
    modules = {}
    for source in sorted(FOLDER.glob("async_*.py")):
        text = source.read_text(encoding="utf-8")
        for pattern, replacement in _SUBSTITUTIONS:
            text = re.sub(pattern, replacement, text)
        notice = _NOTICE.format(source=source.name)
        modules[source.with_name(source.name.removeprefix("a"))] = notice + _formatted(text)
    return modules


def _formatted(text: str) -> str:
    for command in (["check", "--fix", "--unsafe-fixes", "--quiet"], ["format"]):
        name = ["--stdin-filename", str(FOLDER / "sync.py"), "-"]
        ruff = [sys.executable, "-m", "ruff", *command, *name]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout  # noqa: S603
    return text


if __name__ == "__main__":
    for path, content in generated().items():
        path.write_text(content, encoding="utf-8")
