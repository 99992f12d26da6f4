"""`python -m albert_serve` and `albert-serve`: the command line."""

from __future__ import annotations

import sys

from albert_serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
