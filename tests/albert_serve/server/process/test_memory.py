"""Memory that requests have freed is returned to the system."""

from __future__ import annotations

import asyncio
import sys

import pytest

from albert_serve.server.process import memory
from albert_serve.server.process.memory import keep_memory_low, num_anonymous_bytes

MB = 1 << 20
WITHIN_S = 20.0


def held_mb() -> float:
    num_bytes = num_anonymous_bytes()
    assert num_bytes is not None
    return num_bytes / MB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CHECK_EVERY_S", 0.05)

    async def run() -> None:
        returning = asyncio.create_task(keep_memory_low())
        await asyncio.sleep(0)
        before_mb = held_mb()
        blocks = [b"1" * 60_000 for _ in range(2000)]  # which malloc keeps, unlike larger ones
        last = blocks[-1]
        del blocks
        assert held_mb() > before_mb + 50
        async with asyncio.timeout(WITHIN_S):
            while held_mb() > before_mb + 16:
                await asyncio.sleep(0.01)
        assert last
        returning.cancel()

    asyncio.run(run())
