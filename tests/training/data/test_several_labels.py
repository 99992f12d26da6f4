"""Texts with several labels in every form; and the files of folders by their splits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from training.data.corpus import CorpusError
from training.data.labelled.columns import Columns
from training.data.labelled.folders import files_of_split, labelled_files
from training.data.labelled.texts import read_labelled, read_splits

MULTI: Final = "multi_label_classification"
ROWS = [("a", ["new", "old"]), ("b", []), ("c", ["old"]), ("d", ["new", "odd"])]
NAMES = ["new", "odd", "old"]
TARGETS = [(1, 0, 1), (0, 0, 0), (0, 0, 1), (1, 1, 0)]


def write(file: Path, content: str) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    return file


def write_form(folder: Path, form: str) -> tuple[Path, Columns]:
    if form == "jsonl":
        lines = [json.dumps({"text": text, "label": labels}) for text, labels in ROWS]
        return write(folder / "a.jsonl", "\n".join(lines)), Columns()
    if form == "parquet":
        texts, labels = zip(*ROWS, strict=True)
        pq.write_table(pa.table({"text": texts, "label": labels}), folder / "a.parquet")
        return folder / "a.parquet", Columns()
    if form == "separator":
        rows = [f"{text},{' | '.join(labels)}" for text, labels in ROWS]
        return write(folder / "a.csv", "\n".join(["text,label", *rows])), Columns(separator="|")
    marks = [",".join(str(int(name in labels)) for name in NAMES) for _, labels in ROWS]
    rows = [f"{text},{marked}" for (text, _), marked in zip(ROWS, marks, strict=True)]
    file = write(folder / "a.csv", "\n".join([f"text,{','.join(NAMES)}", *rows]))
    return file, Columns(indicators=tuple(NAMES))


@pytest.mark.parametrize("form", ["jsonl", "parquet", "separator", "columns"])
def test_every_form_gives_the_same(tmp_path: Path, form: str) -> None:
    file, columns = write_form(tmp_path, form)
    examples, names = read_labelled([file], columns=columns, problem=MULTI)
    assert names == NAMES
    assert [example.label for example in examples] == TARGETS
    # In the order of a model's outputs, which evaluation asks for.
    examples, _ = read_labelled([file], NAMES[::-1], columns, MULTI)
    assert [example.label for example in examples] == [target[::-1] for target in TARGETS]


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        ("a.csv", "text,label\na,x\nb,y\n", Columns(), "a.csv, line 2: column label holds no lis"),
        ("a.csv", "text,x,y\na,0,2\n", Columns(indicators=("x", "y")), "y holds '2', not 0 or 1"),
        ("a.csv", "text,x,y\na,0,\n", Columns(indicators=("x", "y")), "line 2: no value in colum"),
        ("a.csv", "text,x\na,0\n", Columns(indicators=("x", "y")), "no column y for --label-colum"),
        ("a.jsonl", '{"text": "a", "label": ["x", null]}', Columns(), "no value in column label"),
        ("a.jsonl", '{"text": "a", "label": null}', Columns(), "line 1: no value in column label"),
    ],
)
def test_labels_in_another_form(
    tmp_path: Path, name: str, content: str, columns: Columns, message: str
) -> None:
    with pytest.raises(CorpusError) as caught:
        read_labelled([write(tmp_path / name, content)], columns=columns, problem=MULTI)
    assert len(str(caught.value).splitlines()) == 1
    assert message in str(caught.value)


def test_several_labels_need_their_problem_type(tmp_path: Path) -> None:
    file, columns = write_form(tmp_path, "jsonl")
    with pytest.raises(CorpusError, match="line 1: column label holds lists; --problem-type mul"):
        read_labelled([file], columns=columns)
    with pytest.raises(CorpusError, match=r"\(multi_label_classification\); this is regression"):
        read_splits({"data": [file]}, columns=Columns(separator=","), problem="regression")


def test_a_label_that_training_lacks_is_refused(tmp_path: Path) -> None:
    file, columns = write_form(tmp_path, "jsonl")
    other = write(tmp_path / "b.jsonl", '{"text": "a", "label": ["new", "red"]}')
    with pytest.raises(CorpusError, match=r"b.jsonl, line 1: label 'red' \(1 rows\); the training"):
        read_splits({"training": [file], "validation": [other]}, None, columns, MULTI)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train-1.csv", "train-2.csv.gz", "dev.csv", "my test.tsv", "README.md"):
        write(tmp_path / "data" / name, "")
    return tmp_path / "data"


def names_in(files: list[Path]) -> list[str]:
    return [file.name for file in files]


def test_a_folder_is_read_by_its_splits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert names_in(labelled_files([folder], "train")) == ["train-1.csv", "train-2.csv.gz"]
    assert capsys.readouterr().out == f"{folder}: train-1.csv, train-2.csv.gz of 4 files\n"
    assert names_in(labelled_files([folder], "test", "validation")) == ["my test.tsv"]
    (folder / "my test.tsv").unlink()
    assert names_in(labelled_files([folder], "test", "validation")) == ["dev.csv"]
    assert names_in(files_of_split(folder, "validation")) == ["dev.csv"]
    assert labelled_files([folder / "dev.csv"], "train") == [folder / "dev.csv"]
