"""One turn an iteration of the event loop, in the order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from albert_serve.server.bentoml.turns import Turns


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture
def turns(loop: asyncio.AbstractEventLoop) -> Turns:
    return Turns(loop)


@pytest.fixture
def taken() -> list[str]:
    return []


def iterate(loop: asyncio.AbstractEventLoop) -> None:
    """Run one iteration."""
    loop.call_soon(loop.stop)
    loop.run_forever()


def recorded(taken: list[str], name: str, *, is_open: bool = True) -> Callable[[], bool]:
    """A turn that puts its name on the list."""

    def turn() -> bool:
        taken.append(name)
        return is_open

    return turn


def test_each_iteration_takes_one_turn_in_the_order_of_arrival(
    loop: asyncio.AbstractEventLoop, turns: Turns, taken: list[str]
) -> None:
    for name in "abc":
        turns.add(recorded(taken, name))
    assert taken == ["a"]
    iterate(loop)
    assert taken == ["a", "b"]
    turns.add(recorded(taken, "d"))
    assert taken == ["a", "b"]
    iterate(loop)
    iterate(loop)
    assert taken == ["a", "b", "c", "d"]


def test_after_a_pause_a_turn_is_taken_at_once(
    loop: asyncio.AbstractEventLoop, turns: Turns, taken: list[str]
) -> None:
    turns.add(recorded(taken, "a"))
    iterate(loop)
    turns.add(recorded(taken, "b"))
    assert taken == ["a", "b"]


def test_a_turn_that_does_nothing_keeps_no_other_waiting(
    loop: asyncio.AbstractEventLoop, turns: Turns, taken: list[str]
) -> None:
    for name in "abcd":
        turns.add(recorded(taken, name, is_open=name in "ad"))
    assert taken == ["a"]
    iterate(loop)
    assert taken == ["a", "b", "c", "d"]


def test_one_that_adds_itself_waits_behind_the_others(
    loop: asyncio.AbstractEventLoop, turns: Turns, taken: list[str]
) -> None:
    def again() -> bool:
        taken.append("again")
        if taken.count("again") < 3:
            turns.add(again)
        return True

    turns.add(recorded(taken, "first"))
    turns.add(again)
    turns.add(recorded(taken, "a"))
    for _ in range(5):
        iterate(loop)
    assert taken == ["first", "again", "a", "again", "again"]


def test_a_turn_that_fails_does_not_end_the_turns(
    loop: asyncio.AbstractEventLoop, turns: Turns, taken: list[str]
) -> None:
    def fail() -> bool:
        raise ValueError("broken")

    failures: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    turns.add(recorded(taken, "a"))
    turns.add(fail)
    turns.add(recorded(taken, "b"))
    for _ in range(3):
        iterate(loop)
    assert taken == ["a", "b"]
    assert [str(failure["exception"]) for failure in failures] == ["broken"]
