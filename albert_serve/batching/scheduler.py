"""Which of the waiting inputs run next: like lengths together, and a turn for every request.

The requests of a priority have their turns one after another, and a turn is one batch. The longest
of the request's inputs seeds it, and those nearest to that in length fill it, one of each request
after another. Who comes later has its turn later, so that a request waits for no more than one
batch of each that was there before it, however large they are. Interactive requests go before
batch jobs, which have a share of the compute while both wait.

Nothing here knows a clock, a thread or a model.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Literal, TypeAlias, TypeVar, get_args

from albert_serve.errors import ConfigError

Priority: TypeAlias = Literal["interactive", "batch"]

PRIORITIES: Final[tuple[Priority, ...]] = get_args(Priority)


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """Inputs that are answered together.

    Attributes:
        lengths: tokens of each input, at least 1.
        ends_s: from when on the answer is of no use, on the clock of the scheduler's caller.
        waiting: the indices of the inputs that have not been taken, by their length.
        num_waiting_tokens: tokens of those.
    """

    lengths: Sequence[int]
    ends_s: float
    priority: Priority = "interactive"
    waiting: dict[int, list[int]] = field(init=False)
    num_waiting_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = {}
        for index, length in enumerate(self.lengths):
            self.waiting.setdefault(length, []).append(index)
        self.num_waiting_tokens = sum(self.lengths)


RequestT = TypeVar("RequestT", bound=Request)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What deadlines are held against.

    Attributes:
        now_s: the time, on their clock.
        least_s_per_token: what a token takes the engine at its best; 0 while that is not known.
    """

    now_s: float
    least_s_per_token: float = 0.0


@dataclass(kw_only=True, slots=True)
class Batch(Generic[RequestT]):
    """What runs next.

    Attributes:
        members: requests, and the index of an input of theirs.
        given_up: requests that were removed because they would be late.
        longest: tokens of the longest input.
        num_padding_tokens: what the others lack to it, in all.
    """

    members: list[tuple[RequestT, int]] = field(default_factory=list)
    given_up: list[RequestT] = field(default_factory=list)
    longest: int = 0
    num_padding_tokens: int = 0

    @property
    def num_padded_tokens(self) -> int:
        """What the engine computes."""
        return len(self.members) * self.longest

    def padding_with(self, length: int) -> int:
        """What `num_padding_tokens` would be with one more input, of this length."""
        if length > self.longest:
            return self.num_padding_tokens + len(self.members) * (length - self.longest)
        return self.num_padding_tokens + self.longest - length

    def append(self, request: RequestT, index: int) -> None:
        """Take an input in."""
        length = request.lengths[index]
        self.num_padding_tokens = self.padding_with(length)
        self.longest = max(self.longest, length)
        self.members.append((request, index))


class Scheduler(Generic[RequestT]):
    """The requests that wait. To take a batch costs time by the batch, not by the queue.

    Args:
        call_cost_tokens: what one more call of the engine costs, as tokens of compute; a batch has
            no more padding than that.
        batch_share: of the compute, for batch jobs while interactive requests wait too; over 0 and
            under 1.
        turn_tokens: about what a turn computes, by which it is told how long requests will wait.

    Raises:
        ConfigError: a number is out of its range.
    """

    def __init__(
        self, *, call_cost_tokens: int, batch_share: float, turn_tokens: int = 512
    ) -> None:
        if call_cost_tokens < 0:
            raise ConfigError(f"call_cost_tokens is {call_cost_tokens}; it must be 0 or more")
        if not 0 < batch_share < 1:
            raise ConfigError(f"batch_share is {batch_share}; it must be over 0 and under 1")
        self._call_cost_tokens = call_cost_tokens
        self._batch_share = batch_share
        self._turn_tokens = turn_tokens
        self._queues: dict[Priority, _Queue[RequestT]] = {
            name: _Queue(turn_tokens) for name in PRIORITIES
        }
        self._batch_credit_tokens = 0.0

    @property
    def num_requests(self) -> int:
        """Requests of which some input waits."""
        return sum(len(queue.turns) for queue in self._queues.values())

    def num_tokens(self, priority: Priority) -> int:
        """Tokens that wait, without padding."""
        return self._queues[priority].num_tokens

    def num_tokens_ahead(self, priority: Priority) -> float:
        """Tokens that are computed before a request that came now has its first turn.

        A request that is there has one turn before it, however large it is. While requests of the
        other priority wait too, they have their share.
        """
        num_tokens = self._queues[priority].num_turn_tokens
        if not num_tokens or not any(
            queue.turns for name, queue in self._queues.items() if name != priority
        ):
            return num_tokens
        share = self._batch_share if priority == "batch" else 1 - self._batch_share
        return num_tokens / share

    def num_turns(self, num_tokens: int) -> int:
        """Turns that a request of so many tokens has."""
        return max(1, -(-num_tokens // self._turn_tokens))

    def add(self, request: RequestT) -> None:
        """Let a request wait; its turn comes after those of the requests that wait now."""
        self._queues[request.priority].add(request)

    def remove(self, request: RequestT) -> None:
        """Take out what still waits of a request, if anything does."""
        self._queues[request.priority].remove(request)

    def is_late(self, request: RequestT, moment: Moment) -> bool:
        """Whether the deadline of a request that waits has passed, or will have when it is done.

        The latter is told from what the request would take if it had the engine to itself. A
        request that waits alone is tried all the same: it takes nothing from others, and if the
        engine was slow for a while only, nothing else would show it.
        """
        if not request.ends_s > moment.now_s:  # nor is a number
            return True
        least_s = request.num_waiting_tokens * moment.least_s_per_token
        return moment.now_s + least_s > request.ends_s and self.num_requests > 1

    def take(self, moment: Moment, *, max_batch_tokens: int) -> Batch[RequestT]:
        """Remove what is to run next; a batch without members if nothing waits.

        Args:
            max_batch_tokens: the most tokens, padding included; a longer input runs alone.
        """
        batch: Batch[RequestT] = Batch()
        while self.num_requests:
            priority = self._next_priority()
            request = self._queues[priority].first()
            if self._gave_up(request, batch, moment):
                continue
            both_wait = all(queue.turns for queue in self._queues.values())
            self._fill(batch, request, moment, max_batch_tokens)
            if both_wait:
                self._account(priority, batch.num_padded_tokens + self._call_cost_tokens)
            break
        return batch

    def _next_priority(self) -> Priority:
        waiting = [priority for priority, queue in self._queues.items() if queue.turns]
        if len(waiting) == 1:  # who is alone has all of it, and is owed nothing for it later
            self._batch_credit_tokens = min(0.0, self._batch_credit_tokens)
            return waiting[0]
        return "batch" if self._batch_credit_tokens > 0 else "interactive"

    def _account(self, priority: Priority, cost_tokens: int) -> None:
        """Batch jobs earn by what interactive requests have before them, and pay what they have."""
        if priority == "batch":
            self._batch_credit_tokens -= cost_tokens
        else:
            self._batch_credit_tokens += cost_tokens * self._batch_share / (1 - self._batch_share)

    def _gave_up(self, request: RequestT, batch: Batch[RequestT], moment: Moment) -> bool:
        late = self.is_late(request, moment)
        if late:
            self.remove(request)
            batch.given_up.append(request)
        return late

    def _fill(
        self, batch: Batch[RequestT], seed: RequestT, moment: Moment, max_batch_tokens: int
    ) -> None:
        queue = self._queues[seed.priority]
        batch.append(seed, queue.take(seed, max(seed.waiting)))
        queue.end_turn(seed)
        while (length := self._next_length(queue, batch, max_batch_tokens)) is not None:
            request = queue.first_of_length(length)
            if not self._gave_up(request, batch, moment):
                batch.append(request, queue.take(request, length))

    def _next_length(
        self, queue: _Queue[RequestT], batch: Batch[RequestT], max_batch_tokens: int
    ) -> int | None:
        """The length that adds the least padding, if the batch has room for it."""
        num_members = len(batch.members) + 1
        if num_members * batch.longest > max_batch_tokens:
            return None
        if queue.has_length(batch.longest):
            return batch.longest
        fitting = [
            (padding, length)
            for length in queue.lengths_around(batch.longest)
            if (padding := batch.padding_with(length)) <= self._call_cost_tokens
            and num_members * length <= max_batch_tokens
        ]
        return min(fitting)[1] if fitting else None


class _Queue(Generic[RequestT]):
    """The requests of one priority.

    Attributes:
        turns: the requests, who has the next turn first. Ordered dictionaries, here and below,
            for a plain one takes longer to find its first key the more were removed before it.
        num_tokens: tokens of their inputs that wait.
        num_turn_tokens: those of them that the next turn of each may compute.
    """

    def __init__(self, turn_tokens: int) -> None:
        self.turns: OrderedDict[RequestT, None] = OrderedDict()
        self.num_tokens = 0
        self.num_turn_tokens = 0
        self._turn_tokens = turn_tokens
        self._by_length: dict[int, OrderedDict[RequestT, None]] = {}
        self._lengths: list[int] = []  # the keys of that, ascending

    def add(self, request: RequestT) -> None:
        if not request.waiting:
            return
        self.turns[request] = None
        self._count(0, request.num_waiting_tokens)
        for length in request.waiting:
            if length not in self._by_length:
                self._by_length[length] = OrderedDict()
                insort(self._lengths, length)
            self._by_length[length][request] = None

    def remove(self, request: RequestT) -> None:
        if request not in self.turns:
            return
        del self.turns[request]
        self._count(request.num_waiting_tokens, 0)
        for length in request.waiting:
            self._leave(request, length)
        request.waiting.clear()
        request.num_waiting_tokens = 0

    def first(self) -> RequestT:
        return next(iter(self.turns))

    def has_length(self, length: int) -> bool:
        return length in self._by_length

    def first_of_length(self, length: int) -> RequestT:
        return next(iter(self._by_length[length]))

    def end_turn(self, request: RequestT) -> None:
        if request in self.turns:
            self.turns.move_to_end(request)

    def take(self, request: RequestT, length: int) -> int:
        """The index of an input of this length; the request's next one comes after the others'."""
        indices = request.waiting[length]
        index = indices.pop()
        self._count(request.num_waiting_tokens, request.num_waiting_tokens - length)
        request.num_waiting_tokens -= length
        if indices:
            self._by_length[length].move_to_end(request)
            return index
        del request.waiting[length]
        self._leave(request, length)
        if not request.waiting:
            del self.turns[request]
        return index

    def lengths_around(self, length: int) -> list[int]:
        """The greatest length up to this one, and the least over it, of the inputs that wait."""
        end = bisect_right(self._lengths, length)
        return self._lengths[max(0, end - 1) : end + 1]

    def _count(self, before: int, after: int) -> None:
        """Of one request so many tokens wait now."""
        self.num_tokens += after - before
        self.num_turn_tokens += min(after, self._turn_tokens) - min(before, self._turn_tokens)

    def _leave(self, request: RequestT, length: int) -> None:
        requests = self._by_length[length]
        del requests[request]
        if not requests:
            del self._by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
