"""What a command prints: texts of any origin, on a terminal or file of any encoding."""

from __future__ import annotations

import io
import sys

from albert_serve.errors import printable


def prepare_output() -> None:
    """Let no character end a command: one that the output's encoding lacks is printed escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None without a console; others in notebooks
            stream.reconfigure(errors="backslashreplace")


def print_error(error: Exception) -> None:
    """Print an error on stderr; its text may quote a file or a service that is hostile."""
    sys.stderr.write(f"error: {printable(str(error))}\n")
