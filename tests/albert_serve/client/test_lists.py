"""Long lists: the parts in which they are sent, and the errors of their items."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from albert_serve.api import wire
from albert_serve.api.schemas import (
    Order,
)
from albert_serve.errors import (
    BodyTooLargeError,
    InvalidInputError,
    NoMaskError,
    RequestError,
)
from tests.albert_serve.client.replying import Replying, refusal
from tests.albert_serve.support import MAX_BODY_BYTES, MAX_ITEMS


def limits(max_items: int, max_body_bytes: int = 10**6) -> httpx.Response:
    body = {
        "model_id": "m",
        "version": "0",
        "precision": "fp32",
        "tasks": [],
        "max_positions": 128,
        "mask_token": "[MASK]",
        "max_items": max_items,
        "max_body_bytes": max_body_bytes,
    }
    return httpx.Response(200, json=body)


def orders(*shares: float) -> httpx.Response:
    return httpx.Response(200, json=[{"in_order": share} for share in shares])


def pairs(num_pairs: int, length: int = 1) -> list[dict[str, str]]:
    return [{"text": str(number), "text_pair": "b" * length} for number in range(num_pairs)]


def sent(request: httpx.Request) -> list[int]:
    """The numbers of the `pairs` in a request."""
    return [int(item["text"]) for item in json.loads(request.content)["inputs"]]


def shares(result: list[Order]) -> list[float]:
    return [one.in_order for one in result]


def test_a_long_list_goes_in_parts_that_the_service_takes(replying: Replying) -> None:
    client, received = replying(
        limits(2), orders(0, 0.1), orders(0.2, 0.3), orders(0.4), orders(1, 1)
    )
    assert shares(client.sentence_order(pairs(5))) == [0, 0.1, 0.2, 0.3, 0.4]
    assert [request.url.path for request in received] == ["/info", *["/sentence-order"] * 3]
    assert [sent(request) for request in received[1:]] == [[0, 1], [2, 3], [4]]
    client.sentence_order(pairs(2))
    assert len(received) == 5  # the limits are known now


def test_parts_keep_to_the_limit_of_bytes(replying: Replying) -> None:
    client, received = replying(limits(100, 300), orders(0, 0), orders(0, 0), orders(0))
    client.sentence_order(pairs(5, length=80), truncation=True)
    assert [sent(request) for request in received[1:]] == [[0, 1], [2, 3], [4]]
    assert all(len(request.content) <= 300 for request in received[1:])


def test_an_item_over_the_limit_of_bytes_goes_alone(replying: Replying) -> None:
    client, received = replying(limits(100, 50), orders(0), refusal(413, "body_too_large"))
    with pytest.raises(BodyTooLargeError, match=r"^inputs\[1\]: "):
        client.sentence_order(pairs(2, length=80))
    assert [sent(request) for request in received[1:]] == [[0], [1]]


def test_a_list_that_is_too_much_at_once_is_halved(replying: Replying) -> None:
    too_much = refusal(422, "too_much_at_once")
    client, received = replying(
        limits(100), too_much, too_much, orders(0.1), orders(0.2), orders(0.3, 0.4)
    )
    assert shares(client.sentence_order(pairs(4))) == [0.1, 0.2, 0.3, 0.4]
    assert [sent(request) for request in received[1:]] == [[0, 1, 2, 3], [0, 1], [0], [1], [2, 3]]


def test_one_item_that_is_too_much_is_an_error(replying: Replying) -> None:
    client, _ = replying(limits(100), *[refusal(422, "too_much_at_once")] * 2)
    with pytest.raises(InvalidInputError, match=r"^inputs\[0\]: no$"):
        client.sentence_order(pairs(2))


def test_an_item_that_is_refused_has_its_number_in_the_whole_list(replying: Replying) -> None:
    refused = httpx.Response(
        422, json={"error": "inputs[1]: bad", "error_type": "no_mask", "request_id": "r7"}
    )
    client, _ = replying(limits(2), orders(0, 0), refused)
    with pytest.raises(NoMaskError, match=r"^inputs\[3\]: bad$") as caught:
        client.sentence_order(pairs(4))
    assert caught.value.request_id == "r7"


@pytest.mark.parametrize("replying", ["sync"], indirect=True)  # 65,536 items take seconds
def test_a_list_may_be_longer_than_any_request(replying: Replying) -> None:
    most = wire.MAX_ITEMS
    responses = [limits(most, 1 << 30), orders(*[0] * most), orders(1, 1)]
    client, received = replying(*responses, timeout_s=600.0)
    result = client.sentence_order(pairs(most + 2))
    assert shares(result) == [0] * most + [1, 1]
    assert [len(sent(request)) for request in received[1:]] == [most, 2]
    with pytest.raises(InvalidInputError, match=rf"^inputs\[{most + 1}\]\.text_pair"):
        client.sentence_order([*pairs(most + 1), {"text": "a"}])


def test_a_service_that_does_not_tell_its_limits_gets_the_whole_list(replying: Replying) -> None:
    client, received = replying(httpx.Response(404), orders(0, 0, 0))
    assert len(client.sentence_order(pairs(3))) == 3
    assert sent(received[1]) == [0, 1, 2]


def test_a_short_list_needs_no_limits(replying: Replying) -> None:
    client, received = replying(orders(0.5), httpx.Response(200, json=[]))
    assert shares(client.sentence_order(pairs(1))) == [0.5]
    assert [request.url.path for request in received] == ["/sentence-order"]
    with pytest.raises(InvalidInputError, match="must hold at least one item"):
        client.sentence_order([])


def test_long_lists_against_the_running_service(albert: Any) -> None:
    texts = [f"The {'e ' * (number % 40)}[MASK] was born." for number in range(2 * MAX_ITEMS + 3)]
    result = albert.fill_mask(texts, top_k=1)
    assert len(result) == len(texts)
    for number in (0, MAX_ITEMS - 1, MAX_ITEMS, 2 * MAX_ITEMS + 2):
        [alone] = albert.fill_mask(texts[number], top_k=1)
        assert result[number][0].token == alone.token
    texts[MAX_ITEMS + 2] = "nothing"
    with pytest.raises(NoMaskError, match=rf"^inputs\[{MAX_ITEMS + 2}\]: the text has no"):
        albert.fill_mask(texts)
    large = ["word " * (MAX_BODY_BYTES // 50)] * 12
    assert len(albert.text_classification(large, truncation=True)) == 12


@pytest.mark.parametrize("num_answers", [0, 1, 9])
def test_inputs_and_answers_are_as_many(num_answers: int, replying: Replying) -> None:
    answers = orders(*[0.5] * num_answers)
    client, _ = replying(limits(100), answers)
    with pytest.raises(RequestError, match=f"to 3 inputs with {num_answers} answers"):
        client.sentence_order(pairs(3))
    if num_answers != 1:
        client, _ = replying(answers)
        with pytest.raises(RequestError, match=f"to 1 inputs with {num_answers} answers"):
            client.sentence_order(pairs(1))
