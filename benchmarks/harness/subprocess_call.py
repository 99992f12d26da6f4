"""One call of a function in a process of its own, whose work disturbs nothing in this one.

Unlike `multiprocessing`, the process does not import the program that started it, which may take
seconds.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from benchmarks.harness.errors import BenchmarkError, last_line

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")
_REPOSITORY: Final = Path(__file__).parents[2]
_READY: Final = b"ready\n"


@contextlib.contextmanager
def running_in_process(
    function: Callable[[_Argument], _Result], argument: _Argument
) -> Iterator[Callable[[], _Result]]:
    """Run a function of a module while this process does something else.

    Yields:
        Waits for the result. The function has been imported and has begun.

    Raises:
        BenchmarkError: the process failed.
    """
    with tempfile.NamedTemporaryFile() as log:
        command = [sys.executable, "-m", "benchmarks.harness.subprocess_call"]
        with subprocess.Popen(
            command, cwd=_REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        ) as process:

            def result() -> Any:
                try:
                    return pickle.load(process.stdout)  # type: ignore[arg-type]  # noqa: S301 - our own
                except (EOFError, pickle.UnpicklingError) as error:
                    raise failure() from error

            def failure() -> BenchmarkError:
                status, line = process.wait(), last_line(Path(log.name))
                return BenchmarkError(f"{function.__module__} ended with status {status}: {line}")

            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                pickle.dump((function, argument), process.stdin)
            if process.stdout.readline() != _READY:
                raise failure()
            yield result


def run_in_process(function: Callable[[_Argument], _Result], argument: _Argument) -> _Result:
    """Run a function of a module, and wait for its result.

    Raises:
        BenchmarkError: the process failed.
    """
    with running_in_process(function, argument) as result:
        return result()


def _main() -> None:
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for what the function prints
        function, argument = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process above
        answers.write(_READY)
        answers.flush()
        pickle.dump(function(argument), answers)


if __name__ == "__main__":
    _main()
