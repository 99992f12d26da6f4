"""The types of the client, which `make check` tests: nothing here runs, but the last."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import assert_type

import numpy as np

from albert_serve.api.schemas import Coherence, InfoReply, LabelScore, Order
from albert_serve.client import AlbertClient, AsyncAlbertClient
from albert_serve.errors import RequestError
from tests.albert_serve.support import ROOT


def check_sync(albert: AlbertClient, rows: Iterator[str]) -> None:
    assert_type(albert.text_classification("a film", top_k=1), list[LabelScore])
    assert_type(albert.text_classification(["a film", "another"]), list[list[LabelScore]])
    assert_type(albert.text_classification(np.array(["a film"])), list[list[LabelScore]])
    with albert.text_classification_stream(rows, truncation=True) as answers:
        for answer in answers:
            assert_type(answer, list[LabelScore])
    for order in albert.sentence_order_stream([{"text": "a", "text_pair": "b"}]).with_errors():
        assert_type(order, Order | RequestError)
    assert_type(albert.info(), InfoReply)
    assert_type(albert.health(), bool)
    albert.wait_until_ready(timeout_s=5)


async def check_async(albert: AsyncAlbertClient, rows: AsyncIterator[list[str]]) -> None:
    assert_type(await albert.sentence_order({"text": "a", "text_pair": "b"}), Order)
    async with albert.coherence_stream(rows) as answers:
        async for answer in answers:
            assert_type(answer, Coherence)
    async for answer_or_error in albert.coherence_stream([["a", "b"]]).with_errors():
        assert_type(answer_or_error, Coherence | RequestError)
    await albert.wait_until_ready()
    assert_type(await albert.info(), InfoReply)


def check_that_wrong_uses_are_found(albert: AlbertClient) -> None:
    albert.text_classification_stream(["a"], topk=1)  # type: ignore[call-arg]
    albert.sentence_order_stream(["a"])  # type: ignore[list-item]
    label: int = albert.text_classification("a")[0].label  # type: ignore[assignment]
    for answer in albert.text_classification_stream(["a"]).with_errors():
        answer[label]  # type: ignore[index]


def test_checkers_read_the_types_of_the_installed_package() -> None:
    """As PEP 561 has it."""
    assert (ROOT / "albert_serve/py.typed").is_file()
