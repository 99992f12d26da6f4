"""Does the service keep its promises under overload and faults?

Starts real services on this machine, asks them from a process of its own, and does to them what
docs/reliability.md says: ten times of what they can do, signals, kills, slow and many clients,
reloads. Prints a table; exits with 1 if something that was asked for is not met.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from benchmarks.harness.load import allow_open_files
from benchmarks.reliability.crowds import connections, half_open, slow_clients
from benchmarks.reliability.faults import killed_worker, reload, sigterm
from benchmarks.reliability.pressure import Setting, capacity, overload, retries, soak
from benchmarks.reliability.report import Result, tables, write_into
from training.system.command_line import make_parser

_PAGE: Final = Path(__file__).parents[2] / "docs/reliability.md"
SCENARIOS: Final[dict[str, Callable[[Setting], Result]]] = {
    "capacity": capacity,
    "overload": overload,
    "retries": retries,
    "sigterm": sigterm,
    "killed-worker": killed_worker,
    "slow-clients": slow_clients,
    "half-open": half_open,
    "connections": connections,
    "reload": reload,
    "soak": soak,
}
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.reliability
  python -m benchmarks.reliability overload sigterm --seconds 5
  python -m benchmarks.reliability soak --minutes 60 --json found.json --write
  python -m benchmarks.reliability overload --bundle bundles/base

Without names all scenarios are run, the soak of an hour too. Nothing else should run meanwhile.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    unknown = [name for name in options.scenarios if name not in SCENARIOS]
    if unknown:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    allow_open_files()  # for services too, which inherit it
    with tempfile.TemporaryDirectory() as made:
        setting = Setting(
            bundle=options.bundle,
            folder=options.logs or Path(made),
            seconds=options.seconds,
            minutes=options.minutes,
        )
        results = _run(options.scenarios or list(SCENARIOS), setting)
    print(tables(results))
    if options.json:
        results = _merged(options.json, results)
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2))
    if options.write:
        write_into(_PAGE, tables(results))
    return 0 if all(result.passed for result in results) else 1


def _merged(file: Path, results: Sequence[Result]) -> list[Result]:
    """The results, and those of other scenarios that the file has."""
    records = {name: Result(**each) for name, each in _kept(file).items()}
    records |= {result.name: result for result in results}
    return [records[name] for name in SCENARIOS if name in records]


def _kept(file: Path) -> dict[str, dict[str, Any]]:
    if not file.is_file():
        return {}
    return {each["name"]: each for each in json.loads(file.read_text())}


def _run(names: Sequence[str], setting: Setting) -> list[Result]:
    results = []
    with tqdm(names, disable=None, unit="scenario") as bar:
        for name in bar:
            bar.set_description(name)
            results.append(SCENARIOS[name](setting))
    return results


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.reliability", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)} (all)")
    add("--bundle", type=Path, help="bundle to serve (the shipped one)")
    add(
        "--seconds",
        type=float,
        default=20.0,
        help="of each, overload 3 times (%(default)s)",
    )
    add("--minutes", type=float, default=60.0, help="of the soak (%(default)s)")
    add("--logs", type=Path, metavar="DIR", help="keep the services' logs there")
    add("--json", type=Path, metavar="FILE", help="keep the results there, beside those of others")
    add("--write", action="store_true", help=f"put the table into {_PAGE.name}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
