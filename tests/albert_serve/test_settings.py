"""The environment: defaults, values, and one clear sentence for a value that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from albert_serve.errors import ConfigError
from albert_serve.settings import Settings, shipped_bundle

BUNDLE = {"ALBERT_SERVE_BUNDLE": "/models/base"}


def test_what_is_set_is_read_and_the_rest_has_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALBERT_SERVE_DEADLINE_S", "2.5")
    monkeypatch.setenv("ALBERT_SERVE_MAX_ITEMS", " ")
    read = Settings.from_environment({**BUNDLE, "ALBERT_SERVE_THREADS": "3"})
    assert read == Settings(bundle=Path("/models/base"), deadline_s=2.5, num_threads=3)


def test_options_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALBERT_SERVE_THREADS", "1")
    assert Settings.from_environment({**BUNDLE, "ALBERT_SERVE_THREADS": "2"}).num_threads == 2


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("ALBERT_SERVE_THREADS", "many", "a whole number from 1 to 1024"),
        ("ALBERT_SERVE_THREADS", "0", "a whole number from 1 to 1024"),
        ("ALBERT_SERVE_MAX_BATCH_TOKENS", "-5", "a whole number from 1 to"),
        ("ALBERT_SERVE_MAX_BODY_BYTES", "4MB", "a whole number from 1 to 1073741824"),
        ("ALBERT_SERVE_DEADLINE_S", "600", "a number of seconds from 0.05 to 55"),
        ("ALBERT_SERVE_DEADLINE_S", "nan", "a number of seconds from 0.05 to 55"),
    ],
)
def test_a_bad_value_names_the_variable_what_it_is_and_what_is_allowed(
    variable: str, value: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_environment({**BUNDLE, variable: value})
    assert f"{variable} is '{value}'; it must be {allowed}" in str(caught.value)


def test_the_environment_for_a_process_reads_as_the_same_settings(tmp_path: Path) -> None:
    chosen = Settings(bundle=tmp_path, num_threads=2, deadline_s=1.5, max_items=7)
    assert Settings.from_environment(chosen.environment()) == chosen


def test_the_shipped_bundle_is_models_itself_or_its_only_bundle(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds none; set ALBERT_SERVE_BUNDLE"):
        shipped_bundle(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "base/manifest.json").touch()
    assert shipped_bundle(tmp_path) == tmp_path / "base"
    (tmp_path / "notes/manifest.json").touch()
    with pytest.raises(ConfigError, match="holds base, notes"):
        shipped_bundle(tmp_path)
    (tmp_path / "manifest.json").touch()
    assert shipped_bundle(tmp_path) == tmp_path
