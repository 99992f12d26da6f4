"""Both clients, of the running service and of those whose replies a test decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest

from tests.albert_serve.client.twins import KINDS, Twin, open_twin, replying_twin
from tests.albert_serve.support import Running


@pytest.fixture(scope="module", params=KINDS)
def albert(request: pytest.FixtureRequest, service: Running) -> Iterator[Any]:
    """A client of the running service."""
    twin = open_twin(request.param, service.url)
    yield twin
    twin.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def twin(kind: str) -> Iterator[Callable[..., Twin]]:
    """Makes clients."""
    with ExitStack() as opened:
        yield lambda *args, **options: opened.enter_context(
            closing(open_twin(kind, *args, **options))
        )


@pytest.fixture
def replying(kind: str) -> Iterator[Callable[..., tuple[Twin, list[httpx.Request]]]]:
    """Makes clients of a service that gives these responses in turn, and what it is asked."""
    with ExitStack() as opened:

        def make(
            *responses: httpx.Response | Exception, **options: Any
        ) -> tuple[Twin, list[httpx.Request]]:
            client, received = replying_twin(kind, *responses, **options)
            return opened.enter_context(closing(client)), received

        yield make
