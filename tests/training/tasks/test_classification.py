"""Labelled files of every kind are read alike, and all that is wrong in them is listed."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.albert_serve.scoring.jobs import write_dataset
from tests.training.support import read_labelled, write
from training.data.corpus import CorpusError
from training.data.labelled.columns import Columns
from training.data.labelled.folders import files_of_split, labelled_files
from training.tasks.base import TrainingSetup
from training.tasks.classification.files import read_splits, read_texts
from training.tasks.classification.loss import ClassificationConfig, read_classification
from training.tasks.metrics import compute_metrics

MULTI: Final = "multi_label_classification"


def errors_of(folder: Path, file: Path, *arguments: Any, **options: Any) -> list[str]:
    """The lines of the error of files that cannot be read, without their folder."""
    with pytest.raises(CorpusError) as caught:
        read_labelled([file], *arguments, **options)
    return [line.replace(f"{folder}/", "") for line in caught.value.args]


def test_texts_have_an_index_of_their_label_and_a_location(tmp_path: Path) -> None:
    rows = ["A good film,pos", '"A ""bad"", long film",neg', "Fair,pos", '"one\n\ntwo",pos']
    examples, names = read_labelled([write(tmp_path / "a.csv", "\n".join(["text,label", *rows]))])
    assert names == ["neg", "pos"]
    texts = ["A good film", 'A "bad", long film', "Fair", "one\n\ntwo"]
    assert [(e.text, e.label, e.pair) for e in examples] == [
        (text, int(text != texts[1]), None) for text in texts
    ]
    assert examples[-1].location.endswith("a.csv, line 5")


def test_columns_can_be_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "id,body,title,team,text\n1,long,short,x,no\n2,b,t,y,no\n")
    columns = Columns(text="title", pair="body", label="team")
    examples, names = read_labelled([file], columns=columns)
    assert names == ["x", "y"]
    assert [(e.text, e.pair) for e in examples] == [("short", "long"), ("t", "b")]
    assert read_texts([file], Columns(text="body")) == [("long", None), ("b", None)]
    assert read_labelled([file], columns=Columns(text="Title", label="TEAM"))[1] == names
    [error] = errors_of(tmp_path, file, columns=Columns(text="titles"))
    assert error.endswith("The columns are id, body, title, team, text.")


def test_columns_of_public_data_sets(tmp_path: Path) -> None:
    for header, text, pair in (
        ("index,question,sentence,label", "question", "sentence"),  # QNLI
        ("id,qid1,qid2,question1,question2,is_duplicate", "question1", "question2"),
        ("Quality,#1 ID,#2 ID,#1 String,#2 String", "#1 String", "#2 String"),  # MRPC
        ("premise,hypothesis,label", "premise", "hypothesis"),
        ("sentence1,sentence2,gold_label", "sentence1", "sentence2"),  # MNLI
        ("text,text_pair,category", "text", "text_pair"),
        ("sentence,label", "sentence", None),  # SST-2
    ):
        file = write(tmp_path / "a.csv", f"{header}\n{header}")
        (example,), _ = read_labelled([file])
        assert (example.text, example.pair) == (text, pair)


def test_bad_files_are_named(tmp_path: Path) -> None:
    for name, content, message in (
        ("a.tsv", "text\tclass\na\t1\n", "a.tsv, line 1: There is no column label or category"),
        ("b.tsv", "text,label\nc,no\n", "are text,label. Is ',' the delimiter? Then set --delimi"),
        ("a.txt", "text\n", "a.txt has no known suffix. Rename it to .csv, .tsv, .jsonl or "),
        ("b.jsonl", '{"text": "a", "label": [1]}', "contains lists. If texts have several label"),
    ):
        [error] = errors_of(tmp_path, write(tmp_path / name, content))
        assert message in error
    assert errors_of(tmp_path, tmp_path / "none.tsv") == ["none.tsv does not exist."]


@pytest.mark.parametrize("missing", ["-1", "-", ""])
def test_rows_without_a_label_are_left_out_and_counted(
    tmp_path: Path, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.tsv", f"text\tlabel\na\t0\nb\t{missing}\nc\t1\nd\t{missing}\n")
    examples, names = read_labelled([file])
    assert (names, [example.text for example in examples]) == (["0", "1"], ["a", "c"])
    reason = f"with the label {missing} (if this is a label, add it to --labels)" if missing else ""
    line = f"2 of 4 rows are omitted: 2 {reason or 'without a label'}.\n"
    assert capsys.readouterr().out == line
    if missing:
        examples, _ = read_labelled([file], ["0", "1", missing])
        assert [example.label for example in examples] == [0, 2, 1, 2]
    write(file, f"text\tlabel\na\t{missing}\n")
    [error] = errors_of(tmp_path, file)
    assert error.startswith("There are no examples: 1 of 1 rows are omitted: 1 with")


CLASSES: Final = ["entailment", "contradiction"]


def test_the_names_of_classes_are_those_of_the_file(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b", "c"], "label": [1, 0, -1]})
    features = {"label": {"names": CLASSES, "_type": "ClassLabel"}, "text": {"dtype": "string"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = table.replace_schema_metadata(metadata)
    write_dataset(tmp_path / "train", table)
    files = labelled_files([tmp_path], "train")
    examples, names = read_labelled(files)
    assert (names, [example.label for example in examples]) == (CLASSES, [1, 0])
    # A model may have them in another order, or no names.
    for label_names, expected in (
        (CLASSES[::-1], [0, 1]),
        (["Contradiction", "ENTAILMENT"], [0, 1]),
        (["LABEL_0", "LABEL_1"], [1, 0]),
    ):
        examples, _ = read_labelled(files, label_names)
        assert [example.label for example in examples] == expected
    [error] = errors_of(tmp_path, *files, label_names=["yes", "no"])
    assert "labels are entailment, contradiction, not yes, no. Write" in error


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
    # A checkpoint may have both spellings as labels.
    for names, expected in ((["LATE ", "Refund"], [0, 1]), (["refund", "LATE", "Refund"], [1, 0])):
        (texts,) = read_splits({"test": files["validation"]}, names).texts.values()
        assert [text.label for text in texts] == expected


def test_labels_of_any_type_are_names(tmp_path: Path) -> None:
    """A whole number is one class, however it is written."""
    for column, names in (
        (["1", "1.0", "2."], ["1", "2"]),
        ([Decimal("1.50"), Decimal("2.50")], ["1.50", "2.50"]),
        (["10", "2", "b", "a"], ["2", "10", "a", "b"]),
    ):
        table = pa.table({"text": ["a"] * len(column), "label": column})
        pq.write_table(table, tmp_path / "a.parquet")
        assert read_labelled([tmp_path / "a.parquet"])[1] == names


def test_a_missing_score_is_omitted_if_no_other_is_negative(
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
    ("labels", "are_rejected"),
    [
        ([f"{number / 10}" for number in range(21)], True),
        ([f"{number / 10}" for number in range(20)], False),
        (list(map(str, range(201))), True),
        ([f"{number}.0" for number in range(200)], False),
        ([f"intent {number}" for number in range(5000)], False),
    ],
    ids=["many fractions", "few fractions", "many integers", "few integers", "names"],
)
def test_many_numbers_need_a_problem_type(
    tmp_path: Path, labels: list[str], are_rejected: bool
) -> None:
    rows = "".join(f"x\t{label}\n" for label in labels)
    files = {"training": [write(tmp_path / "a.tsv", f"text\tlabel\n{rows}")]}
    assert len(read_splits(files).names) == len(labels)
    if not are_rejected:
        assert len(read_splits(files, problem=None).names) == len(labels)
        return
    with pytest.raises(CorpusError, match=r"type regression for .* single_label_classification"):
        read_splits(files, problem=None)


def test_all_that_is_wrong_in_any_file_is_listed_at_once(tmp_path: Path) -> None:
    """And in any split; of more than twenty errors, the number."""
    table = "\n".join(["text\tlabel", "a\tno", "b\tyes\textra", "c\tyes"])
    rows = '{"text": \n{"words": "c", "label": 1}\n'
    files = {
        "training": [write(tmp_path / "a.tsv", table), write(tmp_path / "b.jsonl", rows)],
        "validation": [write(tmp_path / "c.csv", "text,label\n" + "x,maybe\n" * 30)],
        "test": [write(tmp_path / "d.tsv", "text\tlabel\n")],
    }
    with pytest.raises(CorpusError) as caught:
        read_splits(files)
    lines = str(caught.value).replace(f"{tmp_path}/", "").splitlines()
    assert lines[0].startswith("a.tsv, line 3 has 3 fields, but the header has 2")
    assert lines[1].startswith("b.jsonl, line 1 is not JSON: Expecting value")
    assert lines[2].startswith("b.jsonl, line 2: There is no column text or ")
    assert lines[3] == "There are no examples in d.tsv."
    expected = "The labels of the training split are no, yes."
    assert lines[4] == f"c.csv, line 2: Label 'maybe' (30 rows) is not allowed. {expected}"
    assert len(lines) == 5
    file = write(tmp_path / "b.tsv", "\n".join(["text\tlabel", *["a\t1\t2"] * 31]))
    with pytest.raises(CorpusError, match=r"line 21 has 3 fields.*\nand 11 more"):
        read_labelled([file])


def test_labels_of_a_split_are_those_of_training(tmp_path: Path) -> None:
    """It may number them; a name that no row of training has is rejected."""
    files = {
        "training": [write(tmp_path / "training.tsv", "text\tlabel\na\tno\nb\tyes\n")],
        "validation": [write(tmp_path / "validation.tsv", "text\tlabel\nc\t1\nd\t0\n")],
    }
    splits = read_splits(files, ["NO", "Yes"])
    assert [example.label for example in splits.texts["validation"]] == [1, 0]
    assert not splits.are_numbered
    assert read_splits({"test": files["validation"]}, ["no", "yes"]).are_numbered
    write(tmp_path / "validation.tsv", "text\tlabel\nc\tyes\nd\tmaybe\n")
    message = (
        r"validation.tsv, line 3: Label 'maybe' .* The labels of the training split are no, yes"
    )
    with pytest.raises(CorpusError, match=message):
        read_splits(files, ["no", "yes", "maybe"])


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
        assert line == f"{file}, line {number}: '{text}' is not a number from 0 to 5."


def test_empty_texts_are_omitted_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.csv", 'text,label\nfine,1\n,0\n" \t",0\ndull,0\n')
    examples, _ = read_labelled([file])
    assert [example.text for example in examples] == ["fine", "dull"]
    assert "2 of 4 rows are omitted: 2 with an empty text" in capsys.readouterr().out
    # A second text may be missing, unless pairs are needed.
    rows = ('"text_pair": NaN', '"text_pair": null', '"text_pair": ""', '"text_pair": "  "')
    lines = [f'{{"text": "a", "label": 1, {row}}}' for row in rows]
    file = write(tmp_path / "a.jsonl", "\n".join(lines))
    assert [example.pair for example in read_labelled([file])[0]] == [None] * 4
    assert errors_of(tmp_path, file, columns=Columns(needs_pair=True)) == [
        "There are no examples: 4 of 4 rows are omitted: 4 with an empty text."
    ]


# Texts with several labels.
NAMES: Final = ["new", "odd", "old"]
ROWS: Final = ["new | old", "", "old", "new|odd"]


def test_several_labels_are_a_list_a_text_or_columns(tmp_path: Path) -> None:
    lists = [[name.strip() for name in labels.split("|") if name] for labels in ROWS]
    lines = [json.dumps({"text": "a", "label": labels}) for labels in lists]
    texts = [f"a,{labels}" for labels in ROWS]
    cells = [",".join(["a", *(str(int(name in its)) for name in NAMES)]) for its in lists]
    for file, columns in (
        (write(tmp_path / "a.jsonl", "\n".join(lines)), Columns()),
        (write(tmp_path / "a.csv", "\n".join(["text,label", *texts])), Columns(separator="|")),
        (
            write(tmp_path / "b.csv", "\n".join([f"text,{','.join(NAMES)}", *cells])),
            Columns(indicators=tuple(NAMES)),
        ),
    ):
        examples, names = read_labelled([file], columns=columns, problem=MULTI)
        assert names == NAMES
        targets = [(1, 0, 1), (0, 0, 0), (0, 0, 1), (1, 1, 0)]
        assert [example.label for example in examples] == targets
        # In the order of a model's outputs, which evaluation asks for.
        examples, _ = read_labelled([file], NAMES[::-1], columns, MULTI)
        assert [example.label for example in examples] == [target[::-1] for target in targets]


def test_labels_of_training_are_printed_and_balanced(
    setup: TrainingSetup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has twenty labels, and labels with fewer than five texts are listed."""
    rows = [f"text,l{n:02}" for n in range(21) for _ in range(n + 1)]
    config = ClassificationConfig(
        head="text-classification",
        name=None,
        files=[write(tmp_path / "a.csv", "\n".join(["text,label", *rows]))],
        validation=(),
        validation_split=0,
        task=None,
        problem=None,
        columns=Columns(),
        labels=(),
        class_weights=["balanced"],
        metric=None,
    )
    task = read_classification(config, setup, 8)
    header, *lines, more, few = capsys.readouterr().out.splitlines()
    assert header == "label    texts    share"
    assert (lines[0], lines[-1]) == ("l20         21    9.1 %", "l01          2    0.9 %")
    assert (len(lines), more) == (20, "... and 1 more labels")
    assert few == "labels with fewer than 5 texts: l00 (1), l01 (2), l02 (3), l03 (4)"
    assert task.class_weights is not None
    assert task.class_weights.tolist() == pytest.approx([11 / (n + 1) for n in range(21)])


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


# 6 right positives, 1 missed, 2 false, 3 right negatives.
LABELS = np.array([1] * 6 + [1] + [0] * 2 + [0] * 3)
PREDICTED = np.array([1] * 6 + [0] + [1] * 2 + [0] * 3)


def test_metrics_of_labels_and_scores_by_hand() -> None:
    figures = compute_metrics(
        ("accuracy", "f1", "macro_f1", "matthews_correlation"), np.eye(2)[PREDICTED], LABELS
    )
    negative_f1 = 2 * 3 / (2 * 3 + 1 + 2)
    positive_f1 = 2 * 6 / (2 * 6 + 1 + 2)
    assert figures == pytest.approx(
        {
            "accuracy": 9 / 12,
            "f1": positive_f1,
            "macro_f1": (positive_f1 + negative_f1) / 2,
            # Wikipedia's example of the coefficient, with the labels of cats and dogs.
            "matthews_correlation": 0.478,
        },
        abs=5e-4,
    )
    # As in scikit-learn: 1 of 2 right, 2 of 2 right, and a label that is only predicted.
    figures = compute_metrics(("macro_f1",), np.eye(3)[[0, 2, 1, 1]], np.array([0, 0, 1, 1]))
    assert figures["macro_f1"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    # Of several labels, those with a probability of more than a half are predicted.
    logits_NK, targets_NK = np.array([[1, 0.0], [0.2, -1]]), np.array([[1, 0], [0, 0]])
    figures = compute_metrics(("micro_f1", "subset_accuracy"), logits_NK, targets_NK)
    assert figures == pytest.approx({"micro_f1": 2 / 3, "subset_accuracy": 0.5})
    figures = compute_metrics(("pearson", "spearman"), np.ones((3, 1)), np.array([1.0, 2.0, 3.0]))
    assert all(math.isnan(value) for value in figures.values())
