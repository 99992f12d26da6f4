"""Clients of the running service, and of those whose replies a test decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from albert_serve.client import AlbertClient
from tests.albert_serve.client.twins import KINDS, Twin
from tests.albert_serve.support import Running


@pytest.fixture(scope="module")
def albert(service: Running) -> Iterator[AlbertClient]:
    """A client of the running service."""
    with AlbertClient(service.url) as client:
        yield client


@pytest.fixture(params=KINDS)
def twin(request: pytest.FixtureRequest) -> Iterator[Callable[..., Twin]]:
    """Makes clients of either kind."""
    with ExitStack() as opened:
        yield lambda *args, **options: opened.enter_context(
            closing(Twin(request.param, *args, **options))
        )
