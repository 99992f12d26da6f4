"""The scheduler, with random requests on a clock that only the engine's work moves on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.batching.scheduler import QueuedRequest, Scheduler
from albert_serve.tasks.base import cut_batches, group_by_length

CALL_OVERHEAD = 16
MAX_BATCH_TOKENS = 64
SHORT_TOKENS = 16
S_PER_TOKEN = 0.01


@dataclass(kw_only=True, slots=True, eq=False)
class Arrival:
    """A request, when it comes, and when its caller leaves. `taken` is filled as it is served."""

    lengths: list[int]
    comes_s: float = 0.0
    leaves_s: float = math.inf
    patience_s: float = math.inf
    request: QueuedRequest = field(init=False)
    taken: list[int] = field(default_factory=list)
    expired: bool = False

    def __post_init__(self) -> None:
        self.request = QueuedRequest(lengths=self.lengths, ends_s=self.comes_s + self.patience_s)

    @property
    def is_short(self) -> bool:
        return sum(self.lengths) <= SHORT_TOKENS

    @property
    def num_left(self) -> int:
        return len(self.lengths) - len(self.taken)

    @property
    def tokens_left(self) -> int:
        return sum(self.lengths) - sum(self.lengths[index] for index in self.taken)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One batch: who waited when it was taken, and what was taken and given up."""

    now_s: float
    waiting: list[Arrival]
    members: list[tuple[Arrival, int]]
    expired: list[Arrival]

    @property
    def seed(self) -> Arrival:
        return self.members[0][0]

    @property
    def lengths(self) -> list[int]:
        return [arrival.lengths[index] for arrival, index in self.members]

    @property
    def cost_tokens(self) -> int:
        return CALL_OVERHEAD + max(self.lengths) * len(self.lengths)


def make_scheduler() -> Scheduler[QueuedRequest]:
    return Scheduler(max_batch_tokens=MAX_BATCH_TOKENS, call_overhead_tokens=CALL_OVERHEAD)


def simulate(arrivals: Sequence[Arrival]) -> Iterator[Step]:
    """Serve all of them; between two steps the queue is what the arrivals' own books say."""
    scheduler = make_scheduler()
    of = {arrival.request: arrival for arrival in arrivals}
    coming = sorted(arrivals, key=lambda arrival: arrival.comes_s)
    waiting: list[Arrival] = []
    now_s = 0.0
    while coming or waiting:
        if not waiting:
            now_s = max(now_s, coming[0].comes_s)
        while coming and coming[0].comes_s <= now_s:
            scheduler.add(coming[0].request)
            waiting.append(coming.pop(0))
        for arrival in [arrival for arrival in waiting if arrival.leaves_s <= now_s]:
            scheduler.remove(arrival.request)
            waiting.remove(arrival)
        batch = scheduler.take(now_s)
        step = Step(
            now_s=now_s,
            waiting=list(waiting),
            members=[(of[request], index) for request, index in batch.members],
            expired=[of[request] for request in batch.expired],
        )
        for arrival in step.expired:
            arrival.expired = True
            waiting.remove(arrival)
        for arrival, index in step.members:
            arrival.taken.append(index)
        waiting = [arrival for arrival in waiting if arrival.num_left]
        assert_queue_holds(scheduler, waiting)
        if step.members:
            yield step
            now_s += step.cost_tokens * S_PER_TOKEN
        else:
            assert not waiting
    assert scheduler.num_requests == 0


def assert_queue_holds(scheduler: Scheduler[QueuedRequest], waiting: Sequence[Arrival]) -> None:
    assert scheduler.num_requests == len(waiting)
    assert scheduler.num_tokens == sum(arrival.tokens_left for arrival in waiting)


lengths = st.one_of(st.integers(1, 90), st.integers(18, 24))
seconds = st.floats(0, 30)
patient = st.builds(
    Arrival,
    lengths=st.lists(lengths, min_size=1, max_size=12),
    comes_s=seconds,
)
impatient = st.builds(
    Arrival,
    lengths=st.lists(lengths, min_size=1, max_size=12),
    comes_s=seconds,
    leaves_s=seconds,
    patience_s=st.floats(0, 20),
)
crowds = st.lists(patient, min_size=1, max_size=25)
impatient_crowds = st.lists(impatient, min_size=1, max_size=25)


@settings(max_examples=100, deadline=None)
@given(arrivals=crowds | impatient_crowds)
def test_every_input_is_taken_once_unless_its_request_is_dropped(arrivals: list[Arrival]) -> None:
    for step in simulate(arrivals):
        assert all(arrival.request.ends_s <= step.now_s for arrival in step.expired)
        for arrival, _ in step.members:
            assert arrival.request.ends_s > step.now_s
            assert arrival.leaves_s > step.now_s
    for arrival in arrivals:
        assert len(set(arrival.taken)) == len(arrival.taken)
        is_gone = arrival.expired or arrival.leaves_s < math.inf
        assert is_gone or sorted(arrival.taken) == list(range(len(arrival.lengths)))


def fits(members: Sequence[int]) -> bool:
    longest = max(members)
    padding = sum(longest - length for length in members)
    return len(members) * longest <= MAX_BATCH_TOKENS and padding <= CALL_OVERHEAD


@settings(max_examples=100, deadline=None)
@given(arrivals=crowds)
def test_a_batch_is_within_its_limits_and_as_full_as_they_allow(
    arrivals: list[Arrival],
) -> None:
    inputs_by_arrival: dict[Arrival, set[int]] = {arrival: set() for arrival in arrivals}
    for step in simulate(arrivals):
        assert fits(step.lengths) or len(step.lengths) == 1
        for arrival, index in step.members:
            inputs_by_arrival[arrival].add(index)
        remaining = [
            length
            for arrival in step.waiting
            for index, length in enumerate(arrival.lengths)
            if index not in inputs_by_arrival[arrival]
        ]
        assert not any(fits([*step.lengths, length]) for length in remaining)


@settings(max_examples=150, deadline=None)
@given(arrivals=crowds)
def test_a_request_waits_for_one_slot_of_each_of_its_size_that_is_before_it(
    arrivals: list[Arrival],
) -> None:
    slots_left: dict[Arrival, int] = {}  # until it has to be served
    for step in simulate(arrivals):
        chosen = {arrival for arrival, _ in step.members}
        rivals = [arrival for arrival in step.waiting if arrival.is_short == step.seed.is_short]
        for arrival in rivals:
            left = slots_left.get(arrival, len(rivals) - 1)
            assert left >= 0
            slots_left[arrival] = len(rivals) - 1 if arrival in chosen else left - 1


@settings(max_examples=300, deadline=None)
@given(arrivals=crowds)
def test_short_requests_get_no_more_compute_than_large_ones_that_wait(
    arrivals: list[Arrival],
) -> None:
    """So a large one waits at most twice as long for them, and two batches."""
    most = CALL_OVERHEAD + max(MAX_BATCH_TOKENS, *(max(arrival.lengths) for arrival in arrivals))
    lead = 0  # the greatest over any time until now
    for step in simulate(arrivals):
        if len({arrival.is_short for arrival in step.waiting}) == 2:
            lead = max(0, lead + (step.cost_tokens if step.seed.is_short else -step.cost_tokens))
            assert lead <= 2 * most


def test_a_short_request_is_in_the_next_batch_but_one_however_many_large_ones_there_are() -> None:
    large = [Arrival(lengths=[60]) for _ in range(20)]
    short = [Arrival(lengths=[10], comes_s=comes_s) for comes_s in (0.1, 5.0)]
    (first, *_) = simulate([Arrival(lengths=[60]), Arrival(lengths=[10])])
    assert first.lengths == [10]
    steps = list(simulate([*large, *short]))
    for arrival in short:
        came = next(place for place, step in enumerate(steps) if step.now_s >= arrival.comes_s)
        served = next(place for place, step in enumerate(steps) if (arrival, 0) in step.members)
        assert served <= came + 1


def test_like_lengths_run_together_one_of_each_request_in_turn() -> None:
    large, other = Arrival(lengths=[8] * 100), Arrival(lengths=[8] * 100)
    for step in list(simulate([large, other]))[:20]:
        members = [arrival for arrival, _ in step.members]
        assert members.count(large) == members.count(other) == 4
    steps = list(simulate([Arrival(lengths=[length]) for length in (20, 3, 19, 4, 5, 3, 21)]))
    assert [sorted(step.lengths) for step in steps] == [[3, 3, 4, 5], [19, 20, 21]]


@given(
    lengths=st.lists(st.integers(1, 512), max_size=60),
    max_tokens=st.sampled_from([1, 600, 4096]),
    max_padding=st.sampled_from([0, 16, math.inf]),
    ascends=st.booleans(),
)
def test_batches_hold_every_index_once_within_the_limits(
    lengths: list[int], max_tokens: int, max_padding: float, ascends: bool
) -> None:
    order = sorted(range(len(lengths)), key=lambda index: lengths[index] * (1 if ascends else -1))
    batches = cut_batches(order, lengths, max_tokens, max_padding_tokens=max_padding)
    assert [index for batch in batches for index in batch] == order
    for batch in batches:
        members = [lengths[index] for index in batch]
        padded = len(members) * max(members)
        assert padded <= max_tokens or len(members) == 1
        assert padded - sum(members) <= max_padding
    if not ascends:
        grouped = group_by_length(lengths, max_tokens, max_padding_tokens=max_padding)
        assert grouped == batches
