"""Progress: a bar in a terminal, complete lines elsewhere, nothing for short work."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable

import pytest

from albert_serve import progress as module
from albert_serve.progress import progress, progress_bar

WORK = """
import time
from albert_serve import progress as module
module.LINE_EVERY_S = 0.05
for number in module.progress(range(4), title="counting", unit="numbers", is_step=False):
    time.sleep(0.1)
"""


@pytest.fixture
def lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[], list[str]]:
    """A line is written at each update; the fixture returns the lines of stderr."""
    monkeypatch.setattr(module, "LINE_EVERY_S", 1e-9)
    return lambda: capsys.readouterr().err.splitlines()


def test_a_log_has_a_line_for_each_report(lines: Callable[[], list[str]]) -> None:
    assert list(progress(range(4), title="hashing", unit="files")) == [0, 1, 2, 3]
    reports = lines()
    assert [report.split("|")[0] for report in reports[:2]] == ["hashing:  25%", "hashing:  50%"]
    assert " 4/4 [00:00<00:00, " in reports[-1]
    assert reports[-1].endswith(" files/s]")


def test_short_work_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert sum(progress(range(100), title="adding")) == 4950
    with progress_bar(title="nothing", total=3) as bar:
        bar.update(3)
    assert capsys.readouterr() == ("", "")


def test_in_a_terminal_it_is_a_bar() -> None:
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    subprocess.run([sys.executable, "-c", WORK], stderr=there, check=True, timeout=120)
    shown = os.read(here, 10_000).decode()
    os.close(there)
    os.close(here)
    assert "\rcounting: 100%|" in shown


def test_a_closed_pipe_does_not_end_the_work() -> None:
    here, there = os.pipe()
    os.close(here)
    program = WORK + "print('whole')"
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=there, stdout=subprocess.PIPE, timeout=120
    )
    os.close(there)
    assert done.stdout == b"whole\n"
