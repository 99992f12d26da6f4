"""Labelled files of every kind are read alike, and bad rows are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from training.data.corpus import CorpusError
from training.data.labelled.columns import Columns
from training.data.labelled.texts import Scale, read_labelled, read_splits, read_texts

ROWS = [("A good film", "pos"), ('A "bad", long film', "neg"), ("Fair", "pos")]


def write(file: Path, content: str) -> Path:
    file.write_text(content)
    return file


def write_kind(folder: Path, kind: str) -> Path:
    file = folder / f"data.{kind}"
    if kind == "jsonl":
        lines = [json.dumps({"text": text, "label": label}) for text, label in ROWS]
        return write(file, "\n".join([*lines, "", ""]))
    if kind == "parquet":
        texts, labels = zip(*ROWS, strict=True)
        pq.write_table(pa.table({"text": texts, "label": labels}), file)
        return file
    if kind == "csv":
        quoted = [f'"{text.replace(chr(34), chr(34) * 2)}",{label}' for text, label in ROWS]
        return write(file, "\n".join(["text,label", *quoted]))
    return write(file, "\n".join(["sentence\tlabel", *("\t".join(row) for row in ROWS)]))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet"])
def test_every_kind_gives_the_same(tmp_path: Path, kind: str) -> None:
    examples, names = read_labelled([write_kind(tmp_path, kind)])
    assert names == ["neg", "pos"]
    assert [(e.text, names[cast("int", e.label)]) for e in examples] == ROWS
    assert {e.pair for e in examples} == {None}


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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "", "no examples in .*a.tsv"),
        ("a.tsv", "text\tlabel\n", "no examples in .*a.tsv"),
        (
            "a.tsv",
            "words\tlabel\na\t1\n",
            "a.tsv, line 1: no column text or sentence or .*; its columns are words, label",
        ),
        (
            "a.tsv",
            "text\tclass\na\t1\n",
            "a.tsv, line 1: no column label or .*; its columns are text, class",
        ),
        ("a.tsv", "text\tlabel\na\t1\nb\n", "line 3: no value in column label"),
        ("a.tsv", "text\tlabel\na\t1\n \t0\n", "line 3: no text"),
        ("a.csv", "text,label\na, b,1\n", "line 2: 3 fields, more than the header's 2"),
        ("a.txt", "text\n", "the format is unknown; name it .csv, .tsv, .jsonl or .parquet"),
        (
            "a.csv",
            "text,text,label\na,b,0\n",
            r"a.csv, line 1: columns of the same name \(text\); its columns are text, text, label",
        ),
        ("a.jsonl", "{\n", "a.jsonl, line 1 is not JSON: Expecting property name"),
        ("a.parquet", "PAR1", "a.parquet is damaged or incomplete"),
        ("a.jsonl", '{"text": "a", "label": 1}\n[1]\n', "line 2 is not a JSON object"),
        ("a.jsonl", '{"text": ["a"], "label": 1}\n', "line 1: no text"),
        (
            "a.jsonl",
            '{"text": "a", "text_pair": ["b"], "label": 1}\n',
            "line 1: no text",
        ),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        read_labelled([write(tmp_path / name, content)])


def test_all_bad_rows_are_listed_at_once(tmp_path: Path) -> None:
    rows = ["a\t0", "\t1", "b\t", "c\t7", *["d\t9"] * 30]
    file = write(tmp_path / "a.tsv", "\n".join(["text\tlabel", *rows]))
    with pytest.raises(CorpusError) as caught:
        read_labelled([file], ["no", "yes"])
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("line 3: no text")
    assert lines[1].endswith("line 4: no value in column label")
    assert lines[2].endswith("line 5: label '7' (1 rows); allowed are no, yes")
    assert lines[3].endswith("line 6: label '9' (30 rows); allowed are no, yes")
    empty = write(tmp_path / "b.tsv", "\n".join(["text\tlabel", *["\t1"] * 31]))
    with pytest.raises(CorpusError, match="line 21: no text\nand 11 more"):
        read_labelled([empty])


@pytest.mark.parametrize("delimiter", [",", ";", "|", "\t"])
def test_the_delimiter_of_a_csv_file_is_detected(tmp_path: Path, delimiter: str) -> None:
    content = f'text{delimiter}label\n"a{delimiter} b"{delimiter}1\nc{delimiter}0\n'
    examples, _ = read_labelled([write(tmp_path / "a.csv", content)])
    assert [e.text for e in examples] == [f"a{delimiter} b", "c"]


def test_columns_can_be_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "id,body,title,team,text\n1,long,short,x,no\n2,b,t,y,no\n")
    columns = Columns(text="title", pair="body", label="team")
    examples, names = read_labelled([file], columns=columns)
    assert names == ["x", "y"]
    assert [(e.text, e.pair) for e in examples] == [("short", "long"), ("t", "b")]
    assert read_texts([file], Columns(text="body")) == [("long", None), ("b", None)]
    for wrong in (Columns(text="Title"), Columns(label="class"), Columns(pair="none")):
        with pytest.raises(CorpusError, match="its columns are id, body, title, team, text"):
            read_labelled([file], columns=wrong)


@pytest.mark.parametrize(
    ("header", "pair"),
    [
        ("index\tquestion\tsentence\tlabel", ("question", "sentence")),  # QNLI
        ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", ("question1", "question2")),
        ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", ("#1 String", "#2 String")),  # MRPC
        ("premise\thypothesis\tlabel", ("premise", "hypothesis")),
        ("sentence1\tsentence2\tgold_label", ("sentence1", "sentence2")),  # MNLI
        ("sentence\tlabel", ("sentence", None)),  # SST-2
    ],
)
def test_columns_of_public_data_sets(
    tmp_path: Path, header: str, pair: tuple[str, str | None]
) -> None:
    names = header.split("\t")
    file = write(tmp_path / "a.tsv", f"{header}\n" + "\t".join(f"<{name}>" for name in names))
    (example,), _ = read_labelled([file])
    assert (example.text, example.pair) == tuple(name and f"<{name}>" for name in pair)


SPLITS = {"training": "text\tlabel\na\tno\nb\tyes\n", "validation": "text\tlabel\nc\tyes\n"}


def splits_of(folder: Path, **contents: str) -> dict[str, list[Path]]:
    return {
        split: [write(folder / f"{split}.tsv", content)]
        for split, content in {**SPLITS, **contents}.items()
    }


def test_a_split_may_number_the_labels_that_another_names(tmp_path: Path) -> None:
    files = splits_of(tmp_path, validation="text\tlabel\nc\t1\nd\t0\n")
    splits = read_splits(files, ["no", "yes"])
    assert [e.label for e in splits.texts["validation"]] == [1, 0]


def test_all_that_is_wrong_in_any_file_is_listed_at_once(tmp_path: Path) -> None:
    broken = '{"text": "a", "label": 1}\n{"text": \n{"words": "c", "label": 1}\n'
    files = {
        "training": [
            write(tmp_path / "a.tsv", "text\tlabel\na\tno\n\tyes\nb\tyes\n"),
            write(tmp_path / "comma.tsv", "text,label\nc,no\n"),
            write(tmp_path / "broken.jsonl", broken),
            tmp_path / "none.csv",
        ],
        "validation": [write(tmp_path / "b.csv", "text,label\nx,maybe\ny,no,more\n")],
        "test": [write(tmp_path / "empty.tsv", "text\tlabel\n")],
    }
    with pytest.raises(CorpusError) as caught:
        read_splits(files)
    lines = [line.removeprefix(f"{tmp_path}/") for line in str(caught.value).splitlines()]
    assert lines[0] == "a.tsv, line 3: no text"
    assert lines[1].startswith("comma.tsv, line 1: no column text or ")
    assert lines[1].endswith("; its columns are text,label; is its delimiter ','? Give --delimiter")
    assert lines[2].startswith("broken.jsonl, line 2 is not JSON: Expecting value")
    assert lines[3].startswith("broken.jsonl, line 3: no column text or ")
    assert "none.csv" in lines[4]
    assert lines[5].startswith("b.csv, line 3: 3 fields, more than the header's 2 ")
    assert lines[6] == f"no examples in {tmp_path}/empty.tsv"
    assert lines[7] == "b.csv, line 2: label 'maybe' (1 rows); the training split has 1, no, yes"
    assert len(lines) == 8


def test_a_label_that_no_row_of_training_has_is_refused(tmp_path: Path) -> None:
    """Though it is among the names."""
    files = splits_of(tmp_path, validation="text\tlabel\nc\tyes\nd\tmaybe\ne\tmaybe\n")
    message = r"validation.tsv, line 3: label 'maybe' \(2 rows\); the training split has no, yes"
    with pytest.raises(CorpusError, match=message):
        read_splits(files, ["no", "yes", "maybe"])


def test_scores_are_numbers_of_their_scale(tmp_path: Path) -> None:
    scale = Scale(least=0, most=5)
    file = write(tmp_path / "a.tsv", "text\ttext_pair\tlabel\na\tb\t3.8\nc\td\t5\n")
    splits = read_splits({"training": [file]}, problem="regression", scale=scale)
    assert splits.names == ["score"]
    assert [e.label for e in splits.texts["training"]] == [3.8, 5.0]
    write(file, "text\tlabel\na\t5.1\nb\tnan\nc\tx\nd\t1\n")
    with pytest.raises(CorpusError) as caught:
        read_splits({"training": [file]}, problem="regression", scale=scale)
    lines = str(caught.value).splitlines()
    for line, (number, text) in zip(lines, [(2, "5.1"), (3, "nan"), (4, "x")], strict=True):
        assert line == f"{file}, line {number}: '{text}' is not a number from 0 to 5"


def test_a_file_without_a_header_is_read_by_the_columns_order(tmp_path: Path) -> None:
    columns = Columns(
        text="sentence", label="label", headerless=("source", "label", "x", "sentence")
    )
    bare = "gj04\t1\t\tThe boat sank.\ngj04\t0\t*\tSank the.\n"
    for content in (bare, "source\tlabel\tx\tsentence\n" + bare):
        examples, _ = read_labelled([write(tmp_path / "a.tsv", content)], columns=columns)
        assert [(e.text, e.label) for e in examples] == [("The boat sank.", 1), ("Sank the.", 0)]
    assert [e.place for e in examples] == [f"{tmp_path}/a.tsv, line {n}" for n in (2, 3)]


def test_short_rows_can_be_left_out(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tsv", "text\tlabel\na\tno\nb\n\tyes\nc\tyes\n")
    splits = read_splits({"training": [file]}, columns=Columns(short_rows="leave out"))
    assert [e.text for e in splits.texts["training"]] == ["a", "c"]
    assert splits.num_left_out == {file: 2}


def errors_of(file: Path) -> list[str]:
    with pytest.raises(CorpusError) as caught:
        read_labelled([file])
    return [line.removeprefix(f"{file}, ") for line in caught.value.args]


def test_a_file_is_read_up_to_a_stray_quote(tmp_path: Path) -> None:
    content = 'label,text\n,none\n1,"foo\n0,mid\n0,"bar\n'
    none, stray = errors_of(write(tmp_path / "a.csv", content))
    assert none == "line 2: no value in column label"
    assert stray == (
        "line 3: in line 5 ',' expected after '\"'; a quoted field ends at its second quote, and "
        "quotes in it are doubled"
    )


def test_a_row_that_is_not_utf8_is_named_and_later_ones_too(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbflabel,text\n1,caf\xe9\n,b\n")
    assert errors_of(tmp_path / "a.csv") == [
        "line 2: it is not UTF-8",
        "line 3: no value in column label",
    ]


def test_quoted_fields_may_have_line_ends_and_quotes(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", 'label,text\n1,"one\n\n""two"""\n0,"a, b"\n0,it"s\n')
    examples, _ = read_labelled([file])
    assert [e.text for e in examples] == ['one\n\n"two"', "a, b", 'it"s']
    assert [e.place.rpartition(" ")[2] for e in examples] == ["2", "5", "6"]


@pytest.mark.parametrize("labels", ["0 1", "0", "0 1 2 3 4"])
def test_names_that_are_numbers_are_never_taken_for_indices(tmp_path: Path, labels: str) -> None:
    """As of a model that gives one to five stars."""
    rows = "".join(f"text\t{label}\n" for label in labels.split())
    file = write(tmp_path / "a.tsv", f"text\tlabel\n{rows}")
    with pytest.raises(CorpusError) as caught:
        read_labelled([file], ["1", "2", "3", "4", "5"])
    assert str(caught.value) == (f"{file}, line 2: label '0' (1 rows); allowed are 1, 2, 3, 4, 5")


def test_what_has_no_text_in_the_column_of_pairs_is_no_pair(tmp_path: Path) -> None:
    rows = ('"text_pair": NaN', '"text_pair": null', '"text_pair": ""', '"text_pair": "  "')
    lines = [f'{{"text": "a", "label": 1, {row}}}' for row in rows]
    file = write(tmp_path / "a.jsonl", "\n".join(lines))
    examples, _ = read_labelled([file])
    assert [e.pair for e in examples] == [None] * 4
    with pytest.raises(CorpusError) as caught:
        read_labelled([file], columns=Columns(pairs="required"))
    assert str(caught.value).splitlines() == [f"{file}, line {n}: no text" for n in range(1, 5)]
