"""Text is read as far as it is needed, of every file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from albert_serve.tokenizer import AlbertTokenizer
from tests.export.conftest import WIKI
from training.evaluation.predictions import EvaluationError
from training.evaluation.real_text import RealText, read_real_text
from training.prepare import prepare

ALL = 1 << 30


def written(text: RealText) -> str:
    return " ".join(paragraph.text for paragraph in text.paragraphs)


def test_tokens_are_those_that_pretraining_reads(real_checkpoint: Path, tmp_path: Path) -> None:
    tokenizer_file = real_checkpoint / "tokenizer.json"
    [expected] = prepare([WIKI], tokenizer_file, tmp_path / "shards").parts

    part = read_real_text([WIKI], ALL).tokenize(AlbertTokenizer.from_file(tokenizer_file))

    assert part.tokens.tolist() == expected.tokens.tolist()
    assert part.sentences.tolist() == expected.sentences.tolist()
    assert part.documents.tolist() == expected.documents.tolist()


def test_sentences_of_no_tokens_are_left_out(real_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    texts = ["\u200b\n\u200b", "The city.\n\u200b\nThe school."]
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenizer = AlbertTokenizer.from_file(real_checkpoint / "tokenizer.json")
    assert tokenizer.encode_plain("\u200b").ids == []

    part = read_real_text([file], ALL).tokenize(tokenizer)

    assert (part.num_documents, part.num_sentences) == (1, 2)


def test_reading_stops_at_the_number_of_items(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("\n\n".join([f"{name}{name} one."] * 1000))
    text = read_real_text([tmp_path], 300)
    assert text.files == ["a.txt", "b.txt", "c.txt"]
    assert len(written(text)) < 400
    assert read_real_text([tmp_path], 1).files == ["a.txt"]
    assert all(3 < written(text).count(name * 2) < 20 for name in "abc")


def test_a_document_without_end_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("word " * 100_000)
    assert len(written(read_real_text([file], 1000))) == 1000


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6), limit=st.integers(1, 200))
def test_a_file_leaves_its_share_to_those_after_it(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("files")
    for number, size in enumerate(sizes):
        (folder / f"{number}.txt").write_text("x" * size)
    files = [folder / f"{number}.txt" for number in range(len(sizes))]
    num_read = sum(len(paragraph.text) for paragraph in read_real_text(files, limit).paragraphs)
    assert num_read <= min(limit, sum(sizes))
    assert num_read >= min(sum(sizes), limit) or any(size > limit // len(sizes) for size in sizes)


def test_files_of_one_name(tmp_path: Path) -> None:
    for name, sentence in (("a", "One."), ("b", "Two.")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "dev.txt").write_text(sentence)
    text = read_real_text([tmp_path / "a", tmp_path / "b"], ALL)
    assert (text.files, text.sentences) == (["dev.txt"], ["One.", "Two."])


def test_sentences_are_each_there_once(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("One is here. Two is there. One is here.\n\nOne is here.")
    text = read_real_text([file], ALL)
    assert text.sentences == ["One is here.", "Two is there."]
    assert [len(each.sentences) for each in text.paragraphs] == [3, 1]


def test_files_without_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.write_text("\n\n")
    with pytest.raises(EvaluationError, match=r"no text in .*empty\.txt"):
        read_real_text([file], ALL)
    assert read_real_text([], ALL).documents == []
