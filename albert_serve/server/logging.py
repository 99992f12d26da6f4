"""Logging: one line per request, as text or JSON, and the request's id on every line.

A thread writes the lines, because a reader that does not empty its pipe would block the service.
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
import time
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import Any, Final, Literal

from albert_serve.errors import printable

# This is the id of the request in progress in this context.
REQUEST_ID: Final[contextvars.ContextVar[str | None]] = contextvars.ContextVar(
    "albert_serve_request_id", default=None
)
# These are the fields of an access log line besides its message.
_ACCESS_FIELDS: Final = ("method", "path", "status", "duration_ms")
_TRACE: Final = re.compile(r"trace=(?P<trace>\w+),span=(?P<span>\w+)")
_ROOT_LOGGER: Final = "albert_serve"
_INTERVAL_S: Final = 10.0
_MAX_WAITING: Final = 1000
_FLUSH_S: Final = 1.0
_logger = logging.getLogger(__name__)


def configure_logs(log_format: Literal["text", "json"]) -> None:
    """Enable the package's loggers, and write all logs in a thread and in one format."""
    logging.getLogger(_ROOT_LOGGER).setLevel(logging.INFO)
    if log_format == "json" and not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))
    for name in ("", *logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if log_format == "json":
                handler.setFormatter(JsonFormatter())
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.__stdout__:
                logger.removeHandler(handler)
                logger.addHandler(_queued(handler))


def _queued(handler: logging.Handler) -> QueuedHandler:
    """Return a handler that queues the records of another handler."""
    queued = QueuedHandler(log_output())
    queued.setLevel(handler.level)
    queued.setFormatter(handler.formatter)
    for log_filter in handler.filters:
        queued.addFilter(log_filter)
    return queued


class LogOutput(logging.Handler):
    """A writer of queued log records, one per line, with a thread of its own.

    Args:
        descriptor: descriptor of the file to write to.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self.records: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_WAITING)
        self.num_dropped = 0
        QueueListener(self.records, self).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or drop it if the disk is full or the pipe is closed."""
        line = f"{printable(record.getMessage())}\n".encode("utf-8", "backslashreplace")
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError:
            self.num_dropped += 1
            return
        if self.num_dropped and self.records.empty():
            num_dropped, self.num_dropped = self.num_dropped, 0
            _logger.warning(
                "%d log lines were dropped, because they could not be written.", num_dropped
            )

    def finish(self) -> None:
        """Wait up to a second until all records are written."""
        end_s = time.monotonic() + _FLUSH_S
        while self.records.unfinished_tasks and time.monotonic() < end_s:
            time.sleep(0.01)


class QueuedHandler(QueueHandler):
    """A handler that formats and queues records, or drops them if the queue is full."""

    def __init__(self, output: LogOutput) -> None:
        super().__init__(output.records)
        self._output = output

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a formatted record."""
        try:
            self._output.records.put_nowait(record)
        except queue.Full:
            self._output.num_dropped += 1


@functools.cache
def log_output() -> LogOutput:
    """Return the writer of this process's standard output."""
    output = LogOutput(1)
    atexit.register(output.finish)
    return output


class RepeatedWarning:
    """A warning that is logged at most every 10 s, because overload would cause too many lines.

    Args:
        message: format of the line. Its first argument is the number of events since the last line.
    """

    def __init__(self, logger: logging.Logger, message: str) -> None:
        self._logger = logger
        self._message = message
        self._num_events = 0
        self._logged_s = -math.inf

    def log(self, *args: object) -> None:
        """Count an event, and log a line unless the last one is recent."""
        self._num_events += 1
        if time.monotonic() - self._logged_s < _INTERVAL_S:
            return
        self._logger.warning(self._message, self._num_events, *args)
        self._num_events, self._logged_s = 0, time.monotonic()


class JsonFormatter(logging.Formatter):
    """A formatter that writes a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line, because JSON escapes line breaks."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        # `record.request_id` is not used, because BentoML's filter sets it to the id of a span.
        line["request_id"] = REQUEST_ID.get()
        line |= {name: getattr(record, name) for name in _ACCESS_FIELDS if hasattr(record, name)}
        # BentoML's filter writes the trace into `trace_msg`, as text.
        trace = _TRACE.search(getattr(record, "trace_msg", ""))
        if trace is not None:
            line |= {"trace_id": trace["trace"], "span_id": trace["span"]}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in line.items() if value is not None})
