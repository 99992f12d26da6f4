"""Common options of the examples, and the client that they select."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from albert_serve.client import AlbertClient
from albert_serve.errors import AlbertServeError


def example_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with `--url` and `--local`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url",
        default=argparse.SUPPRESS,
        help="address of a service, such as http://127.0.0.1:3000 (default: ALBERT_URL)",
    )
    where.add_argument(
        "--local",
        metavar="PATH",
        default=argparse.SUPPRESS,
        help="folder of a model to run in this process, instead of a service",
    )
    return parser


@contextmanager
def connect(options: argparse.Namespace) -> Iterator[AlbertClient]:
    """Open the client inside `with`; an error of it ends the program in one line."""
    try:
        with (
            AlbertClient.local(options.local)
            if "local" in options
            else AlbertClient(getattr(options, "url", None)) as albert
        ):
            yield albert
    except AlbertServeError as error:
        raise SystemExit(f"error: {error}") from error
