"""The table of embeddings has the same figures, whatever opens the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from albert_serve.bundle.sentence_vectors import SentenceVectors, write_sentence_vectors
from benchmarks.embeddings import main

STSB = """genre\tfile\tyear\t1\t4.5\tThe team won the game.\tThey won two games in May.
genre\tfile\tyear\t2\t1.5\tThe team won the game.\tHer father had been a king.
genre\tfile\tyear\t3\t3.0\tThe school is in the city.\tA river was named after him.
"""
SQUAD = {
    "data": [
        {
            "title": "A",
            "paragraphs": [
                {
                    "context": context,
                    "qas": [{"id": context[:5], "question": asked, "answers": []}],
                }
                for context, asked in (
                    ("The school is in the city.", "Where is the school?"),
                    ("The river was named in May.", "When was the river named?"),
                )
            ],
        }
    ]
}


def test_a_bundle_has_the_figures_of_sentence_transformers(
    checkpoint_dir: Path,
    bundle_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    peer = tmp_path / "peer"
    shutil.copytree(checkpoint_dir, peer)
    hidden_size = json.loads((peer / "config.json").read_text())["hidden_size"]
    write_sentence_vectors(SentenceVectors(), peer, hidden_size=hidden_size)
    stsb = tmp_path / "sts.tsv"
    stsb.write_text(STSB)
    squad = tmp_path / "squad.json"
    squad.write_text(json.dumps(SQUAD))
    command = [str(bundle_dir), "--sentence-transformers", str(peer)]
    assert main([*command, "--stsb", str(stsb), "--squad", str(squad), "--threads", "1"]) == 0
    heading, _, *lines = capsys.readouterr().out.splitlines()
    assert "STS-B, 3 | SQuAD, 2" in heading
    ours, theirs, words = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[0].split()[0] for row in (ours, theirs, words)] == ["tiny", "peer", "TF-IDF"]
    assert ours[1:] == theirs[1:]
    assert words[2] == "100.00"
