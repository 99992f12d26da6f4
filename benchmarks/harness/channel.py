"""The side of a worker: messages from and to the process that started it, a line of JSON each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO


class Channel:
    """The connection to the parent. Everything else that is printed goes to the standard error."""

    def __init__(self) -> None:
        self._answers: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        sys.stdout.flush()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; None at the end of the input, where the worker has to end."""
        line = sys.stdin.readline().strip()
        if not line:
            return None
        message: dict[str, Any] = json.loads(line)
        return message

    def send(self, message: Mapping[str, Any]) -> None:
        """Send the first message, or the answer to the one received."""
        print(json.dumps(message), file=self._answers, flush=True)
