"""Logging: one line a request, and the request's id on every line, as text or as JSON."""

from __future__ import annotations

import contextvars
import json
import logging
import math
import re
import sys
import time
from datetime import UTC, datetime
from typing import Any, Final, Literal

# The id of the request that is being answered in this context.
REQUEST_ID: Final[contextvars.ContextVar[str | None]] = contextvars.ContextVar(
    "albert_serve_request_id", default=None
)
# The fields of an access log line besides its message.
_ACCESS_FIELDS: Final = ("method", "path", "status", "duration_ms")
_TRACE: Final = re.compile(r"trace=(?P<trace>\w+),span=(?P<span>\w+)")
_OURS: Final = "albert_serve"
_INTERVAL_S: Final = 10.0


def configure_logs(log_format: Literal["text", "json"]) -> None:
    """Enable our own loggers; for JSON, set the formatter of every handler."""
    logging.getLogger(_OURS).setLevel(logging.INFO)
    if log_format == "text":
        return
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))
    for name in ("", *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            handler.setFormatter(JsonFormatter())


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
