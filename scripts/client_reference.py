"""Write docs/client-reference.md from the docstrings of `albert_serve.client` (`make docs`)."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from types import UnionType
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

import griffe
from pydantic import BaseModel

from albert_serve import errors
from albert_serve.api import embeddings, schemas
from albert_serve.client import (
    AlbertClient,
    AnswerStream,
    AsyncAlbertClient,
    AsyncAnswerStream,
    requests,
)
from albert_serve.settings import Device

PAGE: Final = Path(__file__).parents[1] / "docs/client-reference.md"
_INTRODUCTION: Final = (
    "`from albert_serve.client import AlbertClient, AsyncAlbertClient`. [client.md](client.md) is "
    "the guide. `make docs` writes this page from the docstrings."
)
_ON_ERRORS: Final = (
    "All are in `albert_serve.errors`. A `RequestError` has the `request_id` under which the "
    "service logged the request, a `QueueFullError` also `retry_after_s`."
)
# What the options of a method mean.
_PARAMETERS: Final[Mapping[str, type[BaseModel]]] = {
    "FillMaskOptions": schemas.FillMaskParameters,
    "ScoreTargetsOptions": schemas.FillMaskParameters,
    "TextClassificationOptions": schemas.TextClassificationParameters,
    "QuestionAnsweringOptions": schemas.QuestionAnsweringParameters,
    "SentenceOrderOptions": schemas.SentenceOrderParameters,
    "MultipleChoiceOptions": schemas.MultipleChoiceParameters,
    "TokenFeaturesOptions": embeddings.FeatureExtractionParameters,
    "FeatureExtractionOptions": embeddings.FeatureExtractionParameters,
}
# Defaults that are the client's own.
_DEFAULTS: Final = {("ScoreTargetsOptions", "top_k"): "all"}
_OPTIONS: Final = re.compile(r"Unpack\[(\w+)\]")
# Where the names in annotations are from.
_NAMES: Final = {"Device": Device, **vars(schemas), **vars(requests)}
_MODULES: Final = re.compile(r"\b(?:[a-z_]+\.)+(?=\w)")
_LINE: Final = 88


def reference() -> str:
    """Return the page."""
    methods = _methods(AlbertClient)
    twins = {
        name: method
        for name, method in _methods(AsyncAlbertClient).items()
        if name not in methods or method.__doc__ != methods[name].__doc__
    }
    types = [part for kind in _models(methods.values()) for part in _model(kind)]
    described = [
        *_class(AlbertClient, methods),
        *_class(AsyncAlbertClient, twins),
        *(part for kind in (AnswerStream, AsyncAnswerStream) for part in _stream(kind)),
    ]
    parts = [
        "# Reference of the Python client",
        _INTRODUCTION,
        *described,
        "## Types",
        _aliases("\n".join(described + types)),
        *types,
        "## Errors",
        _ON_ERRORS,
        _table(("error", "HTTP status", "meaning"), _errors()),
    ]
    return "\n\n".join(parts) + "\n"


def _methods(kind: type) -> dict[str, Callable[..., Any]]:
    """Return the public methods of a class, then those that it inherits."""
    return {
        name: getattr(kind, name)
        for base in kind.__mro__
        if base.__module__.startswith("albert_serve.")
        for name in vars(base)
        if not name.startswith("_")
    }


def _class(kind: type, methods: Mapping[str, Callable[..., Any]]) -> Iterator[str]:
    yield f"## {kind.__name__}"
    signature = inspect.signature(kind)
    yield _signature(kind.__name__, signature.replace(return_annotation=signature.empty))
    yield from _docstring(kind)
    for name, method in methods.items():
        yield f"### {kind.__name__}.{name}"
        signature = inspect.signature(method)
        yield _signature(name, signature)
        yield from _docstring(method)
        # A stream has the options of its method.
        if not name.endswith("_stream") and (options := _OPTIONS.search(str(signature))):
            yield _table(("option", "type", "default", "meaning"), _options(options[1]))


def _stream(kind: type) -> Iterator[str]:
    yield f"## {kind.__name__}"
    yield from _docstring(kind)
    for name, method in _methods(kind).items():
        yield f"### {kind.__name__}.{name}"
        yield from _docstring(method)


def _signature(name: str, signature: inspect.Signature) -> str:
    """Return a block of code; a long signature has a line for each parameter."""
    parameters = [
        one.replace(annotation=inspect.Parameter.empty) if one.name == "options" else one
        for one in signature.parameters.values()
        if one.name != "self"
    ]
    shown = _unquoted(f"{name}{signature.replace(parameters=parameters)}")
    if len(shown) > _LINE:
        is_named = [one.kind is inspect.Parameter.KEYWORD_ONLY for one in parameters]
        lines = [_unquoted(str(one)) for one in parameters]
        if True in is_named:
            lines.insert(is_named.index(True), "*")
        is_class = signature.return_annotation is signature.empty
        returned = "" if is_class else _unquoted(f" -> {signature.return_annotation}")
        shown = "".join([f"{name}(\n", *(f"    {line},\n" for line in lines), f"){returned}"])
    return f"```python\n{shown}\n```"


def _unquoted(text: str) -> str:
    """Return annotations as the source has them; a type variable as what it is bound to."""
    text = re.sub(r"(: |-> )'((?:[^'\\]|\\.)*)'", r"\1\2", text)
    names = [name for name, value in vars(requests).items() if isinstance(value, TypeVar)]
    for name in names:
        text = re.sub(rf"\b{name}\b", f"{name[:-1]}Like", text)
    return text


def _docstring(documented: object) -> Iterator[str]:
    """Yield the sections of a docstring in Google's style."""
    docstring = griffe.Docstring(inspect.getdoc(documented) or "")
    for section in docstring.parse("google", warnings=False):
        if section.kind is griffe.DocstringSectionKind.text:
            yield from map(_paragraph, section.value.split("\n\n"))
        elif section.kind is griffe.DocstringSectionKind.admonition:  # a title of our own
            yield f"{section.title}:"
            entries = re.split(r"\n(?! )", section.value.contents)
            yield "\n".join(_entry(*entry.split(": ", 1)) for entry in entries)
        else:
            yield f"{section.kind.value.capitalize()}:"
            yield "\n".join(
                _entry(getattr(one, "name", None) or one.annotation, one.description)
                for one in section.value
            )


def _paragraph(text: str) -> str:
    """Return a paragraph in one line, or an indented one as a block of code."""
    if text.startswith("    "):
        return "```python\n" + dedent(text) + "\n```"
    return _line(text)


def _entry(name: str, description: str) -> str:
    return f"- `{name}`: {_line(description)}"


def _line(text: str) -> str:
    return " ".join(text.split())


def _options(name: str) -> Iterator[tuple[str, ...]]:
    fields = _PARAMETERS[name].model_fields
    for option, kind in getattr(requests, name).__annotations__.items():
        field = fields[option]
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        default = extra.get("default", field.default)
        shown = "" if default is None else f"`{default!r}`"
        shown = _DEFAULTS.get((name, option), shown)
        yield f"`{option}`", f"`{kind.__forward_arg__}`", shown, field.description or ""


def _aliases(page: str) -> str:
    """Return the definitions of the names in a page's code that are no classes."""
    code = " ".join(re.findall(r"```python.*?```|`[^`\n]+`", page, re.DOTALL))
    lines = []
    for name in dict.fromkeys(re.findall(r"\b[A-Z]\w+", code)):
        value = _NAMES.get(name)
        if get_args(value):
            kinds = get_args(value) if get_origin(value) in (Union, UnionType) else [value]
            shown = " | ".join(_shown(kind) for kind in kinds)
            lines.append(f"{name} = {shown}")
    return "```python\n" + "\n".join(sorted(lines)) + "\n```"


def _shown(kind: Any) -> str:
    """Return a type as in an annotation."""
    is_class = isinstance(kind, type) and not get_args(kind)
    return kind.__name__ if is_class else _MODULES.sub("", str(kind)).replace("'", '"')


def _models(methods: Iterable[Callable[..., Any]]) -> list[type[BaseModel]]:
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
        if inspect.ismethod(method):
            continue  # of the class: it makes a client
        for name, hint in get_type_hints(method).items():
            if name != "options":
                add(hint)
    return list(found)


def _model(kind: type[BaseModel]) -> Iterator[str]:
    yield f"### {kind.__name__}"
    yield from _docstring(kind)
    kinds = {
        name: text
        for base in reversed(kind.__mro__)
        for name, text in inspect.get_annotations(base).items()
    }
    rows = [
        (f"`{name}`", f"`{_plain(kinds[name])}`", field.description or "")
        for name, field in kind.model_fields.items()
    ]
    yield _table(("field", "type", "meaning"), rows)


def _plain(kind: str) -> str:
    """Return the type of a field without its constraints."""
    return re.sub(r"Annotated\[(\w+), .*?\)\]|\bText\b", lambda found: found[1] or "str", kind)


def _errors() -> Iterator[tuple[str, ...]]:
    def under(base: type[errors.AlbertServeError]) -> Iterator[type[errors.AlbertServeError]]:
        for kind in base.__subclasses__():
            if kind.__module__ == errors.__name__:
                yield kind
                yield from under(kind)

    for kind in under(errors.AlbertServeError):
        is_reply = issubclass(kind, errors.RequestError) and kind is not errors.RequestError
        meaning = _line(griffe.Docstring(kind.__doc__ or "").parse("google")[0].value)
        yield f"`{kind.__name__}`", str(int(kind.status)) if is_reply else "", meaning


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        "| " + " | ".join(_line(cell).replace("|", r"\|") for cell in line) + " |" for line in lines
    )


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
    print(f"{PAGE} is written", file=sys.stderr)  # noqa: T201
