"""The command line: parsers, and output of texts of any origin in any encoding."""

from __future__ import annotations

import argparse
import io
import sys
from typing import NoReturn

from albert_serve.errors import printable


def prepare_output() -> None:
    """Print characters that the output's encoding lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # for example, notebooks have another type
            stream.reconfigure(errors="backslashreplace")


def print_error(error: Exception) -> None:
    """Print an error on stderr. Control characters are escaped, because it may quote any file."""
    sys.stderr.write(f"error: {printable(str(error))}\n")


class CommandParser(argparse.ArgumentParser):
    """A parser that prints a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and a reference to the help, and exit with status 2."""
        sentence = printable(message).removesuffix(".")
        self.exit(2, f"error: {sentence}. See `{self.prog} --help`.\n")


def make_parser(prog: str, description: str | None, examples: str) -> CommandParser:
    """Return the parser of a program, whose help shows both texts unchanged.

    Options cannot be abbreviated, so that a new option never changes the meaning of a command.
    """
    return CommandParser(
        prog=prog,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
