"""Metrics of all events, and the log, which never blocks requests."""

from __future__ import annotations

import json
import logging
import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from albert_serve.batching.queue import BatchReport
from albert_serve.server import logging as our_logging
from albert_serve.server.logging import (
    REQUEST_ID,
    JsonFormatter,
    LogOutput,
    QueuedHandler,
    RepeatedWarning,
)
from albert_serve.server.metrics import Metrics

LINE = "a" * 99
NUM_LINES = 5000
NOTICE = re.compile(r"(\d+) log lines were dropped")


def test_events_are_counted_by_task_and_counts_start_at_0() -> None:
    registry = CollectorRegistry()
    observer = Metrics(registry).observer("tiny", "fp32", ["fill-mask", "sentence-order"])
    observer.queued("fill-mask", 7)
    for _ in range(2):
        observer.shed("fill-mask")
    observer.expired("fill-mask")
    for _ in range(3):
        observer.cancelled("fill-mask")
    delays_s = {"fill-mask": [0.25, 0.5], "sentence-order": [1.0]}
    sizes: Any = {"num_inputs": 3, "num_tokens": 20, "num_padded_tokens": 24}
    observer.batch(BatchReport(**sizes, engine_s=0.5, queue_delays_s=delays_s))
    counts = {
        ("requests_total", "fill-mask", None): 1,
        ("request_tokens_total", "fill-mask", None): 7,
        ("requests_given_up_total", "fill-mask", "shed"): 2,
        ("requests_given_up_total", "fill-mask", "expired"): 1,
        ("requests_given_up_total", "fill-mask", "cancelled"): 3,
        ("requests_given_up_total", "sentence-order", "shed"): 0,
        ("queue_delay_seconds_sum", "fill-mask", None): 0.75,
        ("queue_delay_seconds_sum", "sentence-order", None): 1,
        ("engine_seconds_sum", None, None): 0.5,
        ("batch_tokens_sum", None, None): 20,
        ("batch_inputs_sum", None, None): 3,
        ("padding_tokens_total", None, None): 4,
    }
    for (name, task, reason), expected in counts.items():
        labels = {"model": "tiny", "task": task, "reason": reason}
        present = {key: value for key, value in labels.items() if value is not None}
        assert registry.get_sample_value(f"albert_serve_{name}", present) == expected, name
    served_model = {"model": "tiny", "precision": "fp32"}
    assert registry.get_sample_value("albert_serve_model", served_model) == 1


@given(st.text(), st.text(min_size=1))
def test_a_record_is_one_line_of_json(message: str, reason: str) -> None:
    fields = {"created": 1.5, "levelname": "INFO", "trace_msg": "[trace=a,span=b]", "status": 404}
    record = logging.makeLogRecord({"msg": "%s", "args": (message,), "name": "x", **fields})
    try:
        raise ValueError(reason)
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    context = REQUEST_ID.set("7")
    line = JsonFormatter().format(record)
    REQUEST_ID.reset(context)
    assert len(line.splitlines()) == 1
    parsed: dict[str, Any] = json.loads(line)
    assert reason in parsed.pop("exception")
    assert parsed == {
        "time": "1970-01-01T00:00:01.500+00:00",
        "level": "INFO",
        "logger": "x",
        "message": message,
        "request_id": "7",
        "status": 404,
        "trace_id": "a",
        "span_id": "b",
    }


def test_a_repeated_warning_is_logged_every_10_s_with_the_number_of_events(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=5.0)
    monkeypatch.setattr(our_logging, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    warning = RepeatedWarning(logging.getLogger("albert_serve"), "%d rejected by %s")
    for now_s in (5.0, 6.0, 14.9, 15.0, 24.9):
        clock.now_s = now_s
        warning.log(f"{now_s}")
    assert caplog.messages == ["1 rejected by 5.0", "3 rejected by 15.0"]


def test_lines_over_the_limit_of_unread_lines_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(our_logging, "_MAX_WAITING", 100)
    read_end, write_end = os.pipe()
    handler = QueuedHandler(LogOutput(write_end))
    logger = logging.getLogger(our_logging.__name__)
    logger.addHandler(handler)
    for _ in range(NUM_LINES):
        logger.warning(LINE)
    text, num_lines, num_dropped = "", 0, 0
    while num_lines + num_dropped < NUM_LINES:
        text += os.read(read_end, 1 << 20).decode()
        num_lines = text.count(LINE)
        num_dropped = sum(map(int, NOTICE.findall(text)))
    assert num_dropped > 0
    assert num_lines + num_dropped == NUM_LINES
    assert [line for line in text.splitlines() if not NOTICE.match(line)] == [LINE] * num_lines
    logger.warning("next")
    assert os.read(read_end, 1 << 20) == b"next\n"
    logger.removeHandler(handler)
    os.close(write_end)
    os.close(read_end)
