"""Labelled files of every kind are read alike, and bad rows are named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.support import SQUAD
from training.data.corpus import CorpusError
from training.data.datasets import read_labelled, read_squad

ROWS = [("A good film", "pos"), ('A "bad", long film', "neg"), ("Fair", "pos")]


def write(file: Path, content: str) -> Path:
    file.write_text(content)
    return file


def write_kind(folder: Path, kind: str) -> Path:
    file = folder / f"data.{kind}"
    if kind == "jsonl":
        lines = [json.dumps({"text": text, "label": label}) for text, label in ROWS]
        return write(file, "\n".join([*lines, "", ""]))
    if kind == "csv":
        quoted = [f'"{text.replace(chr(34), chr(34) * 2)}",{label}' for text, label in ROWS]
        return write(file, "\n".join(["text,label", *quoted]))
    return write(file, "\n".join(["sentence\tlabel", *("\t".join(row) for row in ROWS)]))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv"])
def test_every_kind_gives_the_same(tmp_path: Path, kind: str) -> None:
    examples, names = read_labelled([write_kind(tmp_path, kind)])
    assert names == ["neg", "pos"]
    assert [(e.text, names[e.label]) for e in examples] == ROWS
    assert {e.pair for e in examples} == {None}


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    plain = write_kind(tmp_path, "tsv")
    packed = tmp_path / "data.tsv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_labelled([packed]) == read_labelled([plain])
    assert len(read_labelled([packed, plain])[0]) == 6


@pytest.mark.parametrize(
    "header",
    [
        "sentence1\tsentence2\tlabel",
        "sentence_A\tsentence_B\tentailment_judgment",
        "text\ttext_pair\tcategory",
    ],
)
def test_pairs(tmp_path: Path, header: str) -> None:
    file = write(tmp_path / "a.tsv", f"{header}\nIt rains.\tIt is wet. \tyes\nOne.\t\tno\n")
    examples, _ = read_labelled([file])
    assert [(e.text, e.pair, e.label) for e in examples] == [
        ("It rains.", "It is wet.", 1),
        ("One.", None, 0),
    ]


def test_labels_that_are_numbers_are_named_in_order(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tsv", "text\tlabel\nno\t0\nyes\t1\n")
    examples, names = read_labelled([file], ["negative", "positive"])
    assert names == ["negative", "positive"]
    assert [e.label for e in examples] == [0, 1]


def test_names_that_the_file_uses_set_the_order(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tsv", "text\tlabel\nx\tneg\ny\tpos\n")
    examples, names = read_labelled([file], ["pos", "neg", "mixed"])
    assert names == ["pos", "neg", "mixed"]
    assert [e.label for e in examples] == [1, 0]


def test_numbers_are_sorted_by_value(tmp_path: Path) -> None:
    rows = "".join(f"text {n}\t{n}\n" for n in (10, 2, 0, 1, 11))
    examples, names = read_labelled([write(tmp_path / "a.tsv", "text\tlabel\n" + rows)])
    assert names == ["0", "1", "2", "10", "11"]
    assert [names[e.label] for e in examples] == ["10", "2", "0", "1", "11"]


def test_json_labels_may_be_numbers(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n')
    assert [e.label for e in read_labelled([file])[0]] == [1, 0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "", "no examples in .*a.tsv"),
        ("a.tsv", "text\tlabel\n", "no examples in .*a.tsv"),
        ("a.tsv", "words\tlabel\na\t1\n", "row 1: no value in a column text or sentence"),
        ("a.tsv", "text\tlabel\na\t1\nb\n", "row 2: no value in a column label"),
        ("a.tsv", "text\tlabel\na\t1\n \t0\n", "row 2: no value in a column text"),
        ("a.txt", "text\n", "the kind is not known; name it .tsv, .csv or .jsonl"),
        ("a.jsonl", "{\n", "a.jsonl: Expecting property name"),
        ("a.jsonl", '{"text": "a", "label": 1}\n[1]\n', "line 2: no JSON object"),
        ("a.jsonl", '{"text": ["a"], "label": 1}\n', "row 1: no value in a column text"),
        (
            "a.jsonl",
            '{"text": "a", "text_pair": ["b"], "label": 1}\n',
            "row 1: no value in a column text_pair",
        ),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        read_labelled([write(tmp_path / name, content)])


def test_a_label_without_a_name_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tsv", "text\tlabel\na\t0\nb\t2\n")
    with pytest.raises(CorpusError, match="row 2: label '2'; allowed are no, yes"):
        read_labelled([file], ["no", "yes"])


def test_a_missing_file(tmp_path: Path) -> None:
    for read in (read_labelled, read_squad):
        with pytest.raises(CorpusError, match="No such file"):
            read([tmp_path / "none.tsv"])


def test_squad_questions_stand_in_their_contexts() -> None:
    questions = read_squad([SQUAD])
    assert len(questions) == 33
    assert len({question.id for question in questions}) == 33
    for question in questions:
        assert question.start is not None
        assert question.context[question.start :].startswith(question.answers[0])


def squad(*entry: dict[str, Any]) -> str:
    return json.dumps({"data": [{"paragraphs": [{"context": "A b.", "qas": list(entry)}]}]})


def test_a_question_without_an_answer(tmp_path: Path) -> None:
    entry = {"id": "x", "question": " Why? ", "answers": [], "is_impossible": True}
    (question,) = read_squad([write(tmp_path / "a.json", squad(entry))])
    assert (question.question, question.answers, question.start) == ("Why?", (), None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON: .*is it complete"),
        ("{}", "not in SQuAD's format: KeyError\\('data'\\)"),
        ("[]", "not in SQuAD's format"),
        ('{"data": [{"paragraphs": [1]}]}', "not in SQuAD's format"),
        (squad({"id": "x", "question": "Why?"}), "KeyError\\('answers'\\)"),
        (squad({"id": "x", "question": 5, "answers": []}), "not in SQuAD's format"),
        ('{"data": []}', "no questions in"),
    ],
)
def test_files_that_are_not_squad_s(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        read_squad([write(tmp_path / "a.json", content)])
