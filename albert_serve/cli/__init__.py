"""The command line: `albert-serve serve | reload | score | info | doctor | import`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from albert_serve import __version__
from albert_serve.cli.bundles import add_doctor, add_import, add_info
from albert_serve.cli.score import add_score
from albert_serve.cli.serve import add_reload, add_serve
from albert_serve.errors import AlbertServeError

_EXAMPLES: Final = """\
examples:
  albert-serve serve
  albert-serve score --task text-classification reviews.jsonl scored.jsonl
  albert-serve info models/albert-small-en

`albert-serve COMMAND --help` has the options and examples of each.
"""
# What a shell says of a program that SIGINT ended.
_INTERRUPTED: Final = 128 + 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = command_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (AlbertServeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status if isinstance(error, AlbertServeError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return status


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="albert-serve",
        description="Serve ALBERT, score files with it, look into a bundle.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"albert-serve {__version__}")
    commands = parser.add_subparsers(
        required=True, metavar="serve | reload | score | info | doctor | import"
    )
    add_serve(commands)
    add_reload(commands)
    add_score(commands)
    add_info(commands)
    add_doctor(commands)
    add_import(commands)
    return parser
