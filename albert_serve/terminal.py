"""The command line: parsers, and output of texts of any origin in any encoding."""

from __future__ import annotations

import argparse
import io
import sys
from typing import NoReturn

from albert_serve.errors import printable


def prepare_output() -> None:
    """Let no character end a command: one that the output's encoding lacks is printed escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None without a console; others in notebooks
            stream.reconfigure(errors="backslashreplace")


def print_error(error: Exception) -> None:
    """Print an error on stderr; its text may quote a file or a service that is hostile."""
    sys.stderr.write(f"error: {printable(str(error))}\n")


class CommandParser(argparse.ArgumentParser):
    """A parser whose usage errors are one line, without the usage of all options."""

    def error(self, message: str) -> NoReturn:
        """Print the error with the way to the help, and exit with status 2."""
        self.exit(2, f"error: {printable(message)}. See `{self.prog} --help`.\n")


def make_parser(prog: str, description: str | None, examples: str) -> CommandParser:
    """Return the parser of a program, whose help shows both texts as they are."""
    return CommandParser(
        prog=prog,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
