"""Clients of a model in this process answer as those of a service, and leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from albert_serve.client import AlbertClient, AsyncAlbertClient
from albert_serve.errors import (
    AlbertServeError,
    BundleCorruptError,
    BundleMissingError,
    ConfigError,
    DeadlineExceededError,
    NoMaskError,
)
from albert_serve.runtime.engine import Engine
from tests.albert_serve.support import ROOT, Running

SENTENCES = ["It rained.", "We stayed in.", "We played cards."]
PAIR = {"text": "It rained.", "text_pair": "We stayed in."}
QUESTION = {"question": "Who?", "context": "Marcel Proust was a French novelist."}
MASKED = "The [MASK] was born."
LONG = "a long text " * 100
LOCAL_LIMITS = {"max_items", "max_body_bytes"}  # the tests' service has others

Call = Callable[[Any], Any]
ANSWERED: dict[str, Call] = {
    "fill_mask": lambda albert: albert.fill_mask([MASKED, "[MASK] and [MASK]"], top_k=3),
    "jointly": lambda albert: albert.fill_mask_jointly("[MASK] and [MASK]", top_k=2),
    "targets": lambda albert: albert.score_targets(MASKED, ["the", "a house"]),
    "classification": lambda albert: albert.text_classification("a film", top_k=1),
    "pairs": lambda albert: albert.text_classification([PAIR, {"text": "a film"}]),
    "question": lambda albert: albert.question_answering(QUESTION, top_k=2),
    "order": lambda albert: albert.sentence_order([PAIR, PAIR]),
    "coherence": lambda albert: albert.coherence(SENTENCES),
    "reorder": lambda albert: albert.reorder(SENTENCES),
    "embeddings": lambda albert: albert.feature_extraction(SENTENCES, normalize=True),
    "tokens": lambda albert: albert.token_features("a film"),
    "cut": lambda albert: albert.text_classification(LONG, truncation=True),
    "many": lambda albert: albert.text_classification(["a film"] * 50),
    "health": lambda albert: [albert.health(), albert.wait_until_ready(5)],
}
REFUSED: dict[str, Call] = {
    "no mask": lambda albert: albert.fill_mask([MASKED, "no mask"]),
    "too long": lambda albert: albert.text_classification(LONG),
    "no such option": lambda albert: albert.fill_mask(MASKED, top=3),
    "no such task": lambda albert: albert.multiple_choice({"context": "a", "choices": ["b", "c"]}),
    "no text": lambda albert: albert.question_answering({"question": "", "context": ""}),
    "sentences": lambda albert: albert.coherence(["only one"]),
}


class Awaited:
    """The asynchronous client as if it were the other."""

    def __init__(self, bundle: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = AsyncAlbertClient.local(bundle, num_threads=1)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        return lambda *args, **options: self._loop.run_until_complete(method(*args, **options))

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()


@pytest.fixture(scope="module", params=["sync", "async"])
def local(request: pytest.FixtureRequest, bundle_dir: Path) -> Iterator[Any]:
    client: Any = (
        AlbertClient.local(bundle_dir, num_threads=1)
        if request.param == "sync"
        else Awaited(bundle_dir)
    )
    yield client
    client.close()


@pytest.fixture(scope="module")
def remote(service: Running) -> Iterator[AlbertClient]:
    with AlbertClient(service.url) as client:
        yield client


def plain(value: Any) -> Any:
    """The values of a result, those of objects by name."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.model_dump() if hasattr(value, "model_dump") else value


def flat(value: Any) -> Iterator[Any]:
    """The values without their nesting; names and lengths are values, too."""
    if isinstance(value, dict):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, list):
        yield len(value)
        for item in value:
            yield from flat(item)
    else:
        yield pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


@pytest.mark.parametrize("name", ANSWERED)
def test_answers_are_those_of_the_service(name: str, local: Any, remote: AlbertClient) -> None:
    """With a tolerance: the last digits depend on the batch."""
    result, expected = ANSWERED[name](local), ANSWERED[name](remote)
    assert type(result) is type(expected)
    assert list(flat(plain(result))) == list(flat(plain(expected)))


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_those_of_the_service(name: str, local: Any, remote: AlbertClient) -> None:
    errors = []
    for client in (local, remote):
        with pytest.raises(AlbertServeError) as raised:
            REFUSED[name](client)
        errors.append(raised.value)
    assert type(errors[0]) is type(errors[1])
    assert str(errors[0]) == str(errors[1])


def test_the_description_is_that_of_the_service(local: Any, remote: AlbertClient) -> None:
    described = local.info().model_dump(exclude=LOCAL_LIMITS)
    assert described == remote.info().model_dump(exclude=LOCAL_LIMITS)
    assert described["model_id"] == "tiny"


def test_no_call_is_refused_because_of_others(bundle_dir: Path) -> None:
    """More tokens than a service's queue holds, from more callers than it answers at once."""
    texts = [LONG] * 10

    async def ask() -> list[Any]:
        async with AsyncAlbertClient.local(bundle_dir, num_threads=1) as albert:
            calls = [albert.text_classification(texts, truncation=True) for _ in range(150)]
            return await asyncio.gather(*calls)

    answers = asyncio.run(ask())
    assert {len(answer) for answer in answers} == {len(texts)}


def test_many_threads_share_a_client(bundle_dir: Path) -> None:
    with AlbertClient.local(bundle_dir, num_threads=1) as albert, ThreadPoolExecutor(16) as threads:
        texts = [f"film {number}" for number in range(64)]
        answers = list(threads.map(albert.text_classification, texts))
        expected = albert.text_classification(texts)
    assert list(flat(plain(answers))) == list(flat(plain(expected)))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Gate]]:
    """Makes engines wait from now on; returns what lets them go on."""
    made = Gate()
    run_batch = Engine.run_batch

    def wait(engine: Engine, inputs: Any) -> Any:
        made.is_reached.set()
        assert made.is_open.wait(60)
        return run_batch(engine, inputs)

    def close() -> Gate:
        monkeypatch.setattr(Engine, "run_batch", wait)
        return made

    yield close
    made.is_open.set()


class Gate:
    """Where a batch waits."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.is_open = threading.Event()


def test_a_call_ends_with_its_time(bundle_dir: Path, gate: Callable[[], Gate]) -> None:
    with AlbertClient.local(bundle_dir, num_threads=1, timeout_s=0.2) as albert:
        held = gate()
        with pytest.raises(DeadlineExceededError, match=r"0\.2"):
            albert.text_classification("a film")
        held.is_open.set()


def test_an_interrupted_call_leaves_the_client_usable(
    bundle_dir: Path, gate: Callable[[], Gate]
) -> None:
    with AlbertClient.local(bundle_dir, num_threads=1) as albert:
        held = gate()

        def interrupt() -> None:
            held.is_reached.wait(60)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            albert.text_classification("a film")
        thread.join()
        held.is_open.set()
        assert len(albert.text_classification("a film")) == 2


def test_a_cancelled_call_leaves_the_client_usable(
    bundle_dir: Path, gate: Callable[[], Gate]
) -> None:
    async def ask() -> Any:
        async with AsyncAlbertClient.local(bundle_dir, num_threads=1) as albert:
            held = gate()
            call = asyncio.ensure_future(albert.text_classification("a film"))
            await asyncio.to_thread(held.is_reached.wait, 60)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            held.is_open.set()
            return await albert.text_classification("a film")

    assert len(asyncio.run(ask())) == 2


def test_closing_answers_what_is_in_progress(bundle_dir: Path, gate: Callable[[], Gate]) -> None:
    albert = AlbertClient.local(bundle_dir, num_threads=1)
    held = gate()
    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(albert.text_classification, "a film")
        assert held.is_reached.wait(60)
        closing = threads.submit(albert.close)
        assert not closing.done()
        held.is_open.set()
        assert len(answer.result(60)) == 2
        closing.result(60)


def test_a_stream_is_answered_as_a_list(bundle_dir: Path) -> None:
    texts = [f"film {number}" for number in range(100)]
    with AlbertClient.local(bundle_dir, num_threads=1) as albert:
        streamed = list(albert.text_classification_stream(iter(texts)))
        expected = albert.text_classification(texts)
        errors = list(albert.fill_mask_stream([MASKED, "no mask", MASKED]).with_errors())
    assert list(flat(plain(streamed))) == list(flat(plain(expected)))
    assert [isinstance(one, NoMaskError) for one in errors] == [False, True, False]

    async def ask() -> list[Any]:
        async with AsyncAlbertClient.local(bundle_dir, num_threads=1) as albert:
            return [answer async for answer in albert.text_classification_stream(texts)]

    assert list(flat(plain(asyncio.run(ask())))) == list(flat(plain(expected)))


def test_a_client_serves_several_event_loops(bundle_dir: Path) -> None:
    albert = AsyncAlbertClient.local(bundle_dir, num_threads=1)
    first, second = (asyncio.run(albert.text_classification("a film")) for _ in range(2))
    asyncio.run(albert.aclose())
    assert plain(first) == plain(second)


def local_threads() -> int:
    return sum(thread.name == "albert-local" for thread in threading.enumerate())


def test_several_are_open_at_once_and_each_is_freed(
    bundle_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[weakref.ref[Engine]] = []
    warm_up = Engine.warm_up

    def keep(engine: Engine) -> None:
        engines.append(weakref.ref(engine))
        warm_up(engine)

    monkeypatch.setattr(Engine, "warm_up", keep)
    before = local_threads()
    first = AlbertClient.local(bundle_dir, num_threads=1)
    forgotten = AlbertClient.local(bundle_dir, num_threads=1)
    assert plain(first.text_classification("a")) == plain(forgotten.text_classification("a"))
    assert local_threads() == before + 2

    first.close()
    first.close()
    gc.collect()
    assert [engine() is None for engine in engines] == [True, False]
    assert forgotten.info().model_id == "tiny"
    with pytest.raises(RuntimeError, match="closed"):
        first.info()

    [thread] = [each for each in threading.enumerate() if each.name == "albert-local"][before:]
    del forgotten
    gc.collect()
    thread.join(timeout=60)
    gc.collect()
    assert engines[1]() is None


STATE = """
import json, logging, os, signal, sys, threading
sys.path.insert(0, {root!r})
import albert_serve.client as clients

def state():
    handlers = {{str(one): str(signal.getsignal(one)) for one in signal.valid_signals()}}
    sockets = [os.readlink(f"/proc/self/fd/{{fd}}") for fd in os.listdir("/proc/self/fd")
               if os.path.exists(f"/proc/self/fd/{{fd}}")]
    logs = {{name: (one.level, len(one.handlers), one.disabled)
            for name, one in logging.root.manager.loggerDict.items()
            if isinstance(one, logging.Logger)}}
    return handlers, dict(os.environ), os.getcwd(), (logging.root.level, logging.root.handlers), {{
        name: value for name, value in logs.items() if value != (0, 0, False)}}

before = state()
with clients.AlbertClient.local({bundle!r}, num_threads=1) as albert:
    [best, _] = albert.text_classification("a film")
    tcp = [line for file in ("tcp", "tcp6") for line in open(f"/proc/self/net/{{file}}")]
    inodes = {{os.readlink(f"/proc/self/fd/{{fd}}") for fd in os.listdir("/proc/self/fd")
               if os.path.islink(f"/proc/self/fd/{{fd}}")}}
    ours = [line for line in tcp[1:] if f"socket:[{{line.split()[9]}}]" in inodes]
print(json.dumps({{"same": before == state(), "sockets": ours, "label": best.label,
                  "bentoml": "bentoml" in sys.modules,
                  "threads": [one.name for one in threading.enumerate()]}}))
"""


def run_fresh(code: str, environment: dict[str, str] | None = None) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return ended.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_of_the_process_changes(bundle_dir: Path, tmp_path: Path) -> None:
    """Nor does the environment: settings of a service, and a proxy, are not read."""
    code = STATE.format(root=str(ROOT), bundle=str(bundle_dir))
    folder = tmp_path / "metrics"
    folder.mkdir()
    found = json.loads(
        run_fresh(
            code,
            {
                "ALBERT_SERVE_MODELS": "/nowhere",
                "ALBERT_SERVE_API_KEYS": "secret",
                "ALBERT_SERVE_MAX_BODY_BYTES": "1",
                "ALBERT_SERVE_NO_SUCH": "1",
                "HTTP_PROXY": "http://127.0.0.1:9",
                "PROMETHEUS_MULTIPROC_DIR": str(folder),
            },
        )
    )
    assert found["same"]
    assert found["sockets"] == []
    assert not found["bentoml"]
    assert found["threads"] == ["MainThread"]
    assert list(folder.iterdir()) == []


def test_a_client_that_is_never_closed_does_not_keep_the_process(bundle_dir: Path) -> None:
    code = f"""
from albert_serve.client import AlbertClient
albert = AlbertClient.local({str(bundle_dir)!r}, num_threads=1)
print(albert.text_classification("a film")[0].label)
"""
    assert run_fresh(code).strip() in ("negative", "positive")


def test_without_the_extra_the_error_names_it() -> None:
    code = """
import sys
sys.modules["onnxruntime"] = None
from albert_serve.client import AlbertClient
try:
    AlbertClient.local("anything")
except ValueError as error:
    print(error)
"""
    (line,) = run_fresh(code).splitlines()
    assert line == (
        "onnxruntime is not installed, which a local model needs: in the checkout pip install "
        "'.[serve]'; with a wheel, pip install 'FILE.whl[serve]'"
    )


@pytest.mark.parametrize("kind", [AlbertClient, AsyncAlbertClient])
def test_what_cannot_be_opened_is_one_clear_error(
    kind: type[AlbertClient | AsyncAlbertClient], bundle_dir: Path, tmp_path: Path
) -> None:
    before = local_threads()
    with pytest.raises(BundleMissingError, match=r"nowhere/manifest\.json is not there"):
        kind.local(tmp_path / "nowhere")
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle_dir, damaged)
    weights = bytearray((damaged / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (damaged / "model.safetensors").unlink()
    (damaged / "model.safetensors").write_bytes(weights)
    with pytest.raises(BundleCorruptError, match="SHA-256"):
        kind.local(str(damaged))
    with pytest.raises(ConfigError, match="device is 'gpu'; allowed are auto, cpu, cuda"):
        kind.local(bundle_dir, device="gpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_threads is 0; it must be 1 or more"):
        kind.local(bundle_dir, num_threads=0)
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        kind.local(bundle_dir, timeout_s=0)
    gc.collect()
    give_up_s = time.monotonic() + 10
    while local_threads() > before:  # those of the other tests' clients stay
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_the_default_is_the_model_that_ships() -> None:
    with AlbertClient.local(num_threads=1) as albert:
        assert albert.info().model_id == "albert-small-en"
