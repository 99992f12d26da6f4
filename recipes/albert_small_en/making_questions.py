"""Commands that make a file of questions in SQuAD's form: FILE ... OUTPUT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from training.errors import report_errors
from training.options.flags import Options, add_flags, read_flags
from training.system.command_line import make_parser


@dataclass(frozen=True, kw_only=True)
class MakingQuestions(Options, title="questions"):
    """The files that questions are made of.

    Attributes:
        output: a .json file, or .json.xz.
    """

    files: Sequence[Path]
    output: Path


_ConfigT = TypeVar("_ConfigT", bound=MakingQuestions)


def run_making(
    config: type[_ConfigT],
    run: Callable[[_ConfigT], int],
    arguments: Sequence[str] | None,
    *,
    prog: str,
    description: str | None,
    examples: str,
    files: str,
) -> int:
    """Run a command line; returns its exit status.

    Args:
        files: the help of the files.
    """
    parser = make_parser(prog, description, examples)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=files)
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="a .json file, or .json.xz")
    add_flags(parser, config)
    values = parser.parse_args(arguments)
    own = {"files": values.files, "output": values.output}
    return report_errors(lambda: run(read_flags(config, values, **own)))
