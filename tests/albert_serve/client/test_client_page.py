"""The programs of docs/client.md run as printed, and it names all that the client has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_type_hints

import pytest

from albert_serve.client import AlbertClient, requests
from tests.albert_serve.support import Running

PAGE = (Path(__file__).resolve().parents[3] / "docs/client.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ADDRESS = "http://127.0.0.1:3000"
METHODS = [
    name
    for name, _ in inspect.getmembers(AlbertClient, inspect.isfunction)
    if not name.startswith("_") and not name.endswith("_stream") and name != "close"
]
OPTIONS = {
    "fill_mask": requests.FillMaskOptions,
    "fill_mask_jointly": requests.FillMaskOptions,
    "score_targets": requests.ScoreTargetsOptions,
    "text_classification": requests.TextClassificationOptions,
    "question_answering": requests.QuestionAnsweringOptions,
    "sentence_order": requests.SentenceOrderOptions,
    "coherence": requests.SentenceOrderOptions,
    "reorder": requests.SentenceOrderOptions,
    "multiple_choice": requests.MultipleChoiceOptions,
    "feature_extraction": requests.FeatureExtractionOptions,
    "token_features": requests.TokenFeaturesOptions,
}


def row_of(name: str) -> list[str]:
    """The cells of a table's row that begins with this name."""
    [line] = re.findall(rf"^\| `{name}` \|(.*)\|$", PAGE, re.MULTILINE)
    return [cell.strip() for cell in line.split(" | ")]


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_runs_as_printed(
    number: int, service: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    program = PROGRAMS[number]
    assert ADDRESS in program
    exec(compile(program.replace(ADDRESS, service.url), "docs/client.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_every_method_has_a_row() -> None:
    assert {"info", *OPTIONS} <= set(METHODS)
    for name in METHODS:
        assert row_of(name)


@pytest.mark.parametrize("method", OPTIONS)
def test_every_option_is_named(method: str) -> None:
    assert set(re.findall(r"`(\w+)`", row_of(method)[-1])) == set(get_type_hints(OPTIONS[method]))


def test_the_options_of_the_client_have_their_defaults() -> None:
    for name, parameter in inspect.signature(AlbertClient).parameters.items():
        default = row_of(name)[0].strip("`")
        assert default == (
            ""
            if parameter.default is parameter.empty
            else f"{parameter.default:g}"
            if isinstance(parameter.default, float)
            else str(parameter.default)
        )
