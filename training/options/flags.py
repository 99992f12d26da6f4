"""Command-line flags that are made from the fields of a configuration's dataclass.

    @dataclass(frozen=True, kw_only=True)
    class End(Options, title="end of the run"):
        steps: Count | None = flag()
        budget: Duration | None = flag("training time, such as 25m or 2h")

`batch_size` is the flag `--batch-size`, a tuple takes several values, and a bool is on or off. All
values are checked, also in Python, and errors name the flags. In place of data files, Python may
pass tables in memory (`training.options.tables`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from training.errors import RunError
from training.options.tables import data_files
from training.options.values import NumberRange, Parsed

_HELP = "help"
_METAVAR = "metavar"


class OptionError(RunError):
    """A value that a flag does not allow."""


def flag(
    help_: str,
    default: Any = None,
    *,
    metavar: str | None = None,
) -> Any:
    """Return a field that is a flag. The default is added to the help, unless it contains one."""
    return field(default=default, metadata={_HELP: help_, _METAVAR: metavar})


class _Kind(NamedTuple):
    """The kind of values that a field takes.

    Attributes:
        value: `NumberRange`, `Parsed` or type of the value.
        is_list: whether the field is a tuple of such values.
    """

    value: Any
    is_list: bool

    def check(self, value: Any) -> Any:
        """Return a value, or the values of a list, in the field's type."""
        if not self.is_list:
            return self._check(value)
        if self.value is Path:
            return data_files(value)
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            value = (value,)  # a single value needs no list
        return tuple(map(self._check, value))

    def _check(self, value: Any) -> Any:
        if hasattr(value, "item") and not getattr(value, "shape", None):
            value = value.item()  # a NumPy scalar becomes a Python number
        if isinstance(self.value, NumberRange | Parsed):
            return self.value.check(value)
        if self.value is Path:
            return Path(value)
        if choices := get_args(self.value):
            if value not in choices:
                raise argparse.ArgumentTypeError(f"{value!r} is not one of {', '.join(choices)}.")
        elif not isinstance(value, self.value):
            raise argparse.ArgumentTypeError(f"{value!r} is not a {self.value.__name__}.")
        return value

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of argparse that read such values."""
        if self.value is bool:
            return {"action": argparse.BooleanOptionalAction}
        several = {"nargs": "+"} if self.is_list else {}
        if isinstance(self.value, NumberRange | Parsed):
            return {**several, "type": self.value.parse}
        if choices := get_args(self.value):
            return {**several, "choices": choices}
        return {**several, "type": self.value}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of configurations: a frozen dataclass whose fields are flags.

    Attributes:
        title: title of the class's own flags in the help.
        defaults: default to show in the help, for fields whose default depends on other fields.
    """

    title: ClassVar[str] = "options"
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, title: str | None = None) -> None:
        """Set the title of the class's own flags in the help."""
        if title is not None:
            cls.title = title

    def __post_init__(self) -> None:
        """Check all values, and convert them from simpler forms such as text."""
        kinds = _kinds(type(self))
        for option in flags_of(type(self)):
            value = getattr(self, option.name)
            if value is None and option.default is None:
                continue
            try:
                object.__setattr__(self, option.name, kinds[option.name].check(value))
            except argparse.ArgumentTypeError as error:
                raise OptionError(f"{flag_name(option.name)}: {error}") from error


_OptionsT = TypeVar("_OptionsT", bound=Options)


def flag_name(name: str) -> str:
    """Return the flag of a field."""
    return f"--{name.replace('_', '-')}"


def flags_of(config: type[Options]) -> Iterator[Field[Any]]:
    """Yield the fields that are flags."""
    return (option for option in fields(config) if _HELP in option.metadata)


def add_flags(parser: argparse.ArgumentParser, config: type[Options]) -> None:
    """Add the flags of a configuration, in the groups of the classes that declare them."""
    kinds = _kinds(config)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in flags_of(config):
        title = _declaring(config, option.name).title
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        is_required = option.default is MISSING
        groups[title].add_argument(
            flag_name(option.name),
            default=None if is_required else option.default,
            required=is_required,
            help=_help(option, config.defaults),
            **kinds[option.name].arguments(),
            **({"metavar": option.metadata[_METAVAR]} if option.metadata[_METAVAR] else {}),
        )


def read_flags(
    config: type[_OptionsT], values: argparse.Namespace, **other_fields: Any
) -> _OptionsT:
    """Return the configuration of parsed flags and other fields."""
    names = [option.name for option in flags_of(config)]
    return config(**{name: getattr(values, name) for name in names}, **other_fields)


def _help(option: Field[Any], defaults: Mapping[str, Any]) -> str:
    text: str = option.metadata[_HELP]
    default = defaults.get(option.name, option.default)
    if default is MISSING:
        return f"{text} (required)"
    if default is None or default == () or isinstance(default, bool) or "(default: " in text:
        return text
    words = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{text} (default: {words})"


def _declaring(config: type[Options], name: str) -> type[Options]:
    """Return the class that declares a field."""
    owners = (base for base in config.__mro__ if name in vars(base).get("__annotations__", {}))
    return next(owner for owner in owners if issubclass(owner, Options))


def _kinds(config: type[Options]) -> dict[str, _Kind]:
    """Return the kind of values of each field, by the field's name."""
    hints = get_type_hints(config, include_extras=True)
    return {option.name: _kind(hints[option.name]) for option in flags_of(config)}


def _kind(hint: Any) -> _Kind:
    """Return the kind of values of a type such as `tuple[Count, ...]` or `Path | None`."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is tuple:
        return _Kind(_kind(get_args(hint)[0]).value, is_list=True)
    if get_origin(hint) is Annotated:
        return _Kind(hint.__metadata__[0], is_list=False)
    return _Kind(hint, is_list=False)
