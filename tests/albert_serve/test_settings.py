"""The environment: defaults, values, and one clear sentence for a value that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from albert_serve.errors import ConfigError
from albert_serve.settings import RuntimeOptions, Settings, num_usable_cpus, shipped_bundle

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
        ("THREADS", "many", "is 'many'; it must be a whole number from 1 to 1024"),
        ("THREADS", "0", "is '0'; it must be a whole number from 1 to 1024"),
        ("MAX_BATCH_TOKENS", "-5", "is '-5'; it must be a whole number from 1 to"),
        ("MAX_BODY_BYTES", "4MB", "is '4MB'; it must be a whole number from 1 to 1073741824"),
        ("DEADLINE_S", "600", "is '600'; it must be a number of seconds from 0.05 to 55"),
        ("DEADLINE_S", "nan", "is 'nan'; it must be a number of seconds from 0.05 to 55"),
        ("DEVICE", "fast", "is 'fast'; allowed are auto, cpu, cuda"),
        ("SPINNING", "fast", "is 'fast'; allowed are auto, on, off"),
        ("GUARD", "api", "is set, but there is no key"),
        ("CORS_ORIGINS", "app.example.com", "an origin is like https://app.example.com, without"),
        ("CORS_ORIGINS", "https://app.example.com/", "holds 'https://app.example.com/'; an origin"),
        ("ALLOWED_HOSTS", "localhost,here:3000", "holds 'here:3000'; a host is like app.example"),
        ("ALLOWED_HOSTS", "a.*.com", "without a port, or * for all"),
        (
            "API_KEYS",
            "",
            "is set, but empty; put into it what it is for, or unset it: without keys",
        ),
        ("API_KEYS", " , ", "is set, but empty"),
        ("API_KEYS_FILE", " ", "is set, but empty"),
    ],
)
def test_a_bad_value_is_refused_with_the_variable_and_what_is_allowed(
    variable: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_environment({**BUNDLE, f"ALBERT_SERVE_{variable}": value})
    assert f"ALBERT_SERVE_{variable} " in str(caught.value)
    assert message in str(caught.value)


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


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ALBERT_SERVE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/albert-serve")),
        ({"HOME": "/c"}, Path("/c/.cache/albert-serve")),
    ],
)
def test_the_cache_is_the_users(
    variables: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert Settings.from_environment(BUNDLE).cache_folder == expected


def test_several_workers_share_packed_weights_and_the_cpus(tmp_path: Path) -> None:
    def runtime(**changes: Any) -> RuntimeOptions:
        return Settings(bundle=tmp_path, cache_folder=tmp_path, **changes).runtime

    assert runtime().cache_folder is None
    assert runtime().threads == num_usable_cpus()
    assert runtime(num_workers=2).cache_folder == tmp_path
    assert runtime(num_workers=256).threads == 1
    assert runtime(num_workers=2, num_threads=7).threads == 7


def test_the_shipped_bundle_is_the_only_one_in_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds none; set ALBERT_SERVE_BUNDLE"):
        shipped_bundle(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "base/manifest.json").touch()
    assert shipped_bundle(tmp_path) == tmp_path / "base"
    (tmp_path / "notes/manifest.json").touch()
    with pytest.raises(ConfigError, match="holds base, notes"):
        shipped_bundle(tmp_path)


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("ALBERT_SERVE_API_KEY", "did you mean ALBERT_SERVE_API_KEYS?"),
        ("albert_serve_api_keys", "did you mean ALBERT_SERVE_API_KEYS?"),
        ("ALBERT_SERVER_API_KEYS", "did you mean ALBERT_SERVE_API_KEYS?"),
        ("ALBERTSERVE_API_KEYS", "did you mean ALBERT_SERVE_API_KEYS?"),
        ("albertserver_WORKERS", "did you mean ALBERT_SERVE_WORKERS?"),
        ("ALBERT_KEYS", "unset it"),
        ("ALBERT_SERVE_NUM_WORKERS", "did you mean ALBERT_SERVE_WORKERS?"),
        ("ALBERT_SERVE_TRACING_HEADERS", "unset it; docs/operate.md lists them"),
        ("ALBERT_SERVE_PORT", "no such setting"),
    ],
)
def test_a_misspelt_variable_is_refused(variable: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} is set, but there is no such") as caught:
        Settings.from_environment({**BUNDLE, variable: "8000"})
    assert hint in str(caught.value)


def test_variables_of_other_programs_are_none_of_ours() -> None:
    others = {"ALBERT_URL": "http://localhost:3000", "ALBERT_API_KEY": "k" * 16, "ALBERT_HOME": "."}
    assert Settings.from_environment({**BUNDLE, **others}).num_workers == 1


@pytest.mark.parametrize("service", ["SERVE_", "SERVE_QA_", "KEYS_"])
def test_the_variables_that_kubernetes_makes_of_a_service_are_no_misspelt_ones(
    service: str,
) -> None:
    address = "tcp://10.96.0.12:80"
    made = {
        "SERVICE_HOST": "10.96.0.12",
        "SERVICE_PORT": "80",
        "SERVICE_PORT_HTTP": "80",
        "PORT": address,
        "PORT_80_TCP": address,
        "PORT_80_TCP_PROTO": "tcp",
        "PORT_80_TCP_PORT": "80",
        "PORT_80_TCP_ADDR": "10.96.0.12",
    }
    named = {f"ALBERT_{service}{name}": value for name, value in made.items()}
    assert Settings.from_environment({**BUNDLE, **named}).num_workers == 1


def test_an_error_never_shows_a_key() -> None:
    wrong = {"ALBERT_SERVE_API_KEYS": "a-secret-0123456789", "ALBERT_SERVE_THREADS": "no"}
    with pytest.raises(ConfigError) as caught:
        Settings.from_environment({**BUNDLE, **wrong})
    assert "a-secret" not in f"{caught.value} {caught.value.__cause__}"


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
