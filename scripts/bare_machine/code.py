"""Which of our modules a program can come to import, and which of others it must have."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.bare_machine.manifest import BareMachineError

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """A program.

    Attributes:
        files: our modules, below the checkout: all that it can import, also within functions.
        needed: modules of others that it imports as it begins, by their first names.
    """

    files: tuple[Path, ...]
    needed: tuple[str, ...]


def find_code(checkout: Path, module: str) -> Code:
    """Follow the imports of one of our modules.

    Raises:
        BareMachineError: the checkout does not have it.
    """
    begun = _follow(checkout, module, with_functions=False)
    reached = _follow(checkout, module, with_functions=True)
    files = {file for name in reached if (file := _file_of(checkout, name)) is not None}
    if not files:
        raise BareMachineError(f"{checkout} has no module {module}; run this from a checkout")
    others = {name.partition(".")[0] for name in begun if _file_of(checkout, name) is None}
    ours = {file.relative_to(checkout).parts[0] for file in files}
    needed = others - ours - sys.stdlib_module_names
    return Code(files=tuple(sorted(files)), needed=tuple(sorted(needed)))


def _follow(checkout: Path, module: str, *, with_functions: bool) -> set[str]:
    """Names of all modules that are imported, in whatever depth."""
    known: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in known:
            continue
        known.add(name)
        todo += [name.rpartition(".")[0]] if "." in name else []
        file = _file_of(checkout, name)
        if file is not None:
            tree = ast.parse(file.read_bytes(), str(file))
            todo += _imports(tree, checkout, with_functions=with_functions)
    return known


def _imports(tree: ast.AST, checkout: Path, *, with_functions: bool) -> Iterator[str]:
    """Names that are imported, but for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            inner = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in inner if _file_of(checkout, name) is not None)
        elif _is_for_type_checkers(node) or (isinstance(node, _FUNCTIONS) and not with_functions):
            continue
        else:
            yield from _imports(node, checkout, with_functions=with_functions)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _file_of(checkout: Path, module: str) -> Path | None:
    """The file of a module of ours; None for others' modules."""
    path = checkout.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None
