"""Scheduling of batches: inputs of like length together, and fair queueing of requests.

Requests are served in round-robin, each a slot of one batch. The longest of its inputs seeds the
batch, and the inputs nearest to that in length fill it, one of each request after another. A new
request comes last, so it waits for at most one batch of each earlier request, however large they
are. Short requests go before large ones, but get no more compute than these while both wait: so a
large one waits at most twice as long as without them, and one batch.

Nothing here depends on a clock, a thread or a model.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

# A request is short if its tokens are at most this fraction of a batch.
_SHORT_FRACTION: Final = 0.25


@dataclass(kw_only=True, slots=True, eq=False)
class QueuedRequest:
    """Inputs that are answered together.

    Attributes:
        lengths: tokens of each input, at least 1.
        ends_s: the deadline, on the clock of the scheduler's caller.
        waiting: the indices of the inputs that have not been taken, by length.
        num_waiting_tokens: tokens of those inputs.
        is_short: whether it was short when it came; the scheduler's.
    """

    lengths: Sequence[int]
    ends_s: float
    waiting: dict[int, list[int]] = field(init=False)
    num_waiting_tokens: int = field(init=False)
    is_short: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.waiting = {}
        for index, length in enumerate(self.lengths):
            self.waiting.setdefault(length, []).append(index)
        self.num_waiting_tokens = sum(self.lengths)


_RequestT = TypeVar("_RequestT", bound=QueuedRequest)


@dataclass(kw_only=True, slots=True)
class ScheduledBatch(Generic[_RequestT]):
    """The inputs that the engine runs next.

    Attributes:
        members: pairs of a request and the index of one of its inputs.
        expired: requests that were removed because their deadline has passed.
        longest: tokens of the longest input.
        num_padding_tokens: padding tokens of the other inputs, in all.
    """

    members: list[tuple[_RequestT, int]] = field(default_factory=list)
    expired: list[_RequestT] = field(default_factory=list)
    longest: int = 0
    num_padding_tokens: int = 0

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that the engine computes, with padding."""
        return len(self.members) * self.longest

    def padding_with(self, length: int) -> int:
        """Return `num_padding_tokens` with one more input, of this length."""
        if length > self.longest:
            return self.num_padding_tokens + len(self.members) * (length - self.longest)
        return self.num_padding_tokens + self.longest - length

    def append(self, request: _RequestT, index: int) -> None:
        """Add an input."""
        length = request.lengths[index]
        self.num_padding_tokens = self.padding_with(length)
        self.longest = max(self.longest, length)
        self.members.append((request, index))


class Scheduler(Generic[_RequestT]):
    """The waiting requests. The cost of `take` depends on the batch, not on the queue.

    Args:
        max_batch_tokens: the limit of a batch, padding included; a longer input runs alone.
        call_overhead_tokens: of an engine call, as tokens of compute; a batch has no more
            padding than that.
    """

    def __init__(self, *, max_batch_tokens: int, call_overhead_tokens: int) -> None:
        self.max_batch_tokens = max_batch_tokens
        self._call_overhead_tokens = call_overhead_tokens
        self._queue: _Queue[_RequestT] = _Queue(max_batch_tokens)

    @property
    def num_requests(self) -> int:
        """Number of requests with a waiting input."""
        return len(self._queue)

    @property
    def num_tokens(self) -> int:
        """Number of waiting tokens, without padding."""
        return self._queue.num_tokens

    def add(self, request: _RequestT) -> None:
        """Add a request. Its turn comes after the waiting requests."""
        self._queue.add(request)

    def remove(self, request: _RequestT) -> None:
        """Remove the waiting inputs of a request, if there are any."""
        self._queue.remove(request)

    def take(self, now_s: float) -> ScheduledBatch[_RequestT]:
        """Remove and return the next batch; it has no members if nothing waits.

        Args:
            now_s: the time, on the deadlines' clock.
        """
        batch: ScheduledBatch[_RequestT] = ScheduledBatch()
        while self.num_requests:
            request = self._queue.first()
            if self._drop_if_late(request, batch, now_s):
                continue
            has_both_sizes = self._queue.has_both_sizes
            self._fill(batch, request, now_s)
            cost_tokens = batch.num_padded_tokens + self._call_overhead_tokens
            self._queue.end_slot(request, cost_tokens if has_both_sizes else 0)
            break
        return batch

    def _drop_if_late(
        self, request: _RequestT, batch: ScheduledBatch[_RequestT], now_s: float
    ) -> bool:
        if request.ends_s > now_s:
            return False
        self.remove(request)
        batch.expired.append(request)
        return True

    def _fill(self, batch: ScheduledBatch[_RequestT], seed: _RequestT, now_s: float) -> None:
        queue = self._queue
        batch.append(seed, queue.take(seed, max(seed.waiting)))
        while (length := self._next_length(batch)) is not None:
            request = queue.first_of_length(length)
            if not self._drop_if_late(request, batch, now_s):
                batch.append(request, queue.take(request, length))

    def _next_length(self, batch: ScheduledBatch[_RequestT]) -> int | None:
        """Return the length that adds the least padding; None if the batch has no room for it."""
        num_members = len(batch.members) + 1
        if num_members * batch.longest > self.max_batch_tokens:
            return None
        if self._queue.has_length(batch.longest):
            return batch.longest
        candidates = [
            (padding, length)
            for length in self._queue.lengths_around(batch.longest)
            if (padding := batch.padding_with(length)) <= self._call_overhead_tokens
            and num_members * length <= self.max_batch_tokens
        ]
        return min(candidates)[1] if candidates else None


class _Queue(Generic[_RequestT]):
    """The waiting requests, by size and by length.

    Attributes:
        num_tokens: tokens of the waiting inputs.
    """

    def __init__(self, slot_tokens: int) -> None:
        self.num_tokens = 0
        self._slot_tokens = slot_tokens
        # In order of their slots. Ordered dictionaries, here and below, because a plain one takes
        # longer to find its first key the more were removed before it.
        self._short: OrderedDict[_RequestT, None] = OrderedDict()
        self._large: OrderedDict[_RequestT, None] = OrderedDict()
        self._short_credit_tokens = 0  # compute that short requests may use before large ones
        self._by_length: dict[int, OrderedDict[_RequestT, None]] = {}
        self._lengths: list[int] = []  # the keys of _by_length, ascending

    def __len__(self) -> int:
        return len(self._short) + len(self._large)

    @property
    def has_both_sizes(self) -> bool:
        return bool(self._short and self._large)

    def add(self, request: _RequestT) -> None:
        if not request.waiting:
            return
        request.is_short = self._is_short(request.num_waiting_tokens)
        self._same_size(request)[request] = None
        self.num_tokens += request.num_waiting_tokens
        for length in request.waiting:
            if length not in self._by_length:
                self._by_length[length] = OrderedDict()
                insort(self._lengths, length)
            self._by_length[length][request] = None

    def remove(self, request: _RequestT) -> None:
        if request not in self._same_size(request):
            return
        del self._same_size(request)[request]
        self.num_tokens -= request.num_waiting_tokens
        for length in request.waiting:
            self._leave(request, length)
        request.waiting.clear()
        request.num_waiting_tokens = 0

    def first(self) -> _RequestT:
        """Return the request whose slot is next."""
        is_shorts_turn = self._short_credit_tokens >= 0 or not self._large
        return next(iter(self._short if self._short and is_shorts_turn else self._large))

    def end_slot(self, request: _RequestT, cost_tokens: int) -> None:
        """Put a request last, if any of it is left.

        Args:
            cost_tokens: of its batch; 0 unless both short and large requests waited for it.
        """
        self._short_credit_tokens += -cost_tokens if request.is_short else cost_tokens
        if request in self._same_size(request):
            self._same_size(request).move_to_end(request)

    def has_length(self, length: int) -> bool:
        return length in self._by_length

    def first_of_length(self, length: int) -> _RequestT:
        return next(iter(self._by_length[length]))

    def take(self, request: _RequestT, length: int) -> int:
        """Take an input of this length, and return its index; the request then comes last."""
        indices = request.waiting[length]
        index = indices.pop()
        self.num_tokens -= length
        request.num_waiting_tokens -= length
        if indices:
            self._by_length[length].move_to_end(request)
            return index
        del request.waiting[length]
        self._leave(request, length)
        if not request.waiting:
            del self._same_size(request)[request]
        return index

    def lengths_around(self, length: int) -> list[int]:
        """Return the nearest waiting lengths: the greatest up to this one, the least over it."""
        end = bisect_right(self._lengths, length)
        return self._lengths[max(0, end - 1) : end + 1]

    def _is_short(self, num_tokens: int) -> bool:
        return num_tokens <= _SHORT_FRACTION * self._slot_tokens

    def _same_size(self, request: _RequestT) -> OrderedDict[_RequestT, None]:
        return self._short if request.is_short else self._large

    def _leave(self, request: _RequestT, length: int) -> None:
        requests = self._by_length[length]
        del requests[request]
        if not requests:
            del self._by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
