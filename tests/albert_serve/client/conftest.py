"""Clients of the running service, and of fake services."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from albert_serve.client import AlbertClient
from tests.albert_serve.client.support import (
    URL,
    Answer,
    AnyClient,
    FakeService,
    MakeClient,
    MakeService,
    answer_pairs,
)
from tests.albert_serve.support import RunningService


@pytest.fixture(scope="module")
def albert(service: RunningService) -> Iterator[AlbertClient]:
    """A client of the running service."""
    with AlbertClient(service.url) as client:
        yield client


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of client: sync or async."""
    return str(request.param)


@pytest.fixture
def make_client(kind: str) -> Iterator[MakeClient]:
    """A function that opens a sync or async client."""
    with ExitStack() as clients:
        yield lambda *args, **options: clients.enter_context(
            closing(AnyClient(kind, *args, **options))
        )


@pytest.fixture
def fake_service(kind: str, make_client: MakeClient) -> MakeService:
    """A function that returns a client of a new fake service, and the service."""

    def make(answer: Answer = answer_pairs, max_items: int = 1, **options: Any) -> Any:
        service = FakeService(answer, max_items)
        return make_client(URL, http_client=service.http_client(kind), **options), service

    return make
