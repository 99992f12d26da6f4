"""The environment: defaults, values, and one clear sentence for a value that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from albert_serve.errors import ConfigError
from albert_serve.settings import RuntimeOptions, Settings, num_usable_cpus

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
        ("DEADLINE_S", "55.1", "'55.1'.* seconds from 0.05 to 55"),
        ("DEVICE", "fast", "'fast'.* auto, cpu, cuda"),
        ("GUARD", "api", "no key"),
        ("CORS_ORIGINS", "app.example.com", "'app.example.com'.* https://app.example.com"),
        ("ALLOWED_HOSTS", "localhost,here:3000", "'here:3000'"),
        ("API_KEYS", "", "empty"),
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


def test_several_workers_share_packed_weights_and_the_cpus(tmp_path: Path) -> None:
    def runtime(**changes: Any) -> RuntimeOptions:
        return Settings(bundle=tmp_path, cache_folder=tmp_path, **changes).runtime

    assert runtime().cache_folder is None
    assert runtime().threads == num_usable_cpus()
    assert runtime(num_workers=2).cache_folder == tmp_path
    assert runtime(num_workers=256).threads == 1
    assert runtime(num_workers=2, num_threads=7).threads == 7


def test_a_misspelt_variable_is_refused() -> None:
    for variable, hint in {
        "ALBERT_SERVER_API_KEYS": "ALBERT_SERVE_API_KEYS",
        "albertserver_WORKERS": "ALBERT_SERVE_WORKERS",
        "ALBERT_KEYS": "docs/operate.md",
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
