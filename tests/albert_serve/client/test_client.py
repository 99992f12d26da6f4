"""The methods of both clients against the running service, and their signatures."""

from __future__ import annotations

import inspect
import logging
import re
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, get_overloads, get_type_hints

import httpx
import pytest
from pydantic import BaseModel

from albert_serve.api import schemas
from albert_serve.api.embeddings import FeatureExtractionParameters
from albert_serve.api.schemas import (
    Answer,
    Coherence,
    FilledMasks,
    FilledTarget,
    LabelScore,
    Order,
    QuestionContext,
    TextInput,
    TextPair,
)
from albert_serve.client import AlbertClient, AsyncAlbertClient, requests
from albert_serve.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidInputError,
    NoMaskError,
    NotReadyError,
    TextTooLongError,
)
from tests.albert_serve.client.replying import URL
from tests.albert_serve.support import MAX_ITEMS, Running

QUESTION = {"question": "Who?", "context": "Marcel Proust was a French novelist."}


def assert_same(result: Sequence[BaseModel], expected: Sequence[BaseModel]) -> None:
    """Compare with a tolerance: the last digits depend on the batch."""
    for one, other in zip(result, expected, strict=True):
        assert type(one) is type(other)
        assert one.model_dump() == pytest.approx(other.model_dump(), abs=1e-5)


def test_fill_mask(albert: Any) -> None:
    result = albert.fill_mask("The [MASK] was born.", top_k=3)
    assert [type(item) for item in result] == [schemas.FilledToken] * 3
    assert_same(albert.fill_mask(["The [MASK] was born."], top_k=3)[0], result)
    assert [len(tokens) for tokens in albert.fill_mask("[MASK] and [MASK]", top_k=2)] == [2, 2]
    [only] = albert.fill_mask("a [MASK]", targets=["▁the"])
    assert only.sequence == "a the"


def test_text_classification(albert: Any) -> None:
    result = albert.text_classification("a film")
    assert [type(item) for item in result] == [LabelScore] * 2
    for again in albert.text_classification(["a film", {"text": "a film"}]):
        assert_same(again, result)
    assert_same(albert.text_classification(TextInput(text="a film"), top_k=1), result[:1])


def test_question_answering(albert: Any) -> None:
    result = albert.question_answering(QUESTION)
    assert isinstance(result, Answer)
    assert QUESTION["context"][result.start : result.end] == result.answer
    assert_same(albert.question_answering([QuestionContext.model_validate(QUESTION)]), [result])
    assert_same(albert.question_answering(QUESTION, top_k=2)[:1], [result])


def test_sentence_order(albert: Any) -> None:
    pair = {"text": "It rained.", "text_pair": "We stayed in."}
    result = albert.sentence_order(pair)
    assert isinstance(result, Order)
    assert_same(albert.sentence_order([TextPair.model_validate(pair)] * 2), [result, result])


def test_coherence(albert: Any) -> None:
    sentences = ["It rained.", "We stayed in.", "We played cards."]
    result = albert.coherence(sentences)
    assert type(result) is Coherence
    assert [(pair.first, pair.second) for pair in result.pairs] == [(0, 1), (1, 2)]
    first, _ = albert.coherence([sentences, sentences[:2]])
    assert first.coherence == pytest.approx(result.coherence, abs=1e-5)


def test_reorder(albert: Any) -> None:
    sentences = ["It rained.", "We stayed in.", "We played cards."]
    result = albert.reorder(sentences)
    assert sorted(result.best_order) == [0, 1, 2]
    assert result.best_coherence >= result.coherence
    assert len(result.pairs) == 6
    [only] = albert.reorder([sentences])
    assert only.best_order == result.best_order


def test_feature_extraction(albert: Any) -> None:
    texts = ["It rained.", "We stayed in, and played cards."]
    first, second = albert.feature_extraction(texts)
    assert len(first) == len(second) == 64
    assert albert.feature_extraction(texts[1]) == pytest.approx(second, abs=1e-5)
    unit = albert.feature_extraction(texts[1], pooling="cls", normalize=True)
    assert sum(number**2 for number in unit) == pytest.approx(1)
    long = albert.feature_extraction("word " * 300, truncate=True, truncation_direction="left")
    assert len(long) == 64


def test_token_features(albert: Any) -> None:
    text = "We stayed in."
    tokens = albert.token_features(text)
    means = [sum(column) / len(tokens) for column in zip(*tokens, strict=True)]
    assert means == pytest.approx(albert.feature_extraction(text), abs=1e-5)
    assert albert.feature_extraction(text, pooling="cls") == pytest.approx(tokens[0], abs=1e-5)
    first, second = albert.token_features([text, "It rained."], normalize=True)
    assert len(first) == len(tokens)
    assert sum(number**2 for number in second[-1]) == pytest.approx(1)


def test_fill_mask_jointly(albert: Any) -> None:
    text = "The [MASK] was [MASK] ."
    result = albert.fill_mask_jointly(text, top_k=3)
    assert [type(item) for item in result] == [FilledMasks] * 3
    assert all(len(item.tokens) == 2 for item in result)
    [again] = albert.fill_mask_jointly([text], top_k=3)
    assert [item.tokens for item in again] == [item.tokens for item in result]


def test_score_targets(albert: Any) -> None:
    targets = ["▁the", "encyclopedic", "of", "in", "was", "born", "he"]
    result = albert.score_targets("a [MASK]", targets)
    assert [type(item) for item in result] == [FilledTarget] * len(targets)
    assert max(len(item.tokens) for item in result) > 1
    [[one]] = albert.score_targets(["a [MASK]"], targets, top_k=1)
    assert one.tokens == result[0].tokens
    first, _ = albert.score_targets("[MASK] a [MASK]", targets)
    assert len(first) == len(targets)


def test_info(albert: Any) -> None:
    info = albert.info()
    assert info.mask_token == "[MASK]"
    assert {task.name for task in info.tasks} >= {"fill-mask", "question-answering"}
    assert (info.card.sizes.num_layers, info.card.sizes.hidden_size) == (3, 64)
    first, *lines = str(info).splitlines()
    assert first == f"{info.model_id}: an ALBERT in fp32, revision {info.revision}"
    assert "  text-classification (negative, positive)" in lines
    assert lines[0].startswith(f"sizes: {info.card.sizes.num_parameters:,} parameters in ")


def test_a_refusal_raises_the_services_error_with_its_id(albert: Any) -> None:
    with pytest.raises(NoMaskError, match=r"\[MASK\]") as caught:
        albert.fill_mask("nothing")
    assert caught.value.request_id
    with pytest.raises(TextTooLongError, match="at most 128"):
        albert.text_classification("word " * 300)


def test_warnings_of_a_reply_are_logged(albert: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "albert_serve.client.transport"):
        albert.fill_mask("a [MASK]", targets="supervolcanoes")
        albert.text_classification("word " * 300, truncation=True)
    assert "its first piece" in caplog.messages[0]
    assert re.search(r'\d+ tokens were cut off \{"inputs": \d+\}$', caplog.messages[1])


def test_a_cut_in_a_part_of_a_list_is_logged_with_the_callers_index(
    albert: Any, caplog: pytest.LogCaptureFixture
) -> None:
    number = MAX_ITEMS + 3
    texts = [*["a film"] * number, "word " * 300]
    with caplog.at_level(logging.WARNING, "albert_serve.client.transport"):
        albert.text_classification(texts, truncation=True)
    [message] = caplog.messages
    assert re.search(rf'tokens were cut off \{{"inputs\[{number}\]": \d+\}}$', message)


def test_a_wrong_option_is_refused_before_sending() -> None:
    with AlbertClient("http://127.0.0.1:1") as client:
        with pytest.raises(InvalidInputError, match="'topk' is not known"):
            client.fill_mask("a [MASK]", topk=3)  # type: ignore[call-overload]
        with pytest.raises(InvalidInputError, match=r"inputs\[1\].context is missing"):
            client.question_answering([QUESTION, {"question": "q"}])


def test_an_unreachable_service_is_reported_with_its_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with (
            AlbertClient(url) as client,
            pytest.raises(NotReadyError, match=f"cannot reach {url}.*is the service running"),
        ):
            client.info()


def test_a_service_that_never_replies_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            AlbertClient(url, timeout_s=0.2) as client,
            pytest.raises(DeadlineExceededError, match=r"within 0.2 s"),
        ):
            client.info()


@pytest.mark.parametrize(
    ("base_url", "options", "message"),
    [
        ("localhost:3000", {}, "must begin with http"),
        ("http://", {}, "and a host"),
        ("http://[::1", {}, "and a host"),
        ("http://a:port", {}, "and a host"),
        (URL, {"timeout_s": 0.0}, "timeout_s is 0.0"),
        (URL, {"timeout_s": float("nan")}, "timeout_s is nan"),
        (URL, {"num_retries": -1}, "num_retries is -1"),
        (URL, {"max_concurrency": 0}, "max_concurrency is 0"),
        (URL, {"max_reply_bytes": 0}, "max_reply_bytes is 0"),
        (URL, {"api_key": "a\nb"}, "is it whole"),
        (URL, {"api_key": "ключ"}, "is it whole"),
        (URL, {"api_key": "a "}, "begins or ends with a space"),
    ],
)
def test_invalid_shared_options_are_refused(
    base_url: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        AlbertClient(base_url, **options)


# The beginning of a gzip file, and a block of it that holds nothing.


def test_the_callers_http_client_stays_open() -> None:
    http = httpx.Client()
    with AlbertClient(URL, http_client=http):
        pass
    assert not http.is_closed
    http.close()


def test_many_threads_share_a_client(service: Running) -> None:
    with AlbertClient(service.url) as client:
        result: list[Any] = []
        threads = [
            threading.Thread(target=lambda: result.append(client.fill_mask("a [MASK]")))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # Which requests share a batch differs, and with it the last digit.
    assert [[one.token for one in answer] for answer in result] == [
        [one.token for one in result[0]]
    ] * 8


def public_methods(kind: type) -> dict[str, Callable[..., Any]]:
    return {
        name: one
        for base in kind.__mro__
        for name, one in vars(base).items()
        if not name.startswith("_") and inspect.isfunction(one)
    }


def test_the_twins_have_the_same_methods_in_the_same_order() -> None:
    sync, asynchronous = public_methods(AlbertClient), public_methods(AsyncAlbertClient)
    assert [name.removeprefix("a") for name in asynchronous] == list(sync)
    for name, one, twin in zip(sync, sync.values(), asynchronous.values(), strict=True):
        assert one.__doc__ == twin.__doc__
        if name.endswith("_stream"):
            assert list(inspect.signature(one).parameters) == [*inspect.signature(twin).parameters]
            continue
        assert inspect.iscoroutinefunction(twin)
        assert inspect.signature(one) == inspect.signature(twin)
        assert [inspect.signature(item) for item in get_overloads(one)] == [
            inspect.signature(item) for item in get_overloads(twin)
        ]


def test_each_method_that_takes_inputs_has_a_stream_with_its_options() -> None:
    methods = public_methods(AlbertClient)
    others = {"close", "info", "health", "wait_until_ready"}
    answering = {name for name in methods if not name.endswith("_stream")} - others
    assert {f"{name}_stream" for name in answering} == set(methods) - answering - others
    for name in answering:
        _, _, *options = inspect.signature(methods[name]).parameters.values()
        _, rows, *streamed = inspect.signature(methods[f"{name}_stream"]).parameters.values()
        assert rows.name == "rows"
        assert streamed == options


@pytest.mark.parametrize(
    ("options", "parameters", "implied"),
    [
        (requests.FillMaskOptions, schemas.FillMaskParameters, {"joint", "multi_token_targets"}),
        (
            requests.ScoreTargetsOptions,
            schemas.FillMaskParameters,
            {"joint", "multi_token_targets", "targets"},
        ),
        (requests.TextClassificationOptions, schemas.TextClassificationParameters, set()),
        (requests.QuestionAnsweringOptions, schemas.QuestionAnsweringParameters, set()),
        (requests.SentenceOrderOptions, schemas.SentenceOrderParameters, {"reorder"}),
        (requests.FeatureExtractionOptions, FeatureExtractionParameters, set()),
        (requests.TokenFeaturesOptions, FeatureExtractionParameters, {"pooling"}),
    ],
)
def test_the_options_are_the_parameters_that_the_method_leaves_open(
    options: type, parameters: Any, implied: set[str]
) -> None:
    assert set(get_type_hints(options)) == set(parameters.model_fields) - implied
