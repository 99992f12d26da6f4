"""Answers by request, on disk and limited in size, so that identical rows are computed once.

The content after a part is the same whether the job was interrupted or not: an entry belongs to
the part that computed it, and a part sees entries of earlier parts only.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

from albert_serve.scoring.answers import Result

MAX_BYTES: Final = 1 << 30
_MAX_ENTRY_BYTES: Final = 1 << 16


class Memo:
    """The answers of a job so far.

    Args:
        file: the database; None for a temporary one.
        num_parts: the complete parts; what later ones left behind is removed.
    """

    def __init__(self, file: Path | None, num_parts: int = 0) -> None:
        # "" is a temporary file that SQLite removes.
        self._connection = sqlite3.connect(
            "" if file is None else file,
            # The rows of a job may be read by several threads, one after another.
            check_same_thread=False,
        )
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS answers "
            "(key BLOB PRIMARY KEY, part INTEGER, content TEXT) WITHOUT ROWID"
        )
        with self._connection:
            self._connection.execute("DELETE FROM answers WHERE part >= ?", (num_parts,))
        (size,) = self._connection.execute(
            "SELECT COALESCE(SUM(LENGTH(CAST(content AS BLOB))), 0) FROM answers"
        ).fetchone()
        self._num_bytes: int = size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def get(self, key: bytes) -> Result | None:
        """Return the answer to a request; None if there is none."""
        row = self._connection.execute(
            "SELECT content FROM answers WHERE key = ?", (key,)
        ).fetchone()
        return None if row is None else Result(values=json.loads(row[0]))

    def put(self, part: int, results: Iterable[tuple[bytes, Result]]) -> None:
        """Store a part's answers, as far as there is space; errors are not stored."""
        with self._connection:
            for key, result in results:
                if result.is_error:
                    continue
                content = json.dumps(result.values)
                if len(content) > _MAX_ENTRY_BYTES or self._num_bytes + len(content) > MAX_BYTES:
                    continue
                self._num_bytes += len(content)
                self._connection.execute(
                    "INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (key, part, content)
                )
