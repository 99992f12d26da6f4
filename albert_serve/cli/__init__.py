"""The command line, `albert-serve COMMAND`. Training and export add commands by entry points."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast

from albert_serve import __version__
from albert_serve.errors import AlbertServeError, ConfigError, how_to_install
from albert_serve.terminal import make_parser, prepare_output, print_error

# This maps a command's name to its module, which is imported when needed, and its purpose.
_Commands: TypeAlias = Mapping[str, tuple[str, str]]
# The module of each command has a function `NAME_parser`.
_SERVING: Final[_Commands] = MappingProxyType(
    {
        "serve": ("albert_serve.cli.serve", "answer requests over HTTP"),
        "score": ("albert_serve.cli.score", "score the rows of files"),
        "info": ("albert_serve.cli.bundles", "show the tasks, sizes and metrics of a bundle"),
        "import": ("albert_serve.cli.bundles", "put a bundle into BentoML's model store"),
    }
)
# Each entry point is a table of commands, whose modules have `main`.
_GROUP: Final = "albert_serve.commands"
_EXAMPLES: Final = """\
examples:
  albert-serve serve
  albert-serve score --task text-classification reviews.jsonl scored.jsonl
  albert-serve finetune --text-classification train.csv --output runs/mine --epochs 3
  albert-serve export runs/mine/checkpoint bundles/mine --precision int8

`albert-serve COMMAND --help` has the options and examples of each.
"""
# Shells report these statuses for programs that SIGINT or SIGPIPE ended.
_INTERRUPTED: Final = 128 + 2
_BROKEN_PIPE: Final = 128 + 13


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    prepare_output()
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else ""
    try:
        if name in _SERVING:
            options = command_parser(name).parse_args(words[1:])
            status = cast("int", options.run(options))
            sys.stdout.flush()
            return status
        training = _training_commands()
        if name in training:
            return cast("int", _load(name, training, "train").main(words[1:]))
    except BrokenPipeError:  # the reader of the output has ended, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except (AlbertServeError, OSError) as error:
        print_error(error)
        return error.exit_status if isinstance(error, AlbertServeError) else 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return _INTERRUPTED
    _overview(training).parse_args(words)
    return 0


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a serving command."""
    make = getattr(_load(name, _SERVING, "serve"), f"{name}_parser")
    return cast("argparse.ArgumentParser", make(_SERVING[name][1]))


def _load(name: str, commands: _Commands, extra: str) -> Any:
    try:
        return import_module(commands[name][0])
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`albert-serve {name}` needs {error.name}, which is not installed. Run "
            f"{how_to_install(extra)}."
        ) from error


def _training_commands() -> _Commands:
    tables = [entry_point.load() for entry_point in entry_points(group=_GROUP)]
    return {name: command for table in tables for name, command in table.items()}


def _overview(training: _Commands) -> argparse.ArgumentParser:
    """Return the parser of a command line without a valid command."""
    groups = {"serving": _SERVING, "training and export": training}
    description = ["ALBERT from raw text to production."]
    for title, commands in groups.items():
        lines = (f"  {name:<12} {purpose}" for name, (_, purpose) in commands.items())
        description += [f"\n{title}:", *lines]
    parser = make_parser("albert-serve", "\n".join(description), _EXAMPLES)
    parser.usage = "albert-serve [-h] [--version] COMMAND ..."
    parser.add_argument("--version", action="version", version=f"albert-serve {__version__}")
    names = (*_SERVING, *training)
    parser.add_argument("command", choices=names, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser
