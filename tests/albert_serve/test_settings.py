"""Settings in environment variables: defaults, valid values, and errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from albert_serve.errors import ConfigError
from albert_serve.settings import RuntimeOptions, Settings, num_usable_cpus
from tests.albert_serve.support import ROOT

BUNDLE = {"ALBERT_SERVE_BUNDLE": "/models/base"}


def test_settings_are_read_or_have_the_documented_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALBERT_SERVE_DEADLINE_S", "2.5")
    monkeypatch.setenv("ALBERT_SERVE_MAX_ITEMS", " ")
    settings = Settings.from_environment({**BUNDLE, "ALBERT_SERVE_THREADS": "3"})
    changes: dict[str, Any] = {"deadline_s": 2.5, "num_threads": 3}
    expected = Settings(bundle=Path("/models/base"), cache_folder=settings.cache_folder, **changes)
    assert settings == expected
    page = (ROOT / "docs/operate.md").read_text()
    defaults = re.findall(r"^\| `(ALBERT_SERVE_\w+)` \| (\d+) \|", page, re.MULTILINE)
    assert len(defaults) >= 7
    values = Settings().environment()
    assert [float(values[name]) for name, _ in defaults] == [float(text) for _, text in defaults]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MODELS", "/models", "are both set"),
        ("DEVICE", "fast", "'fast'.* auto, cpu, cuda"),
        ("GUARD", "api", "no key"),
        ("CORS_ORIGINS", "app.example.com", "'app.example.com'.* https://app.example.com"),
        ("ALLOWED_HOSTS", "localhost,here:3000", "'here:3000'"),
        ("API_KEYS", "", "empty"),
        ("API_KEYS_FILE", " ", "empty"),
    ],
)
def test_an_invalid_value_is_an_error_with_the_variable_and_the_allowed_values(
    variable: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"ALBERT_SERVE_{variable} .*{message}"):
        Settings.from_environment({**BUNDLE, f"ALBERT_SERVE_{variable}": value})


@pytest.mark.parametrize(
    ("variable", "low", "high"),
    [
        ("WORKERS", 1, 1 << 8),
        ("THREADS", 1, 1024),
        ("MAX_CONCURRENCY", 1, 1 << 16),
        ("MAX_ITEMS", 1, 1 << 16),
        ("MAX_BODY_BYTES", 1, 1 << 30),
        ("DEADLINE_S", 0.05, 55),
        ("MAX_BATCH_TOKENS", 1, 1 << 24),
        ("MAX_QUEUE_TOKENS", 1, 1 << 30),
        ("GPU_MEM_LIMIT", 1 << 20, 1 << 50),
        ("DRAIN_GRACE_S", 0, 600),
    ],
)
def test_numbers_have_limits(variable: str, low: float, high: float) -> None:
    variable, step = f"ALBERT_SERVE_{variable}", 0.01 if variable == "DEADLINE_S" else 1
    for limit in (low, high):
        assert Settings.from_environment({**BUNDLE, variable: str(limit)})
    for value in (low - step, high + step, "many"):
        with pytest.raises(ConfigError, match=f"{variable} is '{value}'.* from {low} to {high}"):
            Settings.from_environment({**BUNDLE, variable: str(value)})


def test_tasks_require_the_key_if_they_are_guarded() -> None:
    environment = {**BUNDLE, "ALBERT_SERVE_API_KEYS": "k" * 16}
    assert Settings.from_environment(environment).needs_key
    settings = Settings.from_environment({**environment, "ALBERT_SERVE_GUARD": "metrics"})
    assert (settings.has_keys, settings.needs_key) == (True, False)
    assert not Settings.from_environment(BUNDLE).has_keys


def test_a_child_process_gets_the_same_settings_and_nothing_shows_the_keys(tmp_path: Path) -> None:
    settings = Settings(
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
    environment = settings.environment()
    assert Settings.from_environment(environment) == settings
    with pytest.raises(ConfigError) as caught:
        Settings.from_environment({**environment, "ALBERT_SERVE_THREADS": "no"})
    assert "-key-" not in f"{settings!r} {caught.value} {caught.value.__cause__}"


def test_several_workers_share_prepacked_weights_and_the_cpus(tmp_path: Path) -> None:
    def runtime(**changes: Any) -> RuntimeOptions:
        return Settings(bundle=tmp_path, cache_folder=tmp_path, **changes).runtime

    assert runtime().cache_folder is None
    assert runtime().threads == num_usable_cpus()
    assert runtime(num_workers=2).cache_folder == tmp_path
    assert runtime(num_workers=256).threads == 1
    assert runtime(num_workers=2, num_threads=7).threads == 7


def test_a_misspelt_variable_is_an_error_with_the_likely_name() -> None:
    for variable, hint in {
        "ALBERT_SERVER_API_KEYS": "ALBERT_SERVE_API_KEYS",
        "albertserver_WORKERS": "ALBERT_SERVE_WORKERS",
        "ALBERT_KEYS": "docs/operate.md",
    }.items():
        with pytest.raises(ConfigError, match=f"{variable} .*{hint}"):
            Settings.from_environment({**BUNDLE, variable: "8000"})


def test_variables_of_kubernetes_and_of_other_programs_are_ignored() -> None:
    address, host = "tcp://10.96.0.12:80", "10.96.0.12"
    values = {"PORT": address, "PORT_80_TCP": address, "SERVICE_HOST": host}
    values |= dict.fromkeys(("SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_80_TCP_PORT"), "80")
    values |= {"PORT_80_TCP_PROTO": "tcp", "PORT_80_TCP_ADDR": host}
    services = ("SERVE_", "SERVE_QA_", "KEYS_")
    kubernetes = {
        f"ALBERT_{service}{name}": values[name] for service in services for name in values
    }
    others = {"ALBERT_URL": "http://localhost:3000", "ALBERT_API_KEY": "k" * 16, "ALBERT_HOME": "."}
    assert Settings.from_environment({**BUNDLE, **kubernetes, **others}).num_workers == 1
