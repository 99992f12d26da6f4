"""The stages of training that a checkpoint records, and that the next one goes on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from training.model.provenance import read_stages, record_stage


def test_a_stage_follows_those_of_the_checkpoint_that_it_started_from(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    record_stage(first, "albert-serve pretrain", {"steps": 5})
    record_stage(second, "albert-serve finetune", {"steps": 2}, earlier=read_stages(first))
    stages = read_stages(second)
    assert [(stage["program"], stage["steps"]) for stage in stages] == [
        ("albert-serve pretrain", 5),
        ("albert-serve finetune", 2),
    ]


def test_a_bundle_has_the_stages_in_its_manifest(tmp_path: Path) -> None:
    stages = [{"program": "albert-serve pretrain", "steps": 5}]
    manifest = {"provenance": {"training": {"stages": stages}}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert read_stages(tmp_path) == stages


@pytest.mark.parametrize("content", ["", "[1]", '{"stages": 3}'])
def test_foreign_files_of_that_name_hold_no_stages(content: str, tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text(content)
    assert read_stages(tmp_path) == []
