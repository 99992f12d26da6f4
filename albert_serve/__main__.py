"""`python -m albert_serve` and `albert-serve`: the command line, where serving is installed."""

from __future__ import annotations

import sys

from albert_serve.errors import how_to_install


def main() -> int:
    """Run the command line and return its exit status."""
    try:
        from albert_serve import cli
    except ModuleNotFoundError as error:
        print(
            f"error: {error.name} is not installed; the command line needs more than the client "
            f"does: run `make serve`, or {how_to_install('serve')}",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
