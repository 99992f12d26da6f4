"""Command-line parsers, which show a command's documentation and examples."""

from __future__ import annotations

import argparse


def make_parser(prog: str, description: str | None, examples: str) -> argparse.ArgumentParser:
    """Return the parser of a program, whose help shows both texts as they are."""
    return argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
