"""Clients of the running service, and of those whose replies a test decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from albert_serve.client import AlbertClient
from tests.albert_serve.client.twins import KINDS, URL, Answer, Scripted, Twin, orders
from tests.albert_serve.support import Running


@pytest.fixture(scope="module")
def albert(service: Running) -> Iterator[AlbertClient]:
    """A client of the running service."""
    with AlbertClient(service.url) as client:
        yield client


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def twin(kind: str) -> Iterator[Callable[..., Twin]]:
    """Makes clients of either kind."""
    with ExitStack() as opened:
        yield lambda *args, **options: opened.enter_context(closing(Twin(kind, *args, **options)))


@pytest.fixture
def scripted(kind: str, twin: Callable[..., Twin]) -> Callable[..., tuple[Twin, Scripted]]:
    """Makes a service that gives the replies of a function, and a client of either kind for it."""

    def make(answer: Answer = orders, max_items: int = 1, **options: Any) -> tuple[Twin, Scripted]:
        service = Scripted(answer, max_items)
        return twin(URL, http_client=service.http_client(kind), **options), service

    return make
