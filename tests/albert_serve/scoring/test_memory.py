"""The memory of a job is bounded, whatever the size of its input."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

ROW_BYTES = 100_000


def write_rows(file: Path, num_rows: int) -> Path:
    """A row group of short texts, and of a long column that is kept."""
    draw = random.Random(0)
    columns = {
        "text": [f"review number {number} is fine" for number in range(num_rows)],
        "body": [draw.randbytes(ROW_BYTES // 2).hex() for _ in range(num_rows)],
    }
    parquet.write_table(pyarrow.table(columns), file, use_dictionary=False, row_group_size=num_rows)
    return file


def peak_bytes(bundle: Path, source: Path) -> int:
    """The most memory that the process of a job has."""
    target = source.with_name(f"scored-{source.name}")
    command = [sys.executable, "-m", "albert_serve", "score", str(source), str(target)]
    options = ["--task", "text-classification", "--bundle", str(bundle)]
    process = subprocess.Popen([*command, *options])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024


@pytest.mark.slow
def test_the_memory_of_a_job_does_not_grow_with_its_input(bundle_dir: Path, tmp_path: Path) -> None:
    few, many = (write_rows(tmp_path / f"{num}.parquet", num) for num in (500, 4000))
    assert many.stat().st_size > few.stat().st_size + 150_000_000
    assert peak_bytes(bundle_dir, many) < peak_bytes(bundle_dir, few) + 60_000_000
