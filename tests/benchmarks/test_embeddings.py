"""The table of embeddings is by MTEB's protocol, whatever opens the model."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from albert_serve.bundle.sentence_vectors import SentenceVectors, write_sentence_vectors
from benchmarks.embeddings import main, undersampled

STSB = """genre\tfile\tyear\t1\t4.5\tThe team won the game.\tThey won two games in May.
genre\tfile\tyear\t2\t1.5\tThe team won the game.\tHer father had been a king.
genre\tfile\tyear\t3\t3.0\tThe school is in the city.\tA river was named after him.
"""
INTENTS = """text,category
Where is my card?,card
When does my card come?,card
Which card is mine?,card
What is the rate?,rate
How is the rate set?,rate
Which rate is mine?,rate
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


def test_each_experiment_shuffles_the_order_of_the_one_before_by_the_same_seed() -> None:
    labels = [0, 0, 0, 0, 0, 1, 1, 1, 1, 2]
    chosen = list(undersampled(labels, 2, 3))
    first = np.arange(10)
    np.random.RandomState(42).shuffle(first)
    second = first.copy()
    np.random.RandomState(42).shuffle(second)
    for indices, order in zip(chosen, (first, second), strict=False):
        assert indices == sorted(indices, key=order.tolist().index)
        assert Counter(labels[index] for index in indices) == {0: 2, 1: 2, 2: 1}
        for label in (0, 1):
            of_label = [index for index in order if labels[index] == label]
            assert [index for index in indices if labels[index] == label] == of_label[:2]
    assert len({tuple(indices) for indices in chosen}) == 3


def test_a_bundle_and_a_peer_have_the_figures_of_their_checkpoint(
    checkpoint_dir: Path,
    bundle_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    peer = tmp_path / "peer"
    shutil.copytree(checkpoint_dir, peer)
    hidden_size = json.loads((peer / "config.json").read_text())["hidden_size"]
    write_sentence_vectors(SentenceVectors(), peer, hidden_size=hidden_size)
    stsb, intents = tmp_path / "sts.tsv", tmp_path / "intents.csv"
    stsb.write_text(STSB)
    intents.write_text(INTENTS)
    squad = tmp_path / "squad.json"
    squad.write_text(json.dumps(SQUAD))
    command = [str(checkpoint_dir), str(bundle_dir), "--sentence-transformers", str(peer)]
    command += ["--stsb", str(stsb), "--squad", str(squad)]
    command += ["--banking77", str(intents), str(intents), "--threads", "1"]
    assert main(command) == 0
    heading, _, *lines = capsys.readouterr().out.splitlines()
    assert "STS-B, 3" in heading
    assert "Banking77, all, 6" in heading
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    names = [checkpoint_dir.name, "tiny", "peer", "TF-IDF"]
    assert [row[0].split()[0] for row in rows] == names
    assert rows[0][1:7] == rows[1][1:7] == rows[2][1:7]
    assert rows[3][2:] == ["100.00", "100.00", "100.00", "100.00", "100.00", ""]
