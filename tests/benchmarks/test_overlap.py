"""Contexts that stand in a corpus are counted, and the others' questions written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.overlap import main

WORDS = [f"Word{number}" for number in range(20)]


def squad(*contexts: str) -> str:
    qas = [{"id": "1", "question": "Which?", "answers": [{"text": "x", "answer_start": 0}]}]
    articles = [{"title": c[:3], "paragraphs": [{"context": c, "qas": qas}]} for c in contexts]
    return json.dumps({"version": "1.1", "data": articles})


@pytest.mark.parametrize(
    ("context", "is_known"),
    [
        (" ".join(WORDS), True),
        (", ".join(WORDS).upper(), True),  # whatever stands between the words
        (" ".join([*WORDS[:14], *("other" for _ in range(6))]), True),  # 7 of 13
        (" ".join([*WORDS[:13], *("other" for _ in range(7))]), False),  # 6 of 13
        (" ".join(reversed(WORDS)), False),
        (" ".join(WORDS[:7]), False),  # no 8-gram
    ],
)
def test_contexts_over_the_share_are_those_of_the_corpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], context: str, is_known: bool
) -> None:
    (tmp_path / "corpus.txt").write_text("Before. " + " ".join(WORDS) + "; behind.\n")
    questions, output = tmp_path / "squad.json", tmp_path / "apart.json"
    questions.write_text(squad(context, "nothing of it"))
    command = ["--corpus", str(tmp_path / "corpus.txt"), "--questions", str(questions)]
    assert main([*command, "--output", str(output)]) == 0
    assert f"{int(is_known)} of 2 contexts, in {int(is_known)} of 2 articles" in (
        capsys.readouterr().out
    )
    left = json.loads(output.read_text())["data"]
    expected = json.loads(squad(*([] if is_known else [context]), "nothing of it"))["data"]
    assert left == expected


def test_what_is_no_squad_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.json").write_text("[1]")
    command = ["--corpus", str(tmp_path), "--questions", str(tmp_path / "text.json")]
    assert main(command) == 1
    assert "text.json is not in SQuAD's format" in capsys.readouterr().err
