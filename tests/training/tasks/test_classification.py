"""Labelled files in every format give the same texts, and all their faults are listed."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
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
from training.glue.tasks import Metric
from training.tasks.base import TrainingSetup
from training.tasks.classification.files import read_splits, read_texts
from training.tasks.classification.loss import ClassificationConfig, read_classification
from training.tasks.metrics import compute_metrics

MULTI_LABEL: Final = "multi_label_classification"
Capture = pytest.CaptureFixture[str]


def errors_of(folder: Path, file: Path, *arguments: Any, **options: Any) -> list[str]:
    """Return the lines of the error for a file, without its folder."""
    with pytest.raises(CorpusError) as caught:
        read_labelled([file], *arguments, **options)
    return [line.replace(f"{folder}/", "") for line in caught.value.args]


def test_texts_have_the_index_of_their_label_and_a_location(tmp_path: Path) -> None:
    rows = ["A good film,pos", '"A ""bad"", long film",neg', "Fair,pos", '"one\n\ntwo",pos']
    examples, names = read_labelled([write(tmp_path / "a.csv", "\n".join(["text,label", *rows]))])
    assert names == ["neg", "pos"]
    texts = ["A good film", 'A "bad", long film', "Fair", "one\n\ntwo"]
    expected = [(text, label, None) for text, label in zip(texts, [1, 0, 1, 1], strict=True)]
    assert [(e.text, e.label, e.pair) for e in examples] == expected
    assert examples[-1].location.endswith("a.csv, line 5")


def test_options_name_the_columns(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "id,body,title,team,text\n1,long,short,x,no\n2,b,t,y,no\n")
    columns = Columns(text="title", pair="body", label="team")
    examples, names = read_labelled([file], columns=columns)
    assert names == ["x", "y"]
    assert [(e.text, e.pair) for e in examples] == [("short", "long"), ("t", "b")]
    assert read_texts([file], Columns(text="body")) == [("long", None), ("b", None)]
    assert read_labelled([file], columns=Columns(text="Title", label="TEAM"))[1] == names
    [error] = errors_of(tmp_path, file, columns=Columns(text="titles"))
    assert error.endswith("The columns are id, body, title, team, text.")


def test_columns_of_public_data_sets_are_recognised(tmp_path: Path) -> None:
    for header, text, pair in (
        ("index,question,sentence,label", "question", "sentence"),  # QNLI
        ("premise,hypothesis,label", "premise", "hypothesis"),
        ("text,text_pair,category", "text", "text_pair"),
        ("sentence,label", "sentence", None),  # SST-2
    ):
        file = write(tmp_path / "a.csv", f"{header}\n{header}")
        (example,), _ = read_labelled([file])
        assert (example.text, example.pair) == (text, pair)


@pytest.mark.parametrize("missing", ["-1", "-", ""])
def test_rows_without_a_label_are_omitted_and_counted(
    tmp_path: Path, missing: str, capsys: Capture
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


def test_the_classes_of_a_file_are_its_labels(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b", "c"], "label": [1, 0, -1]})
    features = {"label": {"names": CLASSES, "_type": "ClassLabel"}, "text": {"dtype": "string"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = table.replace_schema_metadata(metadata)
    write_dataset(tmp_path / "train", table)
    files = labelled_files([tmp_path], "train")
    examples, names = read_labelled(files)
    assert (names, [example.label for example in examples]) == (CLASSES, [1, 0])
    # A model may have another order of the labels, or no names.
    for label_names, expected in (
        (CLASSES[::-1], [0, 1]),
        (["Contradiction", "ENTAILMENT"], [0, 1]),
        (["LABEL_0", "LABEL_1"], [1, 0]),
    ):
        examples, _ = read_labelled(files, label_names)
        assert [example.label for example in examples] == expected
    [error] = errors_of(tmp_path, *files, label_names=["yes", "no"])
    assert "labels are entailment, contradiction, not yes, no. Write" in error


def test_labels_that_differ_in_case_and_outer_spaces_are_the_same(tmp_path: Path) -> None:
    """The first spelling is the name, in every split."""
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


def test_the_names_of_labels_do_not_depend_on_their_type(tmp_path: Path) -> None:
    """All spellings of an integer are one class."""
    for column, names in (
        (["1", "1.0", "2."], ["1", "2"]),
        ([Decimal("1.50"), Decimal("2.50")], ["1.50", "2.50"]),
        (["10", "2", "b", "a"], ["2", "10", "a", "b"]),
    ):
        table = pa.table({"text": ["a"] * len(column), "label": column})
        pq.write_table(table, tmp_path / "a.parquet")
        assert read_labelled([tmp_path / "a.parquet"])[1] == names


def test_a_score_of_minus_one_is_missing_if_no_other_score_is_negative(
    tmp_path: Path, capsys: Capture
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
    assert read_splits(files, labels, problem=None).names == labels
    message = r"type regression for .* single_label_classification"
    with pytest.raises(CorpusError, match=message) if are_rejected else nullcontext():
        assert len(read_splits(files, problem=None).names) == len(labels)


def test_all_faults_of_all_splits_are_listed_together(tmp_path: Path) -> None:
    """After twenty faults, only their number is printed."""
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


def test_other_splits_only_have_labels_of_the_training_split(tmp_path: Path) -> None:
    """They may number the labels. A label without training texts is rejected."""
    files = {
        "training": [write(tmp_path / "training.tsv", "text\tlabel\na\tno\nb\tyes\n")],
        "validation": [write(tmp_path / "validation.tsv", "text\tlabel\nc\t1\nd\t0\n")],
    }
    splits = read_splits(files, ["NO", "Yes"])
    assert [example.label for example in splits.texts["validation"]] == [1, 0]
    assert not splits.are_numbered
    assert read_splits({"test": files["validation"]}, ["no", "yes"]).are_numbered
    write(tmp_path / "validation.tsv", "text\tlabel\nc\tyes\nd\tmaybe\n")
    message = r"validation.tsv, line 3: Label 'maybe' .* labels of the training split are no, yes"
    with pytest.raises(CorpusError, match=message):
        read_splits(files, ["no", "yes", "maybe"])


def test_scores_are_numbers_within_their_scale(tmp_path: Path) -> None:
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


def test_empty_texts_are_omitted_and_counted(tmp_path: Path, capsys: Capture) -> None:
    file = write(tmp_path / "a.csv", 'text,label\nfine,1\n,0\n" \t",0\ndull,0\n')
    examples, _ = read_labelled([file])
    assert [example.text for example in examples] == ["fine", "dull"]
    assert "2 of 4 rows are omitted: 2 with an empty text" in capsys.readouterr().out
    # The second text may be missing unless the task needs pairs.
    rows = ('"text_pair": NaN', '"text_pair": null', '"text_pair": ""', '"text_pair": "  "')
    lines = [f'{{"text": "a", "label": 1, {row}}}' for row in rows]
    file = write(tmp_path / "a.jsonl", "\n".join(lines))
    assert [example.pair for example in read_labelled([file])[0]] == [None] * 4
    assert errors_of(tmp_path, file, columns=Columns(needs_pair=True)) == [
        "There are no examples: 4 of 4 rows are omitted: 4 with an empty text."
    ]


def test_several_labels_are_a_list_a_text_or_columns(tmp_path: Path) -> None:
    label_names = ["new", "odd", "old"]
    lists = [["new", "old"], [], ["old"], ["new", "odd"]]
    targets = [(1, 0, 1), (0, 0, 0), (0, 0, 1), (1, 1, 0)]
    lines = [json.dumps({"text": "a", "label": labels}) for labels in lists]
    texts = ["text,label", "a,new | old", "a,", "a,old", "a,new|odd"]
    cells = ["text,new,odd,old", *(f"a,{','.join(map(str, target))}" for target in targets)]
    for name, rows, columns in (
        ("a.jsonl", lines, Columns()),
        ("a.csv", texts, Columns(separator="|")),
        ("b.csv", cells, Columns(indicators=tuple(label_names))),
    ):
        file = write(tmp_path / name, "\n".join(rows))
        examples, names = read_labelled([file], columns=columns, problem=MULTI_LABEL)
        assert names == label_names
        assert [example.label for example in examples] == targets
        # Evaluation reads the labels in the order of a model's outputs.
        examples, _ = read_labelled([file], label_names[::-1], columns, MULTI_LABEL)
        assert [example.label for example in examples] == [target[::-1] for target in targets]


def test_training_labels_are_printed_and_weights_balance_them(
    setup: TrainingSetup, tmp_path: Path, capsys: Capture
) -> None:
    """The table has at most twenty labels. Labels with fewer than five texts are listed."""
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
        labels=[f"l{n:02}" for n in range(22)],
        class_weights=["balanced"],
        metric=None,
    )
    task = read_classification(config, setup, 8)
    header, *lines, omitted, few = capsys.readouterr().out.splitlines()
    assert header == "label    texts    share"
    assert (lines[0], lines[-1]) == ("l20         21    9.1 %", "l01          2    0.9 %")
    assert (len(lines), omitted) == (20, "... and 2 more labels")
    assert few == "labels with fewer than 5 texts: l21 (0), l00 (1), l01 (2), l02 (3), l03 (4)"
    assert task.class_weights is not None
    assert task.class_weights.tolist() == pytest.approx([*(11 / (n + 1) for n in range(21)), 1])


def test_file_names_determine_the_splits_of_a_folder(tmp_path: Path, capsys: Capture) -> None:
    def names(files: list[Path]) -> list[str]:
        return [file.name for file in files]

    folder = tmp_path / "data"
    train = [*(f"train-{n}.csv" for n in range(1, 9)), "train-9.csv.gz"]
    for name in (*train, "dev.csv", "my test.tsv", "README.md"):
        write(folder / name, "")
    assert names(labelled_files([folder], "train")) == train
    line = f"{folder}: {', '.join(train[:8])} and 1 more of 11 files\n"
    assert capsys.readouterr().out == line
    assert names(labelled_files([folder], "test", "validation")) == ["my test.tsv"]
    (folder / "my test.tsv").unlink()
    assert names(labelled_files([folder], "test", "validation")) == ["dev.csv"]
    assert names(files_of_split(folder, "validation")) == ["dev.csv"]
    assert labelled_files([folder / "dev.csv"], "train") == [folder / "dev.csv"]


def test_metrics_of_labels_and_scores_match_values_by_hand() -> None:
    # 6 true positives, 1 false negative, 2 false positives, 3 true negatives.
    labels = np.array([1] * 6 + [1] + [0] * 2 + [0] * 3)
    predictions = np.array([1] * 6 + [0] + [1] * 2 + [0] * 3)
    names: tuple[Metric, ...] = ("accuracy", "f1", "macro_f1", "matthews_correlation")
    metrics = compute_metrics(names, np.eye(2)[predictions], labels)
    negative_f1, positive_f1 = 2 * 3 / (2 * 3 + 1 + 2), 2 * 6 / (2 * 6 + 1 + 2)
    # The last value is Wikipedia's example of the coefficient, with the labels of cats and dogs.
    expected = [9 / 12, positive_f1, (positive_f1 + negative_f1) / 2, 0.478]
    assert [metrics[name] for name in names] == pytest.approx(expected, abs=5e-4)
    # As in scikit-learn, a label counts even if it is only predicted.
    metrics = compute_metrics(("macro_f1",), np.eye(3)[[0, 2, 1, 1]], np.array([0, 0, 1, 1]))
    assert metrics["macro_f1"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    # With several labels per text, labels with a probability above 0.5 are predicted.
    logits_NK, targets_NK = np.array([[1, 0.0], [0.2, -1]]), np.array([[1, 0], [0, 0]])
    metrics = compute_metrics(("micro_f1", "subset_accuracy"), logits_NK, targets_NK)
    assert metrics == pytest.approx({"micro_f1": 2 / 3, "subset_accuracy": 0.5})
    metrics = compute_metrics(("pearson", "spearman"), np.ones((3, 1)), np.array([1.0, 2.0, 3.0]))
    assert all(math.isnan(value) for value in metrics.values())
