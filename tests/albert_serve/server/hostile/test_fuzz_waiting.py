"""A small caller beside mixes of expensive requests is answered, and their memory is free again.

How long it waits is a measurement, not a test: `make fuzz-waiting` searches for the worst.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

import httpx
import pytest
from benchmarks.harness.errors import BenchmarkError
from benchmarks.reliability.host import Service, serving
from benchmarks.reliability.hostile import KINDS, request_of
from benchmarks.reliability.mixes import (
    MANNERS,
    MAX_CONNECTIONS,
    MAX_STREAMS,
    Mix,
    Stream,
    changed,
    random_mix,
    read,
    write,
)
from benchmarks.reliability.waiting import Search, Trial, beside, failures, report

SECONDS = 0.4
# What the processes hold differs by some megabytes from moment to moment; what was found once was
# over a gigabyte.
MAX_GROWTH_MB = 50.0
MAX_GROWTH_OF_REFUSALS_MB = 20.0
HEAP_BYTES = 64 << 20
MIXES = (
    "refused-text@1.00x4/leaves cut-text@1.00x4/reads escapes@1.00x2/reads numbers@1.00x4/drips",
    "order-items@1.00x4/reads masked-items@0.80x4/deaf reordered@1.00x4/leaves names@1.00x4/reads",
    "headers@1.00x4/reads chunks@1.00x4/reads paths@1.00x4/reads metrics@0.50x4/leaves",
    "trailers@1.00x4/leaves expanding-targets@1.00x4/reads documents@1.00x8/leaves",
)


@pytest.fixture(scope="module")
def attacked(bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("attacked")
    with serving(bundle_dir, folder, {"THREADS": "1"}) as service:
        yield service


@pytest.mark.slow
def test_a_small_caller_is_answered_beside_any_mix(attacked: Service) -> None:
    mixes = [read(text) for text in MIXES]
    with beside(attacked) as caller:
        first = [caller.trial(mix, SECONDS) for mix in mixes]
        again = caller.trial(mixes[0], SECONDS)
    for trial in (*first, again):
        assert trial.num_sent > 0
        assert set(trial.statuses) == {200}, write(trial.mix)
    assert again.memory_mb - first[0].memory_mb < MAX_GROWTH_MB
    assert "Traceback" not in attacked.log


@pytest.mark.parametrize("num_refused", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_refused_texts_of_a_megabyte_leave_nothing_behind(
    num_refused: int, attacked: Service
) -> None:
    body = {"inputs": "a b " * 250_000}

    def refuse(num_requests: int) -> None:
        with httpx.Client(base_url=attacked.url, timeout=30) as client:
            for _ in range(num_requests):
                assert client.post("/fill-mask", json=body).status_code == 422

    refuse(20)
    before_mb = attacked.pss_mb
    refuse(num_refused)
    assert attacked.pss_mb - before_mb < MAX_GROWTH_OF_REFUSALS_MB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_threads_share_one_heap(attacked: Service) -> None:
    inputs = ["A short run.", "a b " * 10_000]
    with httpx.Client(base_url=attacked.url, timeout=30) as client:
        for text in inputs:
            body = {"inputs": text, "parameters": {"truncation": "truncate"}}
            assert client.post("/text-classification", json=body).status_code == 200
    (worker,) = attacked.workers
    assert thread_heaps(Path(f"/proc/{worker}/maps")) == []


def thread_heaps(maps: Path) -> list[str]:
    """Return the heaps that glibc has made for threads: writable first, then reserved."""
    lines = maps.read_text(encoding="ascii").splitlines()
    heaps = []
    for line, following in pairwise(lines):
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        reserved = following.split()
        if (
            begin % HEAP_BYTES == 0
            and line.split()[1] == "rw-p"
            and reserved[:2] == [f"{end:x}-{begin + HEAP_BYTES:x}", "---p"]
        ):
            heaps.append(line)
    return heaps


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_requests_of_all_sizes(kind: str) -> None:
    small, large = request_of(kind, 0.0), request_of(kind, 1.0)
    assert small.split(b" ")[2].startswith(b"HTTP/1.1\r\n")
    assert len(small) < 10_000
    assert len(large) > 10 * len(small)


def test_mixes_keep_their_limits_and_are_what_their_text_says() -> None:
    chance = Random(0)
    mixes = [random_mix(chance) for _ in range(200)]
    mixes += [changed(mix, mixes, chance) for mix in mixes]
    for mix in mixes:
        assert 1 <= len(mix) <= MAX_STREAMS
        assert 1 <= sum(stream.num_connections for stream in mix) <= MAX_CONNECTIONS
        assert read(write(mix)) == mix
    assert {stream.kind for mix in mixes for stream in mix} == set(KINDS)
    assert {stream.manner for mix in mixes for stream in mix} == set(MANNERS)


@pytest.mark.parametrize("text", ["cut-text", "no-kind@1.00x4/reads", "cut-text@1.00x4/sings"])
def test_a_text_that_is_no_mix_is_an_error(text: str) -> None:
    with pytest.raises(BenchmarkError, match="is no stream; one is like"):
        read(text)


def trial_of(mix: Mix, wait_s: float, *, status: int = 200, memory_mb: float = 200.0) -> Trial:
    return Trial(
        mix=mix,
        wait_s=wait_s,
        median_s=wait_s / 2,
        statuses=Counter({status: 10}),
        num_sent=1,
        memory_mb=memory_mb,
    )


def searched(*trials: Trial, end_mb: float = 200.0) -> Search:
    return Search(alone_s=0.1, start_mb=150.0, warm_mb=200.0, end_mb=end_mb, trials=list(trials))


MIX = (Stream(kind="cut-text"),)


def test_a_long_wait_a_lost_reply_and_growth_are_failures() -> None:
    assert failures(searched(trial_of(MIX, 1.0), trial_of(MIX, 1.09))) == []
    (late,) = failures(searched(trial_of(MIX, 0.2), trial_of(MIX, 1.2)))
    assert late == "the small caller waited 1.20 s beside cut-text@1.00x4/reads"
    (lost,) = failures(searched(trial_of(MIX, 0.2, status=0)))
    assert lost.startswith("the small caller got {0: 10} beside")
    assert failures(searched(trial_of(MIX, 0.2, memory_mb=300.0), end_mb=209.0)) == []
    (grown,) = failures(searched(trial_of(MIX, 0.2), end_mb=215.0))
    assert grown == "the memory grew by 7.5%"
    text = report(searched(trial_of(MIX, 1.2, memory_mb=300.0), end_mb=215.0))
    assert "| `cut-text@1.00x4/reads` | 1.20 | 0.60 |" in text
    assert "most after a mix: 300 MB; at rest after the search: 215 MB; growth +7.5%" in text


def test_the_search_begins_with_its_first_mixes_and_changes_the_worst() -> None:
    chance, first = Random(0), [MIX, (Stream(kind="names"),)]
    tried = Search(alone_s=0.1, start_mb=150.0, warm_mb=200.0, first=first)
    for wait_s in (0.2, 0.9):
        mix = tried.next_mix(chance)
        assert mix == first[len(tried.trials)]
        tried.trials.append(trial_of(mix, wait_s))
    assert tried.worst[0].mix == first[1]
    assert any("names" in write(tried.next_mix(chance)) for _ in range(50))
