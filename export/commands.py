"""The command of this package, in a table that `albert-serve` finds by an entry point."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# The table has the type of `training.commands.COMMANDS`.
COMMANDS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {"export": ("export.__main__", "export a checkpoint as a bundle for the service")}
)
