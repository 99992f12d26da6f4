"""Logging: one line a request, and the request's id on every line, as text or as JSON.

Lines are written by a thread, because a program that does not read its pipe would stop the service.
"""

from __future__ import annotations

import atexit
import contextvars
import functools
import json
import logging
import math
import os
import queue
import re
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Any, Final, Literal

from albert_serve.errors import printable

# The id of the request that is being answered in this context.
REQUEST_ID: Final[contextvars.ContextVar[str | None]] = contextvars.ContextVar(
    "albert_serve_request_id", default=None
)
# The fields of an access log line besides its message.
_ACCESS_FIELDS: Final = ("method", "path", "status", "duration_ms")
_TRACE: Final = re.compile(r"trace=(?P<trace>\w+),span=(?P<span>\w+)")
_OURS: Final = "albert_serve"
_INTERVAL_S: Final = 10.0
_MAX_WAITING_CHARS: Final = 1 << 20
_FLUSH_S: Final = 1.0
_logger = logging.getLogger(__name__)


def configure_logs(log_format: Literal["text", "json"]) -> None:
    """Enable our own loggers, write in a thread, and for JSON set the formatter of all handlers."""
    logging.getLogger(_OURS).setLevel(logging.INFO)
    if log_format == "json" and not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))
    for name in ("", *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if log_format == "json":
                handler.setFormatter(JsonFormatter())
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.__stdout__:
                handler.setStream(log_writer())


class LogWriter:
    """A stream that writes in a thread of its own, and drops lines while too many wait.

    Args:
        file: the descriptor to write to.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the counts
        self._num_waiting_chars = 0
        self._num_dropped = 0
        threading.Thread(target=self._work, name="log", daemon=True).start()

    def write(self, line: str) -> None:
        """Write a line later, or drop it."""
        with self._lock:
            if self._num_waiting_chars + len(line) > _MAX_WAITING_CHARS:
                self._num_dropped += 1
                return
            self._num_waiting_chars += len(line)
        self._lines.put(line)

    def flush(self) -> None:
        """Do nothing: handlers call this after each line."""

    def finish(self) -> None:
        """Wait until the lines are written, but not long."""
        give_up_s = time.monotonic() + _FLUSH_S
        while self._num_waiting_chars and time.monotonic() < give_up_s:
            time.sleep(0.01)

    def _work(self) -> None:
        while True:
            line = self._lines.get()
            is_written = self._write(line)
            with self._lock:
                self._num_waiting_chars -= len(line)
                self._num_dropped += not is_written
                is_up_to_date = is_written and not self._num_waiting_chars
                num_dropped = self._num_dropped if is_up_to_date else 0
                self._num_dropped -= num_dropped
            if num_dropped:
                _logger.warning("%d log lines were dropped, as nothing took them", num_dropped)

    def _write(self, line: str) -> bool:
        """Whether a line could be written; a full disk or a closed pipe must stop nobody."""
        content = printable(line).encode("utf-8", "backslashreplace")
        try:
            while content:
                content = content[os.write(self._file, content) :]
        except OSError:
            return False
        return True


@functools.cache
def log_writer() -> LogWriter:
    """Return the writer of this process's standard output."""
    writer = LogWriter(1)
    atexit.register(writer.finish)
    return writer


class RepeatedWarning:
    """A warning that is logged at most every 10 s: under overload a line for each costs too much.

    Args:
        message: its first argument is the number of events since the last line.
    """

    def __init__(self, logger: logging.Logger, message: str) -> None:
        self._logger = logger
        self._message = message
        self._num_events = 0
        self._logged_s = -math.inf

    def log(self, *args: object) -> None:
        """Count an event, and log it if none was logged lately."""
        self._num_events += 1
        if time.monotonic() - self._logged_s < _INTERVAL_S:
            return
        self._logger.warning(self._message, self._num_events, *args)
        self._num_events, self._logged_s = 0, time.monotonic()


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; JSON escapes line breaks, so it is always one."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        # The record's own request_id is the span's: BentoML's filter sets it.
        line["request_id"] = REQUEST_ID.get()
        line |= {name: getattr(record, name) for name in _ACCESS_FIELDS if hasattr(record, name)}
        # BentoML's filter writes the trace into `trace_msg`, as text.
        trace = _TRACE.search(getattr(record, "trace_msg", ""))
        if trace is not None:
            line |= {"trace_id": trace["trace"], "span_id": trace["span"]}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in line.items() if value is not None})
