"""Further classifiers on a command line: the options after `--head NAME` are those of its data."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from albert_serve.bundle.weights import HEAD_NAME
from training.data.labelled.race import RACE
from training.loop.progress import RunError
from training.run.options import add_columns, add_task, with_task_data

_OPTION: Final = "--head"
# Options of other data, which a classifier has none of.
_OTHERS: Final = ("multiple_choice", "question_answering", "pretraining", "teacher")


def add_heads(group: argparse._ActionsContainer) -> None:
    """Add `--head` to the help of a parser; `parse_with_heads` reads it."""
    group.add_argument(
        _OPTION,
        metavar="NAME",
        help="a further classifier of that name; the options of labelled texts after it are those "
        "of its data. May be given several times",
    )


def head_parser() -> argparse.ArgumentParser:
    """Return a parser of the options of a classifier's data, to which more can be added."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_text_classification(parser)
    add_task(parser)
    add_columns(parser)
    return parser


def add_text_classification(group: argparse._ActionsContainer) -> None:
    """Add the option of labelled texts."""
    group.add_argument(
        "--text-classification",
        nargs="+",
        type=Path,
        help="CSV, TSV, JSONL or Parquet files, or folders of them",
    )


def parse_with_heads(
    parser: argparse.ArgumentParser,
    of_head: argparse.ArgumentParser,
    words: Sequence[str] | None = None,
) -> argparse.Namespace:
    """Parse a command line; `heads` are the options of each further classifier, with its `head`.

    Options after `--head NAME` that are none of a classifier's data are the command's. None may be
    abbreviated.

    Args:
        words: those of the process by default.
    """
    # An abbreviation after `--head` would be read as the default classifier's option.
    parser.allow_abbrev = False
    shared, *parts = _parts(sys.argv[1:] if words is None else words)
    of_head.prog, of_head.usage = parser.prog, parser.format_usage().removeprefix("usage: ")
    heads: list[argparse.Namespace] = []
    for name, *rest in parts:
        _check_name(parser, name, [head.head for head in heads])
        head, others = of_head.parse_known_args(rest)
        if others and not others[0].startswith("-"):
            parser.error(f"{_OPTION} {name}: unrecognized arguments: {' '.join(others)}")
        shared += others
        heads.append(argparse.Namespace(**vars(head), head=name))
    options = parser.parse_args(shared)
    options.heads = heads
    return options


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


def each_head(options: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Yield the options of each further classifier: the command's, and those of its own data.

    Raises:
        RunError: one has no data, or as `with_task_data`.
        CorpusError: as `with_task_data`.
    """
    for head in options.heads:
        none = {name: None for name in _OTHERS if name in options}
        own = with_task_data(argparse.Namespace(**{**vars(options), **none, **vars(head)}))
        if own.task == RACE or not (own.text_classification or own.task):
            raise RunError(
                f"{_OPTION} {own.head} is a classifier of texts; give its data after it, by "
                "--text-classification or a --task of GLUE"
            )
        yield own
