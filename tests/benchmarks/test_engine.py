"""Contestants are given the same, answer the same, and are counted as they should be."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine.__main__ import main
from benchmarks.engine.contestants import EngineTurn
from benchmarks.engine.tables import speed_ratio


def test_contestants_are_measured_in_turns_and_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    amounts = ["--num-texts", "6", "--rounds", "2", "--turn", "0.01", "--threads", "1"]
    who = ["transformers-fp32", "pipeline-1", "ours-fp32", "ours-int8", "openvino-fp32"]
    what = ["--preset", "small", "--contestants", *who, "--shapes", "1x8"]
    assert main([*what, *amounts, "--output", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    results = {each["contestant"]["name"]: each for each in content["results"]}
    has_openvino = find_spec("openvino") is not None
    assert len(results) == 4 + has_openvino
    assert (
        any("OpenVINO fp32, latency hint is left out" in note for note in content["notes"])
        != has_openvino
    )
    for name, result in results.items():
        assert not result["failure"]
        cases = {"texts"} if name == "pipeline, batch 1" else {"1x8", "texts"}
        assert {case: len(turns) for case, turns in result["turns"].items()} == dict.fromkeys(
            cases, 2
        )
        expected = results["transformers fp32"]["turns"]["texts"][0]["outputs"]
        limit = 0.1 if "int8" in name else 1e-5
        np.testing.assert_allclose(result["turns"]["texts"][0]["outputs"], expected, atol=limit)
        assert result["turns"]["texts"][0]["rss_bytes"] > 1 << 20
    assert content["disk"]["bundle-fp32"] > 30000 * 128 * 4
    assert "| **ours fp32** |" in capsys.readouterr().out


def test_ratios_are_medians_of_each_round() -> None:
    def turns(*seconds: float) -> list[EngineTurn]:
        return [EngineTurn(seconds=s, num_items=4, outputs=[]) for s in seconds]

    assert speed_ratio(turns(1.0, 4.0, 1.0), turns(2.0, 20.0, 4.0)) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "4by128"], "no shape; write ROWSxTOKENS"),
        (["--shapes", "4x1"], "at least 2 tokens"),
        (["--shapes", "1x1024"], "the model has 512 positions"),
        (["--texts", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_refusals(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--output", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]
