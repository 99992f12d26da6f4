"""Named heads on a command line: the flags after `--head NAME` are about its data."""

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
    """Add `--head` to the help of a parser; `parse_with_heads` reads it."""
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

    Flags after `--head NAME` that are none of a classifier's data are the command's. None may be
    abbreviated.
    """
    # An abbreviation after `--head` would be read as the default classifier's option.
    parser.allow_abbrev = False
    shared, *parts = _parts(sys.argv[1:] if words is None else words)
    of_head = CommandParser(add_help=False, allow_abbrev=False, prog=parser.prog)
    add_flags(of_head, head)
    heads: list[argparse.Namespace] = []
    for name, *rest in parts:
        _check_name(parser, name, [earlier.head for earlier in heads])
        own, others = of_head.parse_known_args(rest)
        if others and not others[0].startswith("-"):
            parser.error(f"{_OPTION} {name}: unrecognized arguments: {' '.join(others)}")
        shared += others
        heads.append(argparse.Namespace(**vars(own), head=name))
    return parser.parse_args(shared), heads


def read_heads(head: type[_HeadT], heads: Sequence[argparse.Namespace]) -> tuple[_HeadT, ...]:
    """Return the configurations of named classifiers."""
    return tuple(read_flags(head, own, head=own.head) for own in heads)


def _parts(words: Sequence[str]) -> list[list[str]]:
    """Return the words before the first `--head`, and for each its name and the words after it."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == _OPTION:
            parts.append([])
        elif word.startswith(f"{_OPTION}="):
            parts.append([word.partition("=")[2]])
        else:
            parts[-1].append(word)
    return [parts[0], *(part or [""] for part in parts[1:])]


def _check_name(parser: argparse.ArgumentParser, name: str, others: Sequence[str]) -> None:
    if not re.fullmatch(HEAD_NAME, name):
        parser.error(
            f"{_OPTION} {name!r}: a name has lower-case letters, digits, - and _, at most 64, and "
            "begins with a letter or digit"
        )
    if name in others:
        parser.error(f"{_OPTION} {name} is given twice; each classifier has a name of its own")
