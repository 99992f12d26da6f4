"""Scheduling of batches: inputs of similar length run together, and requests share compute fairly.

Requests take turns. In a request's turn, its longest input seeds a batch. The inputs nearest in
length fill the batch, one from each request in rotation. A new request comes last, so it waits for
at most one batch of each earlier request, however large these are.

Short requests precede large requests, but get no more compute while both wait. So a large request
waits at most twice as long as it would without short requests, plus one batch.

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
        lengths: number of tokens of each input, at least 1.
        ends_s: deadline on the clock of the scheduler's caller.
        waiting: indices of the waiting inputs, by length.
        num_waiting_tokens: number of tokens in the waiting inputs.
        is_short: whether the request was short on arrival, which the scheduler sets.
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
        members: pairs of a request and the index of an input.
        expired: requests that were removed because their deadlines have passed.
        longest: number of tokens in the longest input.
        num_padding_tokens: number of padding tokens of all inputs.
    """

    members: list[tuple[_RequestT, int]] = field(default_factory=list)
    expired: list[_RequestT] = field(default_factory=list)
    longest: int = 0
    num_padding_tokens: int = 0

    @property
    def num_padded_tokens(self) -> int:
        """The number of tokens that the engine computes, with padding."""
        return len(self.members) * self.longest

    def padding_with(self, length: int) -> int:
        """Return `num_padding_tokens` with another input of this length."""
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
        max_batch_tokens: maximum number of tokens in a padded batch. A longer input runs alone.
        call_overhead_tokens: overhead of an engine call, as a number of tokens that take as long. A
            batch has at most as much padding.
    """

    def __init__(self, *, max_batch_tokens: int, call_overhead_tokens: int) -> None:
        self.max_batch_tokens = max_batch_tokens
        self._call_overhead_tokens = call_overhead_tokens
        self._queue: _Queue[_RequestT] = _Queue(max_batch_tokens)

    @property
    def num_requests(self) -> int:
        """The number of requests with a waiting input."""
        return len(self._queue)

    @property
    def num_tokens(self) -> int:
        """The number of waiting tokens, without padding."""
        return self._queue.num_tokens

    def add(self, request: _RequestT) -> None:
        """Add a request, whose turn comes after the waiting requests."""
        self._queue.add(request)

    def remove(self, request: _RequestT) -> None:
        """Remove a request's waiting inputs, if it has any."""
        self._queue.remove(request)

    def take(self, now_s: float) -> ScheduledBatch[_RequestT]:
        """Remove and return the next batch, which is empty if no input waits.

        Args:
            now_s: current time on the clock of the deadlines.
        """
        batch: ScheduledBatch[_RequestT] = ScheduledBatch()
        while self.num_requests:
            request = self._queue.first()
            if self._drop_if_expired(request, batch, now_s):
                continue
            has_both_sizes = self._queue.has_both_sizes
            self._fill(batch, request, now_s)
            cost_tokens = batch.num_padded_tokens + self._call_overhead_tokens
            self._queue.end_turn(request, cost_tokens if has_both_sizes else 0)
            break
        return batch

    def _drop_if_expired(
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
            if not self._drop_if_expired(request, batch, now_s):
                batch.append(request, queue.take(request, length))

    def _next_length(self, batch: ScheduledBatch[_RequestT]) -> int | None:
        """Return the length that adds the least padding, or None if no input fits in the batch."""
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
        num_tokens: number of tokens in the waiting inputs.
    """

    def __init__(self, max_batch_tokens: int) -> None:
        self.num_tokens = 0
        self._max_batch_tokens = max_batch_tokens
        # Requests are in the order of their turns. `OrderedDict` is used, because a plain
        # dictionary needs longer to find its first key after many were removed.
        self._short: OrderedDict[_RequestT, None] = OrderedDict()
        self._large: OrderedDict[_RequestT, None] = OrderedDict()
        self._short_credit_tokens = 0  # tokens computed for large minus short requests
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
            self._remove_length(request, length)
        request.waiting.clear()

    def first(self) -> _RequestT:
        """Return the request whose turn is next."""
        may_be_short = self._short_credit_tokens >= 0 or not self._large
        return next(iter(self._short if self._short and may_be_short else self._large))

    def end_turn(self, request: _RequestT, cost_tokens: int) -> None:
        """Move a request to the end, if it has waiting inputs.

        Args:
            cost_tokens: computed tokens of its batch, or 0 unless short and large requests waited.
        """
        self._short_credit_tokens += -cost_tokens if request.is_short else cost_tokens
        if request in self._same_size(request):
            self._same_size(request).move_to_end(request)

    def has_length(self, length: int) -> bool:
        return length in self._by_length

    def first_of_length(self, length: int) -> _RequestT:
        return next(iter(self._by_length[length]))

    def take(self, request: _RequestT, length: int) -> int:
        """Remove an input of this length, return its index, and put the request last."""
        indices = request.waiting[length]
        index = indices.pop()
        self.num_tokens -= length
        request.num_waiting_tokens -= length
        if indices:
            self._by_length[length].move_to_end(request)
            return index
        del request.waiting[length]
        self._remove_length(request, length)
        if not request.waiting:
            del self._same_size(request)[request]
        return index

    def lengths_around(self, length: int) -> list[int]:
        """Return the nearest waiting lengths: one up to `length`, and one above it."""
        end = bisect_right(self._lengths, length)
        return self._lengths[max(0, end - 1) : end + 1]

    def _is_short(self, num_tokens: int) -> bool:
        return num_tokens <= _SHORT_FRACTION * self._max_batch_tokens

    def _same_size(self, request: _RequestT) -> OrderedDict[_RequestT, None]:
        return self._short if request.is_short else self._large

    def _remove_length(self, request: _RequestT, length: int) -> None:
        requests = self._by_length[length]
        del requests[request]
        if not requests:
            del self._by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
