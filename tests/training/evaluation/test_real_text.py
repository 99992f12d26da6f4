"""Text is read as far as it is needed, of every file."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from albert_serve.tokenizer import AlbertTokenizer
from tests.export.conftest import WIKI
from training.data.preparation import prepare
from training.errors import EvaluationError
from training.evaluation.real_text import read_real_text

ALL = 1 << 30


def test_tokens_are_those_that_pretraining_reads(real_checkpoint: Path, tmp_path: Path) -> None:
    tokenizer_file = real_checkpoint / "tokenizer.json"
    [expected] = prepare([WIKI], tokenizer_file, tmp_path / "shards").parts

    part = read_real_text([WIKI], ALL).tokenize(AlbertTokenizer.from_file(tokenizer_file))

    assert part.tokens.tolist() == expected.tokens.tolist()
    assert part.sentences.tolist() == expected.sentences.tolist()
    assert part.documents.tolist() == expected.documents.tolist()


def test_reading_stops_at_the_number_of_characters(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("\n\n".join([f"{name}{name} one."] * 20))
    text = read_real_text([tmp_path], 250)
    assert text.files == ["a.txt", "b.txt"]
    assert sum(map(len, chain.from_iterable(text.paragraphs))) <= 250


def test_sentences_are_each_there_once(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("One is here. Two is there. One is here.\n\nOne is here.")
    text = read_real_text([file], ALL)
    assert text.sentences == ["One is here.", "Two is there."]
    assert [len(each) for each in text.paragraphs] == [3, 1]


def test_files_without_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.write_text("\n\n")
    with pytest.raises(EvaluationError, match=r"no text in .*empty\.txt"):
        read_real_text([file], ALL)
    assert read_real_text([], ALL).documents == []
