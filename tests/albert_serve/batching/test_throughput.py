"""The measured throughput: no single batch decides, and nothing is divided by zero."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from albert_serve.batching.throughput import Throughput

batches = st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e4)), max_size=30)


def measured(*batches: tuple[int, float]) -> Throughput:
    throughput = Throughput()
    for num_tokens, elapsed_s in batches:
        throughput.measure(num_tokens, elapsed_s)
    return throughput


def test_before_anything_is_measured_nothing_is_late_and_a_second_is_enough() -> None:
    assert Throughput().best_s_per_token == 0
    assert Throughput().retry_after_s(10**9) == 1


def test_one_slow_batch_after_a_fast_one_changes_the_best_by_a_hundredth() -> None:
    assert measured((100, 1.0), (1, 100.0)).best_s_per_token == pytest.approx(0.01 / 0.99)


def test_one_fast_batch_after_a_slow_one_is_the_best() -> None:
    assert measured((1, 100.0), (100, 1.0)).best_s_per_token == pytest.approx(0.01)


def test_an_engine_that_stays_slow_is_known_to_be_slow() -> None:
    assert measured((100, 1.0), *[(10, 1.0)] * 300).best_s_per_token == pytest.approx(0.1)


def test_the_usual_rate_follows_the_measurements() -> None:
    throughput = measured((10, 1.0), *[(100, 1.0)] * 50)
    assert throughput.retry_after_s(1000) == pytest.approx(10, rel=0.01)


@given(batches=batches, num_tokens=st.integers(0, 10**9))
def test_whatever_is_measured_a_time_to_wait_is_sane(
    batches: list[tuple[int, float]], num_tokens: int
) -> None:
    throughput = measured(*batches)
    assert 1 <= throughput.retry_after_s(num_tokens) <= 60
    assert throughput.best_s_per_token >= 0
