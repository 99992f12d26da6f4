"""The scheduler with random requests. Only the work of the engine advances the clock."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from albert_serve.batching.scheduler import QueuedRequest, Scheduler
from albert_serve.tasks.base import cut_batches, group_by_length

CALL_OVERHEAD = 16
MAX_BATCH_TOKENS = 64
SHORT_TOKENS = 16
S_PER_TOKEN = 0.01


@dataclass(kw_only=True, slots=True, eq=False)
class Arrival(QueuedRequest):
    """A request, the time of its arrival, and the time when its caller leaves.

    Attributes:
        served: the indices of the inputs that were in a batch.
    """

    ends_s: float = math.inf
    arrival_s: float = 0.0
    leaves_s: float = math.inf
    served: list[int] = field(default_factory=list)
    is_expired: bool = False

    @property
    def has_few_tokens(self) -> bool:
        return sum(self.lengths) <= SHORT_TOKENS

    @property
    def remaining(self) -> list[int]:
        """The lengths of the inputs that were in no batch."""
        return [n for index, n in enumerate(self.lengths) if index not in self.served]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One batch, and the requests that waited before it."""

    now_s: float
    waiting: list[Arrival]
    members: list[tuple[Arrival, int]]

    @property
    def seed(self) -> Arrival:
        return self.members[0][0]

    @property
    def lengths(self) -> list[int]:
        return [arrival.lengths[index] for arrival, index in self.members]

    @property
    def cost_tokens(self) -> int:
        return CALL_OVERHEAD + max(self.lengths) * len(self.lengths)


def simulate(arrivals: Sequence[Arrival]) -> Iterator[Step]:
    """Serve all requests. After each step, compare the size of the queue with the arrivals."""
    scheduler: Scheduler[Arrival] = Scheduler(
        max_batch_tokens=MAX_BATCH_TOKENS, call_overhead_tokens=CALL_OVERHEAD
    )
    future = sorted(arrivals, key=lambda arrival: arrival.arrival_s)
    waiting: list[Arrival] = []
    now_s = 0.0
    while future or waiting:
        if not waiting:
            now_s = max(now_s, future[0].arrival_s)
        while future and future[0].arrival_s <= now_s:
            scheduler.add(future[0])
            waiting.append(future.pop(0))
        for arrival in [arrival for arrival in waiting if arrival.leaves_s <= now_s]:
            scheduler.remove(arrival)
            waiting.remove(arrival)
        batch = scheduler.take(now_s)
        step = Step(now_s=now_s, waiting=list(waiting), members=batch.members)
        for arrival in batch.expired:
            assert arrival.ends_s <= now_s
            arrival.is_expired = True
            waiting.remove(arrival)
        for arrival, index in step.members:
            arrival.served.append(index)
        waiting = [arrival for arrival in waiting if arrival.remaining]
        assert scheduler.num_requests == len(waiting)
        assert scheduler.num_tokens == sum(sum(arrival.remaining) for arrival in waiting)
        if step.members:
            yield step
            now_s += step.cost_tokens * S_PER_TOKEN
        else:
            assert not waiting
    assert scheduler.num_requests == 0


LENGTHS = st.lists(st.integers(1, 90) | st.integers(18, 24), min_size=1, max_size=12)
SECONDS = st.floats(0, 30)
PATIENT = st.builds(Arrival, lengths=LENGTHS, arrival_s=SECONDS)
IMPATIENT = st.builds(
    Arrival, lengths=LENGTHS, arrival_s=SECONDS, leaves_s=SECONDS, ends_s=st.floats(0, 40)
)
PATIENT_CROWDS = st.lists(PATIENT, min_size=1, max_size=25)
IMPATIENT_CROWDS = st.lists(IMPATIENT, min_size=1, max_size=25)


@settings(max_examples=100, deadline=None)
@given(arrivals=PATIENT_CROWDS | IMPATIENT_CROWDS)
def test_every_input_is_served_once_unless_its_request_expires_or_is_removed(
    arrivals: list[Arrival],
) -> None:
    for step in simulate(arrivals):
        for arrival, _ in step.members:
            assert min(arrival.ends_s, arrival.leaves_s) > step.now_s
    for arrival in arrivals:
        assert len(set(arrival.served)) == len(arrival.served)
        may_be_incomplete = arrival.is_expired or arrival.leaves_s < math.inf
        assert may_be_incomplete or not arrival.remaining


def is_within_limits(
    lengths: Sequence[int], max_tokens: int = MAX_BATCH_TOKENS, max_padding: float = CALL_OVERHEAD
) -> bool:
    num_padded = len(lengths) * max(lengths)
    return num_padded <= max_tokens and num_padded - sum(lengths) <= max_padding


@settings(max_examples=100, deadline=None)
@given(arrivals=PATIENT_CROWDS)
def test_a_batch_is_within_its_limits_and_as_full_as_they_allow(arrivals: list[Arrival]) -> None:
    for step in simulate(arrivals):
        assert is_within_limits(step.lengths) or len(step.lengths) == 1
        for arrival in step.waiting:
            for length in arrival.remaining:
                assert not is_within_limits([*step.lengths, length])


@settings(max_examples=150, deadline=None)
@given(arrivals=PATIENT_CROWDS)
def test_a_request_waits_for_at_most_one_batch_of_each_earlier_request_of_its_size(
    arrivals: list[Arrival],
) -> None:
    max_waits: dict[Arrival, int] = {}  # the number of batches that may precede the next one
    for step in simulate(arrivals):
        served = {arrival for arrival, _ in step.members}
        has_few_tokens = step.seed.has_few_tokens
        rivals = [item for item in step.waiting if item.has_few_tokens == has_few_tokens]
        for arrival in rivals:
            max_wait = max_waits.get(arrival, len(rivals) - 1)
            assert max_wait >= 0
            max_waits[arrival] = len(rivals) - 1 if arrival in served else max_wait - 1


@settings(max_examples=300, deadline=None)
@given(arrivals=PATIENT_CROWDS)
@example(
    # Large requests that waited alone earn nothing for later short requests.
    arrivals=[
        *(Arrival(lengths=[60]) for _ in range(20)),
        *(Arrival(lengths=[SHORT_TOKENS], arrival_s=1e6) for _ in range(40)),
        Arrival(lengths=[60], arrival_s=1e6),
    ]
)
def test_short_requests_get_no_more_compute_than_waiting_large_requests(
    arrivals: list[Arrival],
) -> None:
    """So a large request waits at most twice as long as without them, plus two batches."""
    max_cost = CALL_OVERHEAD + max(
        MAX_BATCH_TOKENS, *(max(arrival.lengths) for arrival in arrivals)
    )
    lead = 0  # the compute of short requests minus large requests, since its minimum
    for step in simulate(arrivals):
        if len({arrival.has_few_tokens for arrival in step.waiting}) == 2:
            cost_tokens = step.cost_tokens if step.seed.has_few_tokens else -step.cost_tokens
            lead = max(0, lead + cost_tokens)
            assert lead <= 2 * max_cost


def test_many_large_requests_delay_a_short_request_by_at_most_one_batch() -> None:
    large = [Arrival(lengths=[60]) for _ in range(20)]
    short = [Arrival(lengths=[SHORT_TOKENS], arrival_s=arrival_s) for arrival_s in (0.1, 5.0)]
    for length, first_lengths in ((SHORT_TOKENS, [SHORT_TOKENS]), (SHORT_TOKENS + 1, [60])):
        (first, *_) = simulate([Arrival(lengths=[60]), Arrival(lengths=[length])])
        assert first.lengths == first_lengths
    steps = list(simulate([*large, *short]))
    for arrival in short:
        arrived_at = next(n for n, step in enumerate(steps) if step.now_s >= arrival.arrival_s)
        served_at = next(n for n, step in enumerate(steps) if (arrival, 0) in step.members)
        assert served_at <= arrived_at + 1


def test_a_batch_has_similar_lengths_and_takes_inputs_of_requests_in_turn() -> None:
    first, second = Arrival(lengths=[8] * 100), Arrival(lengths=[8] * 100)
    for step in list(simulate([first, second]))[:20]:
        members = [arrival for arrival, _ in step.members]
        assert members.count(first) == members.count(second) == 4
    steps = list(simulate([Arrival(lengths=[length]) for length in (20, 3, 19, 4, 5, 3, 21)]))
    assert [step.lengths for step in steps] == [[3, 3, 4, 5], [20, 19, 21]]
    [step] = simulate([Arrival(lengths=[length]) for length in (15, 15, 15, 16)])  # 64 tokens
    assert step.lengths == [15, 15, 15, 16]


@given(
    lengths=st.lists(st.integers(1, 4) | st.integers(1, 512), max_size=60),
    max_tokens=st.sampled_from([1, 12, 4096]),
    max_padding=st.sampled_from([0, 16, math.inf]),
    is_ascending=st.booleans(),
)
@example(lengths=[4, 3], max_tokens=12, max_padding=0, is_ascending=False)
def test_batches_have_every_index_once_and_are_as_full_as_the_limits_allow(
    lengths: list[int], max_tokens: int, max_padding: float, is_ascending: bool
) -> None:
    order = sorted(
        range(len(lengths)), key=lambda index: lengths[index] * (1 if is_ascending else -1)
    )
    batches = cut_batches(order, lengths, max_tokens, max_padding_tokens=max_padding)
    assert [index for batch in batches for index in batch] == order
    for number, batch in enumerate(batches):
        members = [lengths[index] for index in batch]
        assert is_within_limits(members, max_tokens, max_padding) or len(members) == 1
        for first, *_ in batches[number + 1 : number + 2]:
            assert not is_within_limits([*members, lengths[first]], max_tokens, max_padding)
    if not is_ascending:
        grouped = group_by_length(lengths, max_tokens, max_padding_tokens=max_padding)
        assert grouped == batches
