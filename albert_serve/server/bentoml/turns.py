"""The order in which the connections of an event loop are read: one turn in each of its iterations.

A request takes some ten iterations, from its first byte to its reply, and each iteration does the
next step of all requests that have begun. If all that arrives began at once, iterations would be
long, and a small request would wait for ten of them. So an iteration begins one request at most:
what has begun is finished first, and what has not begun waits in the order of arrival. If its
client leaves meanwhile, it never begins.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Turns:
    """Callables that wait for their turn.

    Args:
        loop: the event loop, of which each iteration takes one turn.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], bool]] = deque()
        self._is_taken = False

    def add(self, turn: Callable[[], bool]) -> None:
        """Call `turn` when those before it have had theirs: at once, if none has in this iteration.

        Args:
            turn: returns whether it did anything; the next one is not kept waiting for one that
                did not. It may add itself again.
        """
        self._waiting.append(turn)
        if not self._is_taken:
            self._take()

    def _take(self) -> None:
        self._is_taken = False
        try:
            while self._waiting and not self._is_taken:
                self._is_taken = True
                self._is_taken = self._waiting.popleft()()
        finally:
            if self._is_taken:
                self._loop.call_soon(self._take)
