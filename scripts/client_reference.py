"""Write docs/client-reference.md from the source of `albert_serve.client` (`make docs`).

The page shows classes as the source has them, without the bodies of their methods.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any, Final, TypeVar, get_args, get_type_hints

from pydantic import BaseModel

from albert_serve import errors
from albert_serve.api import embeddings, schemas, wire
from albert_serve.client import AlbertClient, AnswerStream, requests

PAGE: Final = Path(__file__).parents[1] / "docs/client-reference.md"
_INTRODUCTION: Final = (
    "`make docs` writes this page from the source; [client.md](client.md) is the guide. "
    "`AsyncAlbertClient` has the methods of `AlbertClient`, awaited, and `aclose`; its streams "
    "take rows of either kind, for `async for`."
)
_ON_OPTIONS: Final = (
    "The classes of parameters have the defaults and meanings of a method's options."
)
_ON_ERRORS: Final = (
    "In `albert_serve.errors`; a `RequestError` has the `request_id` under which the service "
    "logged the request, a `QueueFullError` also `retry_after_s`."
)
_PARAMETERS: Final = (
    schemas.FillMaskParameters,
    schemas.TextClassificationParameters,
    schemas.QuestionAnsweringParameters,
    schemas.SentenceOrderParameters,
    schemas.MultipleChoiceParameters,
    embeddings.FeatureExtractionParameters,
)


def reference() -> str:
    """Return the page."""
    options = [kind for name, kind in vars(requests).items() if name.endswith("Options")]
    clients, parameters, types = (
        "\n\n\n".join(map(_outline, kinds))
        for kinds in (
            (AlbertClient, AnswerStream),
            (*options, *_PARAMETERS),
            _models(_methods(AlbertClient)),
        )
    )
    aliases = "\n".join(_aliases(clients + parameters + types))
    sections = [
        "# Reference of the Python client",
        _INTRODUCTION,
        "## Client",
        _block(clients),
        "## Options",
        _ON_OPTIONS,
        _block(parameters),
        "## Types",
        _block(f"{aliases}\n\n\n{types}"),
        "## Errors",
        _ON_ERRORS,
        _block(dedent(str(errors.__doc__).split("\n\n", 2)[2]).rstrip()),
    ]
    return "\n\n".join(sections) + "\n"


def _outline(kind: type) -> str:
    """Return the source of a class, its methods without their bodies."""
    source = dedent(inspect.getsource(kind))
    lines = source.splitlines()
    [tree] = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    parts = [lines[: _end_of_docstring(tree)], [""]]
    for node in tree.body[1:]:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_public = not node.target.id.startswith("_")
            parts += [lines[node.lineno - 1 : node.end_lineno]] if is_public else []
        elif isinstance(node, ast.FunctionDef) and _is_shown(node):
            first = min([node, *node.decorator_list], key=lambda one: one.lineno).lineno
            parts += [] if parts[-1] == [""] else [[""]]
            parts.append(lines[first - 1 : _end_of_docstring(node)])
    return "\n".join(line.rstrip() for part in parts for line in part)


def _is_shown(node: ast.FunctionDef) -> bool:
    is_overload = "overload" in map(ast.unparse, node.decorator_list)
    return not is_overload and (node.name == "__init__" or not node.name.startswith("_"))


def _end_of_docstring(node: ast.ClassDef | ast.FunctionDef) -> int:
    first = node.body[0]
    return first.lineno - 1 if ast.get_docstring(node) is None else first.end_lineno or 0


def _aliases(code: str) -> Iterator[str]:
    """Yield the definitions of the type aliases that are named in code."""
    for module in (requests, schemas, embeddings, wire):
        source = inspect.getsource(module)
        for node in ast.parse(source).body:
            is_alias = isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.dump(node.annotation)
            if is_alias and re.search(rf"\b{ast.unparse(node.target)}\b", code):
                yield ast.get_source_segment(source, node) or ""


def _methods(kind: type) -> list[Any]:
    functions = inspect.getmembers(kind, inspect.isfunction)
    return [function for name, function in functions if not name.startswith("_")]


def _models(methods: Iterable[Any]) -> list[type[BaseModel]]:
    """Return the models that methods take and return, each before those in its fields."""
    found: dict[type[BaseModel], None] = {}

    def add(hint: Any) -> None:
        if isinstance(hint, TypeVar):
            hint = hint.__bound__
        if inspect.isclass(hint) and issubclass(hint, BaseModel) and hint not in found:
            found[hint] = None
            for field in hint.model_fields.values():
                add(field.annotation)
        for part in get_args(hint):
            add(part)

    for method in methods:
        for name, hint in get_type_hints(method).items():
            if name != "options":
                add(hint)
    return list(found)


def _block(code: str) -> str:
    return f"```python\n{code}\n```"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
