"""The environment: defaults, values, and one clear sentence for a value that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from albert_serve.errors import ConfigError
from albert_serve.settings import (
    RuntimeOptions,
    Settings,
    allocator_variables,
    num_usable_cpus,
    num_workers,
    shipped_bundle,
)

BUNDLE = {"ALBERT_SERVE_BUNDLE": "/models/base"}


def test_settings_are_read_and_missing_ones_have_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALBERT_SERVE_DEADLINE_S", "2.5")
    monkeypatch.setenv("ALBERT_SERVE_MAX_ITEMS", " ")
    read = Settings.from_environment({**BUNDLE, "ALBERT_SERVE_THREADS": "3"})
    assert read == Settings(
        bundle=Path("/models/base"),
        deadline_s=2.5,
        num_threads=3,
        cache_folder=read.cache_folder,
    )


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("THREADS", "many", "'many'.* 1 to 1024"),
        ("THREADS", "0", "'0'.* 1 to 1024"),
        ("THREADS", "1025", "'1025'.* 1 to 1024"),
        ("MAX_BODY_BYTES", "4MB", "'4MB'.* whole number .* 1 to 1073741824"),
        ("DEADLINE_S", "55.1", "'55.1'.* seconds from 0.05 to 55"),
        ("DEADLINE_S", "nan", "'nan'.* seconds from 0.05 to 55"),
        ("DEVICE", "fast", "'fast'.* auto, cpu, cuda"),
        ("SPINNING", "fast", "'fast'.* auto, on, off"),
        ("GUARD", "api", "no key"),
        ("CORS_ORIGINS", "app.example.com", "'app.example.com'.* https://app.example.com"),
        ("CORS_ORIGINS", "https://a.example.com/", "'https://a.example.com/'"),
        ("ALLOWED_HOSTS", "localhost,here:3000", "'here:3000'"),
        ("ALLOWED_HOSTS", "a.*.com", "'a.\\*.com'"),
        ("API_KEYS", "", "empty"),
        ("API_KEYS", " , ", "empty"),
        ("API_KEYS_FILE", " ", "empty"),
    ],
)
def test_a_bad_value_is_refused_with_the_variable_and_what_is_allowed(
    variable: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"ALBERT_SERVE_{variable} .*{message}"):
        Settings.from_environment({**BUNDLE, f"ALBERT_SERVE_{variable}": value})


def test_the_values_at_the_limits_are_taken_and_a_bundle_excludes_a_folder() -> None:
    for variable, values in {
        "THREADS": "1 1024",
        "DEADLINE_S": "0.05 55",
        "WORKERS": "256",
    }.items():
        for value in values.split():
            Settings.from_environment({**BUNDLE, f"ALBERT_SERVE_{variable}": value})
    with pytest.raises(ConfigError, match="ALBERT_SERVE_BUNDLE and ALBERT_SERVE_MODELS"):
        Settings.from_environment({**BUNDLE, "ALBERT_SERVE_MODELS": "/models"})
    wrong: tuple[dict[str, Any], ...] = ({"device": "tpu"}, {"num_threads": 0})
    for options in wrong:
        with pytest.raises(ConfigError, match=next(iter(options))):
            RuntimeOptions(**options)
    assert RuntimeOptions(num_threads=1).threads == 1


def test_a_key_is_needed_where_the_guard_has_the_tasks_and_never_shown() -> None:
    key = {**BUNDLE, "ALBERT_SERVE_API_KEYS": "k" * 16}
    with pytest.raises(ConfigError) as caught:
        Settings.from_environment({**key, "ALBERT_SERVE_THREADS": "no"})
    assert "k" * 16 not in f"{caught.value} {caught.value.__cause__}"
    assert Settings.from_environment(key).needs_key
    guarded = Settings.from_environment({**key, "ALBERT_SERVE_GUARD": "metrics"})
    assert (guarded.has_keys, guarded.needs_key) == (True, False)
    assert not Settings.from_environment(BUNDLE).has_keys


def test_the_environment_for_a_process_reads_as_the_same_settings(tmp_path: Path) -> None:
    chosen = Settings(
        bundle=tmp_path,
        num_workers=3,
        num_threads=2,
        device="cpu",
        spinning="off",
        cache_folder=tmp_path / "cache",
        deadline_s=1.5,
        max_items=7,
        api_keys=("first-key-0123456789", "file-key-0123456789=="),
        api_keys_file=tmp_path / "keys",
        guard=("metrics",),
        cors_origins=("https://app.example.com", "*"),
        allowed_hosts=("*.example.com", "[::1]"),
    )
    assert Settings.from_environment(chosen.environment()) == chosen
    assert "first-key" not in repr(chosen)


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for variable, value, expected in (
        ("HOME", "/c", "/c/.cache/albert-serve"),
        ("XDG_CACHE_HOME", "/b", "/b/albert-serve"),
        ("ALBERT_SERVE_CACHE", "/a", "/a"),
    ):
        monkeypatch.setenv(variable, value)
        assert Settings.from_environment(BUNDLE).cache_folder == Path(expected)


def test_several_workers_share_packed_weights_and_the_cpus(tmp_path: Path) -> None:
    def runtime(**changes: Any) -> RuntimeOptions:
        return Settings(bundle=tmp_path, cache_folder=tmp_path, **changes).runtime

    assert runtime().cache_folder is None
    assert runtime().threads == num_usable_cpus()
    assert runtime(num_workers=2).cache_folder == tmp_path
    job = Settings(bundle=tmp_path, cache_folder=tmp_path, num_workers=256).job_runtime
    assert (job.cache_folder, job.threads) == (tmp_path, num_usable_cpus())
    assert [runtime(spinning=value).spinning for value in ("auto", "on", "off")] == [
        True,
        True,
        False,
    ]
    assert runtime(num_workers=256).threads == 1
    assert runtime(num_workers=2, num_threads=7).threads == 7


def test_the_shipped_bundle_is_the_only_one_in_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.* ALBERT_SERVE_BUNDLE"):
        shipped_bundle(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "base/manifest.json").touch()
    assert shipped_bundle(tmp_path) == tmp_path / "base"
    (tmp_path / "notes/manifest.json").touch()
    with pytest.raises(ConfigError, match="base, notes"):
        shipped_bundle(tmp_path)


def test_a_misspelt_variable_is_refused() -> None:
    for variable, hint in {
        "albert_serve_api_key": "ALBERT_SERVE_API_KEYS",
        "ALBERT_SERVER_API_KEYS": "ALBERT_SERVE_API_KEYS",
        "albertserver_WORKERS": "ALBERT_SERVE_WORKERS",
        "ALBERT_KEYS": "docs/operate.md",
        "ALBERT_SERVE_NUM_WORKERS": "ALBERT_SERVE_WORKERS",
        "ALBERT_SERVE_TRACING_HEADERS": "docs/operate.md",
    }.items():
        with pytest.raises(ConfigError, match=f"{variable} .*{hint}"):
            Settings.from_environment({**BUNDLE, variable: "8000"})


def test_the_variables_of_other_programs_and_of_kubernetes_are_no_misspelt_ones() -> None:
    address = "tcp://10.96.0.12:80"
    made = {"PORT": address, "PORT_80_TCP": address, "SERVICE_HOST": "10.96.0.12"}
    made |= dict.fromkeys(("SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_80_TCP_PORT"), "80")
    made |= {"PORT_80_TCP_PROTO": "tcp", "PORT_80_TCP_ADDR": "10.96.0.12"}
    services = ("SERVE_", "SERVE_QA_", "KEYS_")
    named = {f"ALBERT_{service}{name}": made[name] for service in services for name in made}
    others = {"ALBERT_URL": "http://localhost:3000", "ALBERT_API_KEY": "k" * 16, "ALBERT_HOME": "."}
    assert Settings.from_environment({**BUNDLE, **named, **others}).num_workers == 1


def test_a_child_process_gets_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALBERT_SERVE_MODELS", str(tmp_path))
    monkeypatch.setenv("ALBERT_SERVE_API_KEYS", "a-secret-0123456789")
    chosen = {"ALBERT_SERVE_BUNDLE": str(tmp_path), "ALBERT_SERVE_MODELS": ""}
    environment = Settings.from_environment(chosen).environment()
    assert environment["ALBERT_SERVE_BUNDLE"] == str(tmp_path)
    assert "ALBERT_SERVE_MODELS" not in environment
    assert environment["ALBERT_SERVE_API_KEYS"] == "a-secret-0123456789"
    monkeypatch.delenv("ALBERT_SERVE_API_KEYS")
    monkeypatch.delenv("ALBERT_SERVE_MODELS")
    open_to_all = Settings.from_environment(chosen)
    assert Settings.from_environment(open_to_all.environment()) == open_to_all


def test_what_bentoml_reads_at_import_is_1_where_a_setting_is_invalid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALBERT_SERVE_WORKERS", "3")
    assert num_workers() == 3
    monkeypatch.setenv("ALBERT_SERVE_THREADS", "no")
    assert num_workers() == 1
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    assert allocator_variables() == {"MALLOC_ARENA_MAX": "1"}
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert allocator_variables() == {"MALLOC_ARENA_MAX": "4"}
