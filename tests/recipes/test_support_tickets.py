"""Tickets have the places of their personal data, and those of the test have other templates."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("faker")

from recipes.support_tickets import main


def outline(ticket: dict[str, Any]) -> str:
    """The words of a ticket without its entities."""
    text = ticket["text"]
    for entity in reversed(ticket["entities"]):
        text = f"{text[: entity['start']]}{{{entity['label']}}}{text[entity['end'] :]}"
    return str(text)


def test_templates_of_the_test_are_held_out(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0
    outlines = {}
    for split, count in (("train", 2000), ("test", 500)):
        lines = (tmp_path / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(lines) == count
        outlines[split] = {outline(json.loads(line)) for line in lines}
        labels = {label for one in outlines[split] for label in re.findall(r"\{(\w+)\}", one)}
        assert len(labels) == 9
    assert len(outlines["train"]) == 12
    assert outlines["train"].isdisjoint(outlines["test"])
