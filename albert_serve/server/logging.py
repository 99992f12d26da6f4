"""The log: a line a request, with the request's id on every line, as text or as JSON."""

from __future__ import annotations

import contextvars
import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Final, Literal

# The id of the request that is being answered in this context.
REQUEST_ID: Final[contextvars.ContextVar[str | None]] = contextvars.ContextVar(
    "albert_serve_request_id", default=None
)
# What an access line has beside its message.
ACCESS_FIELDS: Final = ("method", "path", "status", "duration_ms")
_TRACE: Final = re.compile(r"trace=(?P<trace>\w+),span=(?P<span>\w+)")
_OURS: Final = "albert_serve"


def configure_logs(log_format: Literal["text", "json"]) -> None:
    """Let our own lines through; as JSON, have every handler that there is write JSON."""
    logging.getLogger(_OURS).setLevel(logging.INFO)
    if log_format == "text":
        return
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))
    for name in ("", *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            handler.setFormatter(JsonFormatter())


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line. Whatever the record holds, it is one: JSON has escapes for line ends."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        # Not the record's own, which BentoML's filter sets to its span's.
        line["request_id"] = REQUEST_ID.get()
        line |= {name: getattr(record, name) for name in ACCESS_FIELDS if hasattr(record, name)}
        # BentoML's filter writes the trace into a text of its own.
        trace = _TRACE.search(getattr(record, "trace_msg", ""))
        if trace is not None:
            line |= {"trace_id": trace["trace"], "span_id": trace["span"]}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in line.items() if value is not None})
