"""Named heads on a command line: the flags after `--head NAME` describe its data."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Final, TypeVar

from albert_serve.bundle.weights import HEAD_NAME
from albert_serve.terminal import CommandParser
from training.options.flags import add_flags, read_flags
from training.options.labelled import LabelledTexts

_OPTION: Final = "--head"
_HeadT = TypeVar("_HeadT", bound=LabelledTexts)


def add_heads(group: argparse._ActionsContainer) -> None:
    """Add `--head`, which `parse_with_heads` reads, to the help of a parser."""
    group.add_argument(
        _OPTION,
        metavar="NAME",
        help="name of an additional classifier; the data options that follow apply to it "
        "(repeatable)",
    )


def parse_with_heads(
    parser: argparse.ArgumentParser, head: type[_HeadT], words: Sequence[str] | None = None
) -> tuple[argparse.Namespace, list[argparse.Namespace]]:
    """Parse a command line, and the flags of each named classifier, with its name as `head`.

    Flags after `--head NAME` that do not describe a classifier's data belong to the command.
    """
    command_words, *parts = _parts(sys.argv[1:] if words is None else words)
    head_parser = CommandParser(add_help=False, allow_abbrev=False, prog=parser.prog)
    add_flags(head_parser, head)
    heads: list[argparse.Namespace] = []
    for name, *head_words in parts:
        _check_name(parser, name, [values.head for values in heads])
        values, unknown = head_parser.parse_known_args(head_words)
        if unknown and not unknown[0].startswith("-"):
            parser.error(f"{_OPTION} {name}: unrecognized arguments: {' '.join(unknown)}")
        command_words += unknown
        heads.append(argparse.Namespace(**vars(values), head=name))
    return parser.parse_args(command_words), heads


def read_heads(head: type[_HeadT], heads: Sequence[argparse.Namespace]) -> tuple[_HeadT, ...]:
    """Return the configurations of named classifiers."""
    return tuple(read_flags(head, values, head=values.head) for values in heads)


def _parts(words: Sequence[str]) -> list[list[str]]:
    """Return the words before the first `--head`, and the words after each, with the name first."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == _OPTION:
            parts.append([])
        elif word.startswith(f"{_OPTION}="):
            parts.append([word.partition("=")[2]])
        else:
            parts[-1].append(word)
    return [parts[0], *(part or [""] for part in parts[1:])]


def _check_name(parser: argparse.ArgumentParser, name: str, names: Sequence[str]) -> None:
    if not re.fullmatch(HEAD_NAME, name):
        parser.error(
            f"{_OPTION} {name!r} is not a name. Use up to 64 lower-case letters, digits, - and _, "
            "with a letter or digit first."
        )
    if name in names:
        parser.error(f"{_OPTION} {name} is repeated. Use another name for each classifier.")
