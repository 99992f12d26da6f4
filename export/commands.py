"""The command of this package for `albert-serve`, which finds this table by an entry point."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# The same form as `training.commands`.
COMMANDS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {"export": ("export.__main__", "export a checkpoint as a bundle for the service")}
)
