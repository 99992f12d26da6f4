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

LIMITS = {"int8": 0.1, "fp16": 0.02}  # of fp32 1e-5
IN_FP16 = ["transformers-fp16", "ours-fp16"]


@pytest.mark.parametrize(
    ("device", "who"),
    [
        ("cpu", ["pipeline-1", "ours-fp32", "ours-int8", "openvino-fp32"]),
        pytest.param("cpu", IN_FP16, marks=pytest.mark.extended),
        pytest.param("cuda", [*IN_FP16, "transformers-fp16-compiled"], marks=pytest.mark.gpu),
    ],
)
def test_contestants_are_measured_in_turns_and_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str, who: list[str]
) -> None:
    amounts = ["--num-texts", "6", "--rounds", "2", "--turn", "0.01", "--threads", "1"]
    what = ["--preset", "small", "--contestants", "transformers-fp32", *who, "--shapes", "1x8"]
    what += ["--device", device]
    assert main([*what, *amounts, "--output", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    results = {each["contestant"]["name"]: each for each in content["results"]}
    left_out = "openvino-fp32" in who and find_spec("openvino") is None
    assert len(results) == 1 + len(who) - left_out
    notes = content["notes"]
    assert any("openvino is left out" in note for note in notes) == left_out
    for name, result in results.items():
        assert not result["failure"]
        kinds = result["contestant"]["kinds"]
        cases = {{"shapes": "1x8", "texts": "texts"}[kind] for kind in kinds}
        assert {case: len(turns) for case, turns in result["turns"].items()} == dict.fromkeys(
            cases, 2
        )
        limit = next((limit for kind, limit in LIMITS.items() if kind in name), 1e-5)
        for case, (turn, *_) in result["turns"].items():
            expected = results["transformers fp32"]["turns"][case][0]["outputs"]
            np.testing.assert_allclose(turn["outputs"], expected, atol=limit)
            assert turn["rss_bytes"] > 1 << 20
    output = capsys.readouterr().out
    for precision in ("fp32", "fp16"):
        if (size := content["disk"].get(f"bundle-{precision}")) is not None:
            assert size > 30000 * 128 * {"fp32": 4, "fp16": 2}[precision]
            assert f"| **ours {precision}** |" in output


def test_ratios_are_medians_of_each_round() -> None:
    def turns(*seconds: float) -> list[EngineTurn]:
        return [EngineTurn(seconds=s, num_items=4, outputs=[]) for s in seconds]

    assert speed_ratio(turns(1.0, 4.0, 1.0), turns(2.0, 20.0, 4.0)) == 4
