"""The concurrency limit follows the measured throughput; refusals in excess of a rate are delayed.

`QueueAdmission` is tested with the batcher that asks it, too (test_queue.py, test_waiting.py).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.batching.admission import ConcurrencyLimiter, QueueAdmission, RefusalPacer
from albert_serve.batching.scheduler import QueuedRequest, Scheduler
from albert_serve.errors import QueueFullError
from tests.albert_serve.batching.engines import FakeClock

INITIAL = 128
LEAST = 72


def serve_full(limiter: ConcurrencyLimiter, clock: FakeClock, per_s: float, seconds: float) -> None:
    """Admit requests up to the limit, and answer them at this rate."""
    ends_s = clock.now_s + seconds
    while clock.now_s < ends_s:
        while not limiter.is_full():
            limiter.admit()
        clock.now_s += 1 / per_s
        limiter.release()


@settings(max_examples=30, deadline=None)
@given(per_s=st.floats(1, 500), max_latency_s=st.floats(0.1, 20))
def test_the_limit_is_the_throughput_times_the_latency(per_s: float, max_latency_s: float) -> None:
    clock = FakeClock()
    limiter = ConcurrencyLimiter(max_latency_s, clock)
    serve_full(limiter, clock, per_s, max(20.0, 60 / per_s))
    assert limiter.limit == pytest.approx(max(LEAST, per_s * max_latency_s), rel=0.05, abs=2)


def test_the_limit_follows_the_throughput_and_not_the_arrivals() -> None:
    """A slower engine lowers it; few requests, and idle times between bursts, do not."""
    clock = FakeClock()
    limiter = ConcurrencyLimiter(1.0, clock)
    ask_slowly(limiter, clock)
    assert limiter.limit == INITIAL
    serve_full(limiter, clock, 500, 10)
    while limiter.num_requests:
        limiter.release()
    clock.now_s += 1000
    ask_slowly(limiter, clock)
    assert limiter.limit > 450
    serve_full(limiter, clock, 100, 20)
    assert limiter.limit == pytest.approx(100, rel=0.05)


def ask_slowly(limiter: ConcurrencyLimiter, clock: FakeClock) -> None:
    for _ in range(50):
        limiter.admit()
        clock.now_s += 1
        limiter.release()


@pytest.mark.parametrize(
    ("status", "limit"), [(422, 250), (429, 250), (499, 250), (None, 250), (504, LEAST)]
)
def test_errors_do_not_change_the_limit_but_missed_deadlines_do(
    status: int | None, limit: int
) -> None:
    clock = FakeClock()
    limiter = ConcurrencyLimiter(0.5, clock)
    serve_full(limiter, clock, 500, 10)
    for _ in range(30_000):
        while not limiter.is_full():
            limiter.admit()
        clock.now_s += 0.001
        limiter.release(status)
    assert limiter.limit == pytest.approx(limit, rel=0.05)


@pytest.mark.parametrize(("num_more", "most"), [(0, LEAST), (50, LEAST), (1300, 42)])
def test_overload_lowers_the_floor_of_the_limit_until_it_is_over(num_more: int, most: int) -> None:
    """At 84 answers a second, with so many refused in each."""
    clock = FakeClock()
    limiter = ConcurrencyLimiter(0.5, clock)
    for second in range(20):
        for number in range(84):
            while not limiter.is_full():
                limiter.admit()
            for _ in range(num_more // 84 + (number < num_more % 84)):
                limiter.refuse()
            clock.now_s += 1 / 84
            limiter.release()
        assert second < 3 or limiter.limit == pytest.approx(most, abs=1)
    serve_full(limiter, clock, 84, 5)
    assert limiter.limit == LEAST


def test_a_refusal_says_when_the_requests_in_progress_will_be_done() -> None:
    clock = FakeClock()
    limiter = ConcurrencyLimiter(20.0, clock)
    serve_full(limiter, clock, 10, 100)
    error = limiter.refuse()
    assert error.retry_after_s == pytest.approx(20, rel=0.1)
    assert f"{limiter.limit} are taken at once" in str(error)


def test_paused_requests_leave_room_for_others_and_return_over_the_limit() -> None:
    limiter = ConcurrencyLimiter(1.0, FakeClock())
    for _ in range(INITIAL):
        limiter.admit()
    limiter.pause()
    assert not limiter.is_full()
    limiter.admit()
    limiter.resume()
    assert limiter.num_requests == INITIAL + 1
    assert limiter.is_full()


def test_few_refusals_are_not_delayed() -> None:
    clock = FakeClock()
    pacer = RefusalPacer(clock)
    for _ in range(1000):
        assert pacer.next_delay_s() == 0
        clock.now_s += 0.02


@settings(max_examples=50, deadline=None)
@given(gaps_s=st.lists(st.floats(0, 0.005), min_size=1, max_size=500), start_s=st.floats(0, 1e6))
def test_no_refusal_is_delayed_by_much_more_than_a_second(
    gaps_s: list[float], start_s: float
) -> None:
    clock = FakeClock()
    clock.now_s = start_s
    pacer = RefusalPacer(clock)
    for gap_s in gaps_s:
        clock.now_s += gap_s
        assert 0 <= pacer.next_delay_s() <= 1.051


def test_clients_that_come_back_at_once_are_refused_about_once_a_second() -> None:
    """However many clients there are, and although all of them are refused together at first."""
    clock = FakeClock()
    pacer = RefusalPacer(clock)
    due_s = [clock.now_s] * 500
    num_refused, ends_s = 0, clock.now_s + 10
    while clock.now_s < ends_s:
        clock.now_s = min(due_s)
        for client, at_s in enumerate(due_s):
            if at_s <= clock.now_s:
                due_s[client] = clock.now_s + pacer.next_delay_s() + 1e-4
                num_refused += 1
    assert num_refused == pytest.approx(500 * 10 / 0.9, rel=0.1)


@pytest.mark.parametrize(
    ("queued", "batches", "lengths", "least_s"),
    [
        pytest.param([64] * 10, [(1, 1.0)], [10], 2 * 64, id="short: one batch of large ones"),
        pytest.param([20], [(1, 1.0)], [60, 60, 10], 130 + 3 * 20, id="a wait for each slot"),
        pytest.param([64], [(100, 1.0), (1, 1.0)], [64], 2 * 64 / 80.2, id="a slow batch"),
        pytest.param([64], [(100, 1.0), *[(1, 1.0)] * 50], [64], 2 * 64, id="a slow engine"),
    ],
)
def test_the_least_time_for_which_a_request_is_admitted(
    queued: list[int], batches: list[tuple[int, float]], lengths: list[int], least_s: float
) -> None:
    scheduler: Scheduler[QueuedRequest] = Scheduler(max_batch_tokens=64, call_overhead_tokens=16)
    for length in queued:
        scheduler.add(QueuedRequest(lengths=[length], ends_s=1e9))
    admission = QueueAdmission(scheduler, max_tokens=10_000)
    for num_tokens, elapsed_s in batches:
        admission.measure(num_tokens, elapsed_s)
    request = QueuedRequest(lengths=lengths, ends_s=1e9)
    admission.check(request, least_s * 1.01)
    with pytest.raises(QueueFullError):
        admission.check(request, least_s * 0.99)
