"""The command writes questions that finetuning reads, the same bytes each time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.albert_small_en.spans import main
from tests.training.support import WIKI, read_metrics
from training.commands import finetune
from training.data.questions import locate_answers, read_squad

Capture = pytest.CaptureFixture[str]


def test_the_file_is_squad_s(tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "new" / "spans.json"
    assert main([str(WIKI), str(output)]) == 0
    questions = read_squad([output])
    assert f"{len(questions):,} questions" in capsys.readouterr().out
    assert len(questions) > 30
    assert locate_answers(questions)[1] == 0
    content = json.loads(output.read_text())
    assert {"version", "data"} == content.keys()
    assert len({question.id for question in questions}) == len(questions)
    assert not list(output.parent.glob("*.partial"))


@pytest.mark.parametrize("suffix", [".json", ".json.xz"])
def test_the_same_command_writes_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    files = [tmp_path / f"{name}{suffix}" for name in ("one", "other", "third")]
    for file, seed in zip(files, ("3", "3", "4"), strict=True):
        assert main([str(WIKI), str(file), "--seed", seed]) == 0
    one, other, third = (file.read_bytes() for file in files)
    assert one == other != third
    assert read_squad(files[:1]) != read_squad(files[2:])


def test_finetuning_learns_from_it(pretrained: Path, tmp_path: Path) -> None:
    file = tmp_path / "spans.json.xz"
    assert main([str(WIKI), str(file), "--passage-words", "40"]) == 0
    options = ["--initialize-from", str(pretrained / "checkpoint"), "--length", "64"]
    options += ["--question-answering", str(file), "--batch-size", "8", "--steps", "4"]
    options += ["--report-every", "1", "--device", "cpu", "--output", str(tmp_path / "run")]
    assert finetune.main(options) == 0
    assert all("question-answering/loss" in line for line in read_metrics(tmp_path / "run"))


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (None, [], "nowhere.txt does not exist"),
        ("A cat sat.\nA dog ran.", [], "no span of several words recurs in a passage"),
        ("New York is big here.\nWe like New York.", ["--seed", "1"], "neither a .json file"),
        (
            "New York is big here now.\nWe like New York so much.",
            ["--stop-words"],
            "[Errno 2]",
        ),
    ],
)
def test_what_cannot_be_is_one_line(
    text: str | None, more: list[str], message: str, tmp_path: Path, capsys: Capture
) -> None:
    corpus = tmp_path / "nowhere.txt"
    if text is not None:
        corpus.write_text(text)
    output = tmp_path / ("spans.csv" if "neither" in message else "spans.json")
    more = [*more, str(tmp_path / "no-words.txt")] if more == ["--stop-words"] else more
    assert main([str(corpus), str(output), *more]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert not list(tmp_path.glob("spans*"))
