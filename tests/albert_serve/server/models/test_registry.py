"""Several models behind one address, and what a reload does to them, in real processes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import onnx
import pytest
from huggingface_hub import InferenceClient
from prometheus_client import CollectorRegistry

from albert_serve.bundle.manifest import Bundle
from albert_serve.client import AlbertClient
from albert_serve.errors import AlbertServeError, ConfigError, NotFoundError
from albert_serve.server.metrics import Metrics
from albert_serve.server.models.registry import Models, check_models
from albert_serve.settings import Settings
from albert_serve.tokenizer import AlbertTokenizer
from tests.albert_serve.support import (
    Running,
    copy_with,
    running_service,
    service_environment,
    wait_until_started,
    workers_of,
)

# Anchors of which each merges the one before ten times: a billion in all.
MERGED = itertools.pairwise("abcdefghijk")
REQUEST = {"inputs": "The [MASK] run.", "parameters": {"top_k": 3}}


@pytest.fixture
def shelf(bundle_dir: Path, int8_dir: Path, tmp_path: Path) -> Path:
    """A folder with two bundles, and things beside them that are none."""
    folder = tmp_path / "bundles"
    shutil.copytree(bundle_dir, folder / "first")
    shutil.copytree(int8_dir, folder / "second")
    shutil.copytree(int8_dir, folder / ".partial")
    (folder / "notes").mkdir()
    return folder


def put(bundle: Path, place: Path) -> None:
    """A bundle in place of another: who has the old files open keeps them."""
    beside = place.with_name(f".{place.name}-new")
    shutil.copytree(bundle, beside)
    shutil.move(place, place.with_name(f".{place.name}-{time.monotonic_ns()}"))
    beside.rename(place)


def environment(models: Path, home: Path, **others: str) -> dict[str, str]:
    made = service_environment(models, home) | {"ALBERT_SERVE_MODELS": str(models), **others}
    del made["ALBERT_SERVE_BUNDLE"]
    return made


def wait_for(condition: Callable[[], object], running: Running) -> None:
    give_up_s = time.monotonic() + 30
    while not condition():
        told = [line for line in running.log.splitlines() if " 200 " not in line]
        assert time.monotonic() < give_up_s, "\n".join(told)
        time.sleep(0.1)


def answers_with(running: Running, revision: str) -> bool:
    """Whether all that answer have this revision: of several workers any may."""
    asked = (httpx.get(f"{running.url}/info").json()["revision"] for _ in range(8))
    return all(answer == revision for answer in asked)


def logged(running: Running, told: str, times: int) -> bool:
    return running.log.count(f"model served {told}") == times


def test_each_model_answers_under_its_name_and_the_first_without_one(
    shelf: Path, tmp_path: Path
) -> None:
    with running_service(environment(shelf, tmp_path / "home"), tmp_path) as running:
        url = running.url
        listed = httpx.get(f"{url}/v1/models").json()
        assert listed["default"] == "first"
        assert [model["model_id"] for model in listed["models"]] == ["first", "second"]
        assert [model["precision"] for model in listed["models"]] == ["fp32", "int8"]
        assert httpx.get(f"{url}/info").json() == listed["models"][0]
        for path in ("/v1/models/second", "/v1/models/second/info"):
            assert httpx.get(url + path).json() == listed["models"][1]
        assert httpx.get(f"{url}/v1/models/second/health").json() == {"status": "ok"}

        def fill(path: str) -> Any:
            return httpx.post(f"{url}{path}/fill-mask", json=REQUEST).json()

        assert fill("/v1/models/first") == fill("") != fill("/v1/models/second")
        hub = InferenceClient(f"{url}/v1/models/second/fill-mask")
        (of_hub, *_) = hub.fill_mask("The [MASK] run.", top_k=3)
        assert of_hub.score == fill("/v1/models/second")[0]["score"]
        with AlbertClient(url, model="second") as client:
            (best, *_) = client.fill_mask("The [MASK] run.", top_k=3)
            assert best.score == fill("/v1/models/second")[0]["score"]  # type: ignore[union-attr]
        missing = httpx.post(f"{url}/v1/models/third/fill-mask", json=REQUEST)
        assert missing.status_code == 404
        assert missing.json()["error"] == "there is no model 'third'; there are first, second"
        metrics = httpx.get(f"{url}/metrics").text
        assert 'albert_serve_requests_total{model="second",task="fill-mask"} 5.0' in metrics
        assert 'endpoint="/v1/models/{model}/fill-mask"' in metrics
        assert "third" not in metrics


def test_a_file_names_models_precisions_threads_and_workers(shelf: Path, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "default: b\nworkers: 2\nmodels:\n  a: {bundle: bundles/first, threads: 1}\n"
        "  b: {bundle: bundles/second, precision: int8}\n"
    )
    with running_service(environment(file, tmp_path / "home"), tmp_path) as running:
        assert httpx.get(f"{running.url}/info").json()["model_id"] == "b"
        assert len(workers_of(running)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [", "is not YAML"),
        ("", "lists no models"),
        ("models: {}", "models: Dictionary should have at least 1 item"),
        ("models: {a: {folder: x}}", "models.a.bundle: Field required; models.a.folder: Extra"),
        ("models: {a/b: {bundle: x}}", "a/b"),
        ("models: {a: {bundle: x, precision: int4}}", "'fp32', 'fp16' or 'int8'"),
        ("models: {a: {bundle: x}}\ndefault: b", "default is 'b', which is no model; there are a"),
        ("models: {a: {bundle: x}}\nworkers: 0", "greater than or equal to 1"),
        ("models: {a: {bundle: nowhere}}", "manifest.json is not there"),
        ("models: " + "1" * 5000, "lists no models"),
        ("models: " + "[" * 100_000, "lists no models"),
        ("workers: 2020-99-99", "lists no models"),
        (
            "a: &a {x: 1}\n"
            + "".join(f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 10)}]}}\n" for a, b in MERGED),
            "<< with a list is not supported",
        ),
        (
            "models: {a: {bundle: bundles/first, precision: int8}}",
            "to be int8, and .* is fp32",
        ),
    ],
)
def test_a_wrong_file_is_one_clear_error(
    text: str, message: str, shelf: Path, tmp_path: Path
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    with pytest.raises(AlbertServeError, match=message):
        load(Settings.from_environment({"ALBERT_SERVE_MODELS": str(file)}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "holds no folder of a bundle"),
        (lambda folder: (folder / "a b").mkdir(), "a b cannot be a model's name"),
    ],
)
def test_a_wrong_folder_is_one_clear_error(
    make: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    make(tmp_path)
    for folder in tmp_path.iterdir():
        (folder / "manifest.json").touch()
    with pytest.raises(AlbertServeError, match=message):
        load(Settings.from_environment({"ALBERT_SERVE_MODELS": str(tmp_path)}))


def load(settings: Settings) -> Models:
    return Models.load(settings, Metrics(CollectorRegistry()))


def test_bundles_of_the_same_weights_have_one_encoder(bundle_dir: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(bundle_dir, tmp_path / name)
    (tmp_path / "models.yaml").write_text(
        "models: {a: {bundle: a}, b: {bundle: b}, c: {bundle: a, threads: 2}}"
    )
    loaded = load(settings_of(tmp_path / "models.yaml"))._loaded
    encoders = [loaded[name].engine._encoder.encoder for name in "abc"]
    assert encoders[0] is encoders[1]
    assert encoders[0] is not encoders[2]  # other threads are another session
    assert all(each.options.spinning for each in loaded.values())


def test_bundles_of_the_same_vocabulary_have_one_tokenizer(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[AlbertTokenizer] = []
    from_file = AlbertTokenizer.from_file

    def note(file: Path) -> AlbertTokenizer:
        read.append(from_file(file))
        return read[-1]

    monkeypatch.setattr(AlbertTokenizer, "from_file", note)
    models = load(settings_of(shelf))
    assert set(models._loaded) == {"first", "second"}
    assert len(read) == 1


def test_threads_of_different_models_do_not_wait_actively(shelf: Path) -> None:
    loaded = load(settings_of(shelf))._loaded
    assert len(loaded) == 2
    assert not any(each.options.spinning for each in loaded.values())


def settings_of(models: Path) -> Settings:
    variables = {"ALBERT_SERVE_MODELS": str(models), "ALBERT_SERVE_THREADS": "1"}
    return Settings.from_environment(variables)


def reloaded(models: Models) -> None:
    """Put on an event loop, with whatever is to be reloaded there by then."""

    async def run() -> None:
        models.start()
        await models.reload()
        await models.close()

    asyncio.run(run())


def test_a_reload_adds_replaces_and_removes(
    shelf: Path, bundle_dir: Path, int8_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = load(settings_of(shelf))
    before = dict(models._loaded)
    shutil.move(shelf / "first", shelf / ".first")
    put(bundle_dir, shelf / "second")
    shutil.copytree(int8_dir, shelf / "third")
    with caplog.at_level(logging.WARNING):
        reloaded(models)
    assert models.names == ["second", "third"]
    assert models.default.name == "second"
    revision = Bundle.open(bundle_dir).manifest.revision
    assert models.default.info().revision == revision != before["second"].bundle.manifest.revision
    assert f"model second is now revision {revision}" in caplog.text
    assert "model first is no longer served" in caplog.text
    with pytest.raises(NotFoundError):
        models.get("first")


def test_a_new_first_model_is_not_the_default(shelf: Path, int8_dir: Path) -> None:
    models = load(settings_of(shelf))
    shutil.copytree(int8_dir, shelf / "another")
    reloaded(models)
    assert "another" in models.names
    assert models.default.name == "first"


def test_what_has_not_changed_is_not_opened_again(shelf: Path) -> None:
    models = load(settings_of(shelf))
    before = {name: loaded.engine for name, loaded in models._loaded.items()}
    reloaded(models)
    assert all(models._loaded[name].engine is engine for name, engine in before.items())


def damage(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\xff")


def truncate(folder: Path) -> None:
    os.truncate(folder / "encoder.onnx", 100)


def forget(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def leave(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("spoil", [damage, truncate, forget, leave])
def test_a_bundle_that_does_not_verify_changes_nothing(
    spoil: Callable[[Path], None],
    bundle_dir: Path,
    int8_dir: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.copytree(bundle_dir, tmp_path / "tiny")
    registry = CollectorRegistry()
    settings = Settings(bundle=tmp_path / "tiny", num_threads=1)
    models = Models.load(settings, Metrics(registry))
    revision = models._loaded["tiny"].bundle.manifest.revision
    put(int8_dir, tmp_path / "tiny")
    spoil(tmp_path / "tiny")
    reloaded(models)
    assert models.default.info().revision == revision
    assert "model tiny was not loaded, the one before goes on: " in caplog.text
    told = {"model": "tiny", "outcome": "rejected"}
    assert registry.get_sample_value("albert_serve_reloads_total", told) == 1


def test_what_was_rejected_is_not_opened_for_other_settings_either(
    bundle_dir: Path, int8_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bundles"
    shutil.copytree(bundle_dir, folder / "first")
    models = load(settings_of(folder))
    kept = models._loaded["first"]
    assert kept.options.spinning
    damage(folder / "first")
    shutil.copytree(int8_dir, folder / "second")  # different weights: threads no longer spin
    reloaded(models)
    assert not models._loaded["second"].options.spinning
    assert models._loaded["first"] is kept


def test_the_default_can_be_set(shelf: Path, tmp_path: Path) -> None:
    chosen = {"ALBERT_SERVE_MODELS": str(shelf), "ALBERT_SERVE_DEFAULT_MODEL": "second"}
    assert check_models(Settings.from_environment(chosen)) == "second"
    models = load(Settings.from_environment(chosen))
    shutil.rmtree(shelf / "second")
    reloaded(models)
    assert models.default.name == "first"
    file = tmp_path / "models.yaml"
    file.write_text("default: a\nmodels: {a: {bundle: bundles/first}, b: {bundle: bundles/first}}")
    chosen = {"ALBERT_SERVE_MODELS": str(file), "ALBERT_SERVE_DEFAULT_MODEL": "b"}
    assert check_models(Settings.from_environment(chosen)) == "a"
    chosen["ALBERT_SERVE_DEFAULT_MODEL"] = "c"
    with pytest.raises(ConfigError, match="DEFAULT_MODEL is 'c'; there are a, b"):
        check_models(Settings.from_environment(chosen))


def test_a_list_that_cannot_be_read_changes_nothing(
    bundle_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(f"models: {{a: {{bundle: {bundle_dir}}}}}")
    models = load(settings_of(file))
    file.write_text("models: [")
    reloaded(models)
    assert models.names == ["a"]
    assert "the models were not reloaded, those before go on: " in caplog.text


@contextlib.contextmanager
def under_load(url: str) -> Iterator[Counter[object]]:
    """While four callers ask all the time; what came of it, by status or error."""
    seen: Counter[object] = Counter()
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            while not stop.is_set():
                try:
                    seen[client.post("/fill-mask", json=REQUEST).status_code] += 1
                except httpx.TransportError as error:
                    seen[type(error)] += 1

    callers = [threading.Thread(target=ask) for _ in range(4)]
    for caller in callers:
        caller.start()
    try:
        yield seen
    finally:
        stop.set()
        for caller in callers:
            caller.join()


def test_hangup_reloads_every_worker_and_drops_nothing(
    bundle_dir: Path, int8_dir: Path, tmp_path: Path
) -> None:
    num_workers = 2
    place = tmp_path / "served"
    shutil.copytree(bundle_dir, place)
    started = service_environment(place, tmp_path / "home")
    started |= {"ALBERT_SERVE_WORKERS": str(num_workers)}
    with running_service(started, tmp_path) as running:
        first = Bundle.open(bundle_dir).manifest.revision
        second = Bundle.open(int8_dir).manifest.revision
        wait_until_started(running, num_workers)
        pids = workers_of(running)
        with under_load(running.url) as seen:
            turns = ((int8_dir, second), (bundle_dir, first), (int8_dir, second))
            for turn, (bundle, revision) in enumerate(turns, start=1):
                put(bundle, place)
                running.process.send_signal(signal.SIGHUP)
                # Of every worker: one that is still at it would find the next one half put.
                wait_for(functools.partial(logged, running, "is now", turn * num_workers), running)
                assert answers_with(running, revision)
            damage(place)
            running.process.send_signal(signal.SIGHUP)
            wait_for(functools.partial(logged, running, "was not loaded", num_workers), running)
            assert answers_with(running, second)
        assert set(seen) == {200}
        assert workers_of(running) == pids
        assert httpx.get(f"{running.url}/info").json()["model_id"] == "served"


def metrics_of(worker: int) -> Path:
    """The folder of a worker's metrics, from Linux' /proc."""
    variables = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    (folder,) = (each for each in variables if each.startswith(b"PROMETHEUS_MULTIPROC_DIR="))
    return Path(folder.partition(b"=")[2].decode())


def test_a_worker_that_was_killed_comes_back_as_the_others_are(
    bundle_dir: Path, int8_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bundles"
    shutil.copytree(bundle_dir, folder / "first")
    started = environment(folder, tmp_path / "home", ALBERT_SERVE_WORKERS="2")
    with running_service(started, tmp_path) as running:
        wait_until_started(running, 2)
        killed, other = workers_of(running)
        shutil.copytree(int8_dir, folder / "another")
        running.process.send_signal(signal.SIGHUP)
        wait_for(lambda: running.log.count("model another is now") == 2, running)
        gauges = metrics_of(killed)
        assert list(gauges.glob(f"gauge_live*_{killed}.db"))
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: len(set(workers_of(running)) - {killed}) == 2, running)
        assert other in workers_of(running)
        assert not list(gauges.glob(f"gauge_live*_{killed}.db"))
        wait_until_started(running, 3)
        # The first by name when the service began, and not the one that is first now.
        asked = [httpx.get(f"{running.url}/info").json()["model_id"] for _ in range(16)]
        assert set(asked) == {"first"}


def test_a_bundle_without_heads_is_served_for_its_embeddings(
    bundle_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(bundle_dir, folder)
    manifest = json.loads((folder / "manifest.json").read_text()) | {"tasks": {}}
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    settings = Settings.from_environment({"ALBERT_SERVE_BUNDLE": str(folder)})
    assert check_models(settings) == "bare"
    assert caplog.messages == ["bare has no head, so it answers embeddings alone"]

    async def names() -> list[str]:
        models = Models.load(settings, Metrics(CollectorRegistry()))
        models.start()
        served = [task.name for task in models.default.info().tasks]
        await models.close()
        return served

    assert asyncio.run(names()) == ["feature-extraction"]


def link_outside(folder: Path) -> None:
    """The hash fits, and the runtime follows no link out of the folder."""
    weights = folder / "model.safetensors"
    shutil.move(weights, folder.parent.parent / "elsewhere.safetensors")
    weights.symlink_to(folder.parent.parent / "elsewhere.safetensors")


def leave_a_manifest(folder: Path) -> None:
    for file in folder.iterdir():
        if file.name != "manifest.json":
            file.unlink()


def nest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)


def make_a_pipe(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def misname(folder: Path) -> None:
    folder.rename(folder.with_name("a b"))


SPOILED = [link_outside, leave_a_manifest, nest, make_a_pipe, misname, damage, truncate]


@pytest.mark.parametrize("spoil", SPOILED)
def test_one_bad_bundle_of_a_folder_is_named_and_the_others_start(
    spoil: Callable[[Path], None], shelf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(shelf / "first")
    settings = settings_of(shelf)
    assert check_models(settings) == "second"
    name = "a b" if spoil is misname else "first"
    assert name in caplog.text
    models = load(settings)
    assert list(models._loaded) == ["second"]
    reloaded(models)
    assert models.default.name == "second"


@pytest.mark.parametrize("spoil", SPOILED)
def test_without_a_bundle_that_can_be_served_there_is_no_start(
    spoil: Callable[[Path], None], shelf: Path
) -> None:
    shutil.rmtree(shelf / "second")
    spoil(shelf / "first")
    for start in (check_models, load):
        with pytest.raises(AlbertServeError) as caught:
            start(settings_of(shelf))
        assert "\n" not in str(caught.value)


def test_a_bundle_that_becomes_whole_is_served_after_a_reload(shelf: Path) -> None:
    manifest = shelf / "first/manifest.json"
    content = manifest.read_text()
    manifest.write_text("{")
    models = load(settings_of(shelf))
    manifest.write_text(content)
    reloaded(models)
    assert set(models.names) == {"first", "second"}
    assert models.default.name == "second"


def test_a_graph_that_loops_without_end_is_given_up(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("albert_serve.runtime.engine._WARM_UP_LIMIT_S", 0.5)
    graph = onnx.load(shelf / "first/sentence-order.onnx", load_external_data=False)
    endless = copy_with(
        shelf / "first", shelf / "endless", "sentence-order.onnx", loop_first(graph)
    )
    assert endless.is_dir()
    assert check_models(settings_of(shelf)) == "first"
    assert "model endless was not loaded" in caplog.text
    assert "not answered within 0.5 s" in caplog.text
    assert list(load(settings_of(shelf))._loaded) == ["first", "second"]


def loop_first(model: onnx.ModelProto) -> bytes:
    """The graph with a loop in front that multiplies the hidden states by 1 for ever."""
    make, kind = onnx.helper.make_tensor_value_info, onnx.TensorProto
    body = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Identity", ["more"], ["again"]),
            onnx.helper.make_node("Mul", ["before", "one"], ["after"]),
        ],
        "body",
        [make("i", kind.INT64, []), make("more", kind.BOOL, []), make("before", kind.FLOAT, None)],
        [make("again", kind.BOOL, []), make("after", kind.FLOAT, None)],
        [onnx.helper.make_tensor("one", kind.FLOAT, [], [1.0])],
    )
    for node in model.graph.node:
        node.input[:] = ["looped" if name == "hidden_states" else name for name in node.input]
    loop = onnx.helper.make_node("Loop", ["", "always", "hidden_states"], ["looped"], body=body)
    model.graph.node.insert(0, loop)
    model.graph.initializer.append(onnx.helper.make_tensor("always", kind.BOOL, [], [True]))
    return model.SerializeToString()
