"""All that is wrong in the data of a run is found before it starts, and listed at once."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.training.support import SQUAD, run_command
from training.commands.finetune import main

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)


def write(file: Path, *lines: str) -> Path:
    file.write_text("\n".join([*lines, ""]))
    return file


def errors_of(capsys: Capture, folder: Path) -> list[str]:
    """The lines of the error, without the folder of the files."""
    lines = capsys.readouterr().err.removeprefix("error: ").splitlines()
    return [line.replace(f"{folder}/", "") for line in lines]


def questions(count: int) -> dict[str, Any]:
    """The first questions of the SQuAD excerpt on its first paragraph."""
    paragraph = json.loads(SQUAD.read_text())["data"][0]["paragraphs"][0]
    kept = {**paragraph, "qas": paragraph["qas"][:count]}
    return {"data": [{"paragraphs": [kept]}]}


def test_long_texts_of_all_splits_are_listed(
    start: list[str], tmp_path: Path, capsys: Capture
) -> None:
    long = "a long text " * 20
    train = write(tmp_path / "a.tsv", "text\tlabel", "a\t0", f"{long}\t1")
    held_out = write(tmp_path / "b.tsv", "text\tlabel", f"{long}\t0")
    options = [*start, "--text-classification", str(train), "--validation", str(held_out)]
    assert run([*options, "--no-truncation"], tmp_path / "run") == 1
    over = "over 64 tokens; --truncation cuts such texts"
    assert errors_of(capsys, tmp_path) == [f"a.tsv, line 3: {over}", f"b.tsv, line 2: {over}"]


def test_errors_of_held_out_questions_do_not_hide_others(
    start: list[str], tmp_path: Path, capsys: Capture
) -> None:
    train, held_out = questions(2), questions(2)
    asked = train["data"][0]["paragraphs"][0]["qas"]
    asked[1]["answers"] = [{"text": " ", "answer_start": 0}]
    held_out["data"] *= 2
    files = [tmp_path / "train.json", tmp_path / "held-out.json"]
    for file, content in zip(files, (train, held_out), strict=True):
        file.write_text(json.dumps(content, indent=1))
    options = [*start, "--question-answering", str(files[0]), "--validation", str(files[1])]
    assert run(options, tmp_path / "run") == 1
    first, second = errors_of(capsys, tmp_path)
    assert first.startswith("train.json, question ")
    assert first.endswith(": the answer is empty; mark the question is_impossible, or leave it out")
    assert second.startswith("2 ids stand for several questions: ")


def test_missing_files_of_all_tasks_are_listed(
    start: list[str], tmp_path: Path, capsys: Capture
) -> None:
    for name in ("cola", "rte", "race"):
        (tmp_path / name).mkdir()
    write(tmp_path / "rte" / "train.tsv", "index\tsentence1\tsentence2\tlabel")
    tasks = ["--task", "cola", "--data", str(tmp_path / "cola")]
    tasks += ["--head", "more", "--task", "rte", "--data", str(tmp_path / "rte")]
    assert run([*start, *tasks], tmp_path / "run") == 1
    assert [line.partition(" file ")[0] for line in errors_of(capsys, tmp_path)] == [
        "cola has no training",
        "cola has no held-out",
        "rte has no held-out",
    ]
    assert run([*start, "--task", "RACE", "--data", str(tmp_path / "race")], tmp_path / "run") == 1
    assert errors_of(capsys, tmp_path) == [
        "race has no training files train/ or train*.jsonl",
        "race has no held-out files dev/ or dev*.jsonl",
    ]


def test_all_that_is_wrong_with_the_data_is_listed_at_once(
    finetune_options: list[str], tmp_path: Path, capsys: Capture
) -> None:
    texts, broken, moved = (tmp_path / name for name in ("a.tsv", "broken.json", "moved.json"))
    texts.write_text("text\tlabel\nx\t1\t2\na war\t0\na game\t1\n")
    broken.write_text("{")
    content = json.loads(SQUAD.read_text())
    answers = content["data"][0]["paragraphs"][0]["qas"][0]["answers"]
    answers[0] = {"text": "not in there", "answer_start": 3}
    moved.write_text(json.dumps(content))
    more = ("--text-classification", str(texts), "--question-answering", str(broken), str(moved))
    assert run(finetune_options, tmp_path / "run", *more) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"error: {texts}, line 2 has 3 fields; the header has 2")
    assert lines[1].startswith(f"{broken} is not in SQuAD's format: the file: Invalid JSON: ")
    assert lines[2].startswith(f"{moved}, question ")
    assert "not the answer 'not in there', which stands at 0 places" in lines[2]
    assert len(lines) == 3
