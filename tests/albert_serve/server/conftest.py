"""Clients of the service's routes in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.albert_serve.support import local_http


@pytest.fixture(scope="session")
def local(bundle_dir: Path) -> Iterator[httpx.Client]:
    """The small model, with the default limits."""
    with local_http(bundle_dir) as http:
        yield http
