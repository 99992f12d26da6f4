"""Labelled files of every kind are read alike, and all that is wrong in them is listed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.albert_serve.scoring.jobs import write_dataset
from tests.training.support import read_labelled, write
from training.data.corpus import CorpusError
from training.data.labelled.columns import Columns
from training.data.labelled.folders import files_of_split, labelled_files
from training.tasks.classification.files import read_splits, read_texts

MULTI: Final = "multi_label_classification"


def errors_of(folder: Path, file: Path, *arguments: Any, **options: Any) -> list[str]:
    """The lines of the error of files that cannot be read, without their folder."""
    with pytest.raises(CorpusError) as caught:
        read_labelled([file], *arguments, **options)
    return [line.replace(f"{folder}/", "") for line in caught.value.args]


TEXTS: Final = ["A good film", 'A "bad", long film', "Fair", "one\n\ntwo"]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_every_kind_gives_the_same(tmp_path: Path, kind: str) -> None:
    file, labels = tmp_path / f"data.{kind}", ["pos", "neg", "pos", "pos"]
    rows = list(zip(TEXTS, labels, strict=True))
    if kind == "parquet":
        pq.write_table(pa.table({"text": TEXTS, "label": labels}), file)
    elif kind == "csv":
        quoted = [f'"{text.replace(chr(34), chr(34) * 2)}",{label}' for text, label in rows]
        write(file, "\n".join(["\ufefftext,label", *quoted]))
    else:
        lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
        write(file, "\n".join([*lines, "", ""]))
    examples, names = read_labelled([file])
    assert names == ["neg", "pos"]
    assert [(e.text, e.label, e.pair) for e in examples] == [
        (text, int(label == "pos"), None) for text, label in rows
    ]
    assert examples[-1].place.endswith("line 5" if kind == "csv" else " 4")


def test_columns_can_be_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "id,body,title,team,text\n1,long,short,x,no\n2,b,t,y,no\n")
    columns = Columns(text="title", pair="body", label="team")
    examples, names = read_labelled([file], columns=columns)
    assert names == ["x", "y"]
    assert [(e.text, e.pair) for e in examples] == [("short", "long"), ("t", "b")]
    assert read_texts([file], Columns(text="body")) == [("long", None), ("b", None)]
    assert read_labelled([file], columns=Columns(text="Title", label="TEAM"))[1] == names
    for wrong in (Columns(text="titles"), Columns(label="class"), Columns(pair="none")):
        [error] = errors_of(tmp_path, file, columns=wrong)
        assert error.endswith("The columns are id, body, title, team, text.")


@pytest.mark.parametrize(
    ("header", "pair"),
    [
        ("index\tquestion\tsentence\tlabel", ("question", "sentence")),  # QNLI
        ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", ("question1", "question2")),
        ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", ("#1 String", "#2 String")),  # MRPC
        ("premise\thypothesis\tlabel", ("premise", "hypothesis")),
        ("sentence1\tsentence2\tgold_label", ("sentence1", "sentence2")),  # MNLI
        ("text\ttext_pair\tcategory", ("text", "text_pair")),
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


@pytest.mark.parametrize(
    ("name", "content", "messages"),
    [
        ("a.tsv", "text\tlabel\n", ["There are no examples in a.tsv"]),
        (
            "a.tsv",
            "words\tlabel\na\t1\n",
            ["a.tsv, line 1: There is no column text or "],
        ),
        ("a.tsv", "text\tclass\na\t1\n", ["a.tsv, line 1: There is no column label or category"]),
        ("a.csv", "text,label\na, b,1\n", ["a.csv, line 2 has 3 fields, but the header has 2"]),
        (
            "a.csv",
            'label,text\n,none\n1,"foo\n0,mid\n0,"bar\n',
            ["a.csv, line 3: in line 5 ',' expected after '\"'; a quoted field ends at "],
        ),
        (
            "a.csv",
            "Text,TEXT,label\na,b,x\n",
            ["a.csv, line 1: the columns 'Text' and 'TEXT' differ"],
        ),
        (
            "a.csv",
            b"label,text\n1,caf\xe9\n,b\n",
            ["a.csv, line 2: The column 'text' is not UTF-8. Convert the file"],
        ),
        (
            "a.tsv",
            "text,label\nc,no\n",
            ["columns are text,label. Is ',' the delimiter? Then set --delimiter"],
        ),
        ("a.csv", "text,text,label\na,b,0\n", ["a.csv has several columns 'text'"]),
        ("a.txt", "text\n", ["a.txt has no known suffix. Rename it to .csv, .tsv, .jsonl or "]),
        ("a.parquet", "PAR1", ["a.parquet is damaged or incomplete"]),
        (
            "a.jsonl",
            '{"\n[1]\n{"text": ["a"], "label": 1}\n{"text": "a", "label": [1]}',
            [
                "a.jsonl, line 1 is not JSON: Invalid control character",
                "a.jsonl, line 2 is not a JSON object",
                "a.jsonl, line 3: no text, but ['a']",
                "a.jsonl, line 4: column label contains lists. If texts have several labels",
            ],
        ),
        (
            "a.jsonl",
            '{"text": "a", "label": {"name": "a"}}',
            ["a.jsonl, line 1: column label contains nested values. Choose a column"],
        ),
        (
            "a.jsonl",
            r'{"text": "\ud83d", "label": 1}',
            ["a.jsonl, line 1: The column 'text' contains half of a surrogate pair"],
        ),
        ("none.tsv", None, ["none.tsv does not exist."]),
    ],
)
def test_bad_files_are_named(
    tmp_path: Path, name: str, content: str | bytes | None, messages: Sequence[str]
) -> None:
    if content is not None:
        write(tmp_path / name, content)
    errors = errors_of(tmp_path, tmp_path / name)
    for error, message in zip(errors, messages, strict=True):
        assert message in error


def test_of_columns_that_differ_in_case_the_one_in_lower_case_is_read(tmp_path: Path) -> None:
    examples, _ = read_labelled([write(tmp_path / "b.csv", "Text,text,label\na,b,x\n")])
    assert examples[0].text == "b"


@pytest.mark.parametrize("missing", ["-1", "-", ""])
def test_rows_without_a_label_are_left_out_and_counted(
    tmp_path: Path, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.tsv", f"text\tlabel\na\t0\nb\t{missing}\nc\t1\nd\t{missing}\n")
    examples, names = read_labelled([file])
    assert (names, [example.text for example in examples]) == (["0", "1"], ["a", "c"])
    reason = f"with the label {missing} (--labels names it, if it is one)" if missing else ""
    line = f"2 of 4 rows are omitted: 2 {reason or 'without a label'}.\n"
    assert capsys.readouterr().out == line
    if missing:
        examples, _ = read_labelled([file], ["0", "1", missing])
        assert [example.label for example in examples] == [0, 2, 1, 2]
    write(file, f"text\tlabel\na\t{missing}\n")
    [error] = errors_of(tmp_path, file)
    assert error.startswith("There are no examples: 1 of 1 rows are omitted: 1 with")


CLASSES: Final = ["entailment", "contradiction"]
UNNAMED: Final = ["LABEL_0", "LABEL_1"]


def with_classes(table: pa.Table) -> pa.Table:
    """With the metadata that `datasets` writes."""
    features = {"label": {"names": CLASSES, "_type": "ClassLabel"}, "text": {"dtype": "string"}}
    return table.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_the_names_of_classes_are_those_of_the_file(tmp_path: Path, kind: str) -> None:
    table = with_classes(pa.table({"text": ["a", "b", "c"], "label": [1, 0, -1]}))
    if kind == "arrow":
        write_dataset(tmp_path / "train", table)
    else:
        (tmp_path / "train").mkdir()
        pq.write_table(table, tmp_path / "train" / "a.parquet")
    files = labelled_files([tmp_path], "train")
    examples, names = read_labelled(files)
    assert (names, [example.label for example in examples]) == (CLASSES, [1, 0])
    # A model may have them in another order, or names of its own.
    examples, _ = read_labelled(files, CLASSES[::-1])
    assert [example.label for example in examples] == [0, 1]
    for label_names, expected in ((["Contradiction", "ENTAILMENT"], [0, 1]), (UNNAMED, [1, 0])):
        examples, _ = read_labelled(files, label_names)
        assert [example.label for example in examples] == expected
    [error] = errors_of(tmp_path, *files, label_names=["yes", "no"])
    assert "numbers the labels entailment, contradiction, which are not yes, no" in error


def test_labels_are_names_case_aside_or_numbers(tmp_path: Path) -> None:
    names = ["Negative", "POSITIVE"]
    for labels, expected in (("positive negative", [1, 0]), ("1 0", [1, 0])):
        rows = "".join(f"text,{label}\n" for label in labels.split())
        files = [write(tmp_path / "a.csv", f"text,label\n{rows}")]
        splits = read_splits({"test": files}, names)
        assert [example.label for example in splits.texts["test"]] == expected
        assert splits.are_numbered == (labels == "1 0")


def test_spellings_of_a_label_that_differ_in_case_and_outer_spaces_are_one_label(
    tmp_path: Path,
) -> None:
    """Also in validation; the first spelling is its name."""
    rows = "".join(f"text,{label}\n" for label in ("Refund", "Late", " late ", "REFUND\u00a0"))
    files = {
        "training": [write(tmp_path / "a.csv", f"text,label\n{rows}")],
        "validation": [write(tmp_path / "b.csv", "text,label\nc,LATE\nd,refund\n")],
    }
    splits = read_splits(files)
    assert splits.names == ["Late", "Refund"]
    assert [text.label for text in splits.texts["training"]] == [1, 0, 0, 1]
    assert [text.label for text in splits.texts["validation"]] == [0, 1]
    # Those of a checkpoint, one of which has both spellings as labels.
    (texts,) = read_splits({"test": files["validation"]}, ["LATE ", "Refund"]).texts.values()
    assert [text.label for text in texts] == [0, 1]
    (texts,) = read_splits(
        {"test": files["validation"]}, ["refund", "LATE", "Refund"]
    ).texts.values()
    assert [text.label for text in texts] == [1, 0]


def test_a_whole_number_is_one_class_however_it_is_written(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "text,label\na,1\nb,1.0\nc,2\nd,2.\n")
    examples, names = read_labelled([file])
    assert (names, [example.label for example in examples]) == (["1", "2"], [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("column", "names"),
    [
        (pa.array([Decimal("1.50"), Decimal("2.50")]), ["1.50", "2.50"]),
        (pa.array([Decimal("0.0"), Decimal("1.0")]), ["0", "1"]),
        (pa.array([b"no", "s\u00ed".encode()]), ["no", "s\u00ed"]),
    ],
    ids=["decimal", "whole decimal", "binary"],
)
def test_labels_of_other_types_are_values(
    tmp_path: Path, column: pa.Array, names: list[str]
) -> None:
    pq.write_table(pa.table({"text": [b"a", b"b"], "label": column}), tmp_path / "a.parquet")
    examples, found = read_labelled([tmp_path / "a.parquet"])
    assert (found, [example.text for example in examples]) == (names, ["a", "b"])


def test_a_missing_score_is_left_out_where_no_other_is_negative(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.csv", "text,label\na,3.5\nb,-1\nc,0\nd,-1.0\n")
    examples, _ = read_labelled([file], problem="regression")
    assert [example.label for example in examples] == [3.5, 0.0]
    assert "2 of 4 rows are omitted: without a score (-1)" in capsys.readouterr().out
    write(file, "text,label\na,0.5\nb,-1\nc,-0.5\n")
    examples, _ = read_labelled([file], problem="regression")
    assert [example.label for example in examples] == [0.5, -1.0, -0.5]


@pytest.mark.parametrize(
    ("labels", "is_asked"),
    [
        ([f"{number / 10}" for number in range(30)], True),
        (["1.5", "2", "2.5"], False),
        ([f"{number}.0" for number in range(150)], False),
        (list(map(str, range(300))), True),
        ([f"intent {number}" for number in range(5000)], False),
    ],
    ids=["scores", "halves", "integers", "many", "names"],
)
def test_many_numbers_are_asked_about(tmp_path: Path, labels: list[str], is_asked: bool) -> None:
    rows = "".join(f"x\t{label}\n" for label in labels)
    files = {"training": [write(tmp_path / "a.tsv", f"text\tlabel\n{rows}")]}
    assert len(read_splits(files).names) == len(labels)
    if not is_asked:
        assert len(read_splits(files, problem=None).names) == len(labels)
        return
    with pytest.raises(CorpusError, match=r"type regression for .* single_label_classification"):
        read_splits(files, problem=None)


def test_all_that_is_wrong_in_any_file_is_listed_at_once(tmp_path: Path) -> None:
    files = {
        "training": [
            write(tmp_path / "a.tsv", "text\tlabel\na\tno\nb\tyes\textra\nc\tyes\n"),
            write(tmp_path / "broken.jsonl", '{"text": \n{"words": "c", "label": 1}\n'),
        ],
        "validation": [write(tmp_path / "b.csv", "text,label\n" + "x,maybe\n" * 30)],
        "test": [write(tmp_path / "empty.tsv", "text\tlabel\n")],
    }
    with pytest.raises(CorpusError) as caught:
        read_splits(files)
    lines = [line.replace(f"{tmp_path}/", "") for line in str(caught.value).splitlines()]
    assert lines[0].startswith("a.tsv, line 3 has 3 fields, but the header has 2")
    assert lines[1].startswith("broken.jsonl, line 1 is not JSON: Expecting value")
    assert lines[2].startswith("broken.jsonl, line 2: There is no column text or ")
    assert lines[3] == "There are no examples in empty.tsv."
    assert lines[4] == "b.csv, line 2: label 'maybe' (30 rows); the training split has no, yes"
    assert len(lines) == 5


def test_twenty_errors_are_shown(tmp_path: Path) -> None:
    file = write(tmp_path / "b.tsv", "\n".join(["text\tlabel", *["a\t1\t2"] * 31]))
    with pytest.raises(CorpusError, match=r"line 21 has 3 fields.*\nand 11 more"):
        read_labelled([file])


def test_a_split_may_number_the_labels_that_another_names(tmp_path: Path) -> None:
    files = {
        "training": [write(tmp_path / "training.tsv", "text\tlabel\na\tno\nb\tyes\n")],
        "validation": [write(tmp_path / "validation.tsv", "text\tlabel\nc\t1\nd\t0\n")],
    }
    splits = read_splits(files, ["no", "yes"])
    assert [example.label for example in splits.texts["validation"]] == [1, 0]


def test_a_label_that_no_row_of_training_has_is_refused(tmp_path: Path) -> None:
    """Though it is among the names."""
    files = {
        "training": [write(tmp_path / "training.tsv", "text\tlabel\na\tno\nb\tyes\n")],
        "validation": [write(tmp_path / "validation.tsv", "text\tlabel\nc\tyes\nd\tmaybe\n")],
    }
    message = r"validation.tsv, line 3: label 'maybe' \(1 rows\); the training split has no, yes"
    with pytest.raises(CorpusError, match=message):
        read_splits(files, ["no", "yes", "maybe"])


@pytest.mark.parametrize("labels", ["0 1", "0", "0 1 2 3 4"])
def test_names_that_are_numbers_are_never_taken_for_indices(tmp_path: Path, labels: str) -> None:
    """As of a model that gives one to five stars."""
    rows = "".join(f"text\t{label}\n" for label in labels.split())
    file = write(tmp_path / "a.tsv", f"text\tlabel\n{rows}")
    assert errors_of(tmp_path, file, ["1", "2", "3", "4", "5"]) == [
        "a.tsv, line 2: label '0' (1 rows); allowed are 1, 2, 3, 4, 5"
    ]


def test_scores_are_numbers_of_their_scale(tmp_path: Path) -> None:
    scale = (0, 5)
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


def test_what_has_no_text_in_the_column_of_pairs_is_no_pair(tmp_path: Path) -> None:
    rows = ('"text_pair": NaN', '"text_pair": null', '"text_pair": ""', '"text_pair": "  "')
    lines = [f'{{"text": "a", "label": 1, {row}}}' for row in rows]
    file = write(tmp_path / "a.jsonl", "\n".join(lines))
    examples, _ = read_labelled([file])
    assert [e.pair for e in examples] == [None] * 4
    assert errors_of(tmp_path, file, columns=Columns(needs_pair=True)) == [
        "There are no examples: 4 of 4 rows are omitted: 4 with an empty text."
    ]


def test_empty_texts_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.csv", 'text,label\nfine,1\n,0\n" \t",0\ndull,0\n')
    examples, _ = read_labelled([file])
    assert [each.text for each in examples] == ["fine", "dull"]
    assert "2 of 4 rows are omitted: 2 with an empty text" in capsys.readouterr().out


# Texts with several labels.
ROWS: Final = [("a", ["new", "old"]), ("b", []), ("c", ["old"]), ("d", ["new", "odd"])]
NAMES: Final = ["new", "odd", "old"]


def write_form(folder: Path, form: str) -> tuple[Path, Columns]:
    if form == "lists":
        lines = [json.dumps({"text": text, "label": labels}) for text, labels in ROWS]
        return write(folder / "a.jsonl", "\n".join(lines)), Columns()
    if form == "separator":
        rows = [f"{text},{' | '.join(labels)}" for text, labels in ROWS]
        return write(folder / "a.csv", "\n".join(["text,label", *rows])), Columns(separator="|")
    marks = [",".join(str(int(name in labels)) for name in NAMES) for _, labels in ROWS]
    rows = [f"{text},{marked}" for (text, _), marked in zip(ROWS, marks, strict=True)]
    file = write(folder / "a.csv", "\n".join([f"text,{','.join(NAMES)}", *rows]))
    return file, Columns(indicators=tuple(NAMES))


@pytest.mark.parametrize("form", ["lists", "separator", "columns"])
def test_every_form_of_several_labels_gives_the_same(tmp_path: Path, form: str) -> None:
    targets = [(1, 0, 1), (0, 0, 0), (0, 0, 1), (1, 1, 0)]
    file, columns = write_form(tmp_path, form)
    examples, names = read_labelled([file], columns=columns, problem=MULTI)
    assert names == NAMES
    assert [example.label for example in examples] == targets
    # In the order of a model's outputs, which evaluation asks for.
    examples, _ = read_labelled([file], NAMES[::-1], columns, MULTI)
    assert [example.label for example in examples] == [target[::-1] for target in targets]


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        (
            "a.csv",
            "text,label\na,x\n",
            Columns(),
            "column label does not contain lists",
        ),
        (
            "a.csv",
            "text,x,y\na,0,2\n",
            Columns(indicators=("x", "y")),
            "y contains '2', not 0",
        ),
        ("a.csv", "text,x,y\na,0,\n", Columns(indicators=("x", "y")), "no value in column x or y"),
        ("a.csv", "text,x\na,0\n", Columns(indicators=("x", "y")), "no column y for --label-colum"),
        ("a.jsonl", '{"text": "a", "label": ["x", null]}', Columns(), "no value in column label"),
        ("a.jsonl", '{"text": "a", "label": null}', Columns(), "line 1: no value in column label"),
    ],
)
def test_several_labels_in_another_form(
    tmp_path: Path, name: str, content: str, columns: Columns, message: str
) -> None:
    file = write(tmp_path / name, content)
    [error] = errors_of(tmp_path, file, columns=columns, problem=MULTI)
    assert message in error


def test_a_folder_is_read_by_its_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def names(files: list[Path]) -> list[str]:
        return [file.name for file in files]

    folder = tmp_path / "data"
    for name in ("train-1.csv", "train-2.csv.gz", "dev.csv", "my test.tsv", "README.md"):
        write(folder / name, "")
    assert names(labelled_files([folder], "train")) == ["train-1.csv", "train-2.csv.gz"]
    assert capsys.readouterr().out == f"{folder}: train-1.csv, train-2.csv.gz of 4 files\n"
    assert names(labelled_files([folder], "test", "validation")) == ["my test.tsv"]
    (folder / "my test.tsv").unlink()
    assert names(labelled_files([folder], "test", "validation")) == ["dev.csv"]
    assert names(files_of_split(folder, "validation")) == ["dev.csv"]
    assert labelled_files([folder / "dev.csv"], "train") == [folder / "dev.csv"]


def test_a_text_of_more_than_a_million_characters_is_refused(tmp_path: Path) -> None:
    """Its tokens would take gigabytes."""
    file = write(tmp_path / "data.csv", f"text,label\na,x\n{'a' * 1_000_001},y\n")
    [error] = errors_of(tmp_path, file)
    assert "the column 'text' has 1,000,001 characters; the maximum is 1,000,000" in error
