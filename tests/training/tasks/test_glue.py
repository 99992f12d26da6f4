"""The files of every GLUE task are read unchanged, from the official site or the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.training.support import write
from training.data.corpus import CorpusError
from training.glue.files import dev_files, patterns_of, training_files
from training.glue.tasks import TASKS
from training.tasks.classification.files import read_task, read_test

_MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
    "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label\n"
    "0\t1\t1n\tfiction\t( a )\t( b )\t(X)\t(Y)\tIt is.\tIt was.\tneutral\tneutral\n"
)
_QNLI = "index\tquestion\tsentence\tlabel\n"
_PAIRS = "index\tsentence1\tsentence2\tlabel\n"
_STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
_QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
_MRPC = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
# Task, content of its training file, and text, pair and label of the first row.
FILES = [
    ("cola", 'gj04\t0\t*\tThe "car honked.\ngj04\t1\t\tHe left.\n', ('The "car honked.', None, 0)),
    ("sst2", "sentence\tlabel\na fine film \t1\nbleak \t0\n", ("a fine film", None, 1)),
    ("mrpc", f"{_MRPC}1\t7\t8\tHe said.\tHe spoke.\n0\t7\t9\tA\tB\n", ("He said.", "He spoke.", 1)),
    ("stsb", f"{_STSB}0\tn\tf\t2012\t1\t-\t-\tOne.\tTwo.\t3.800\n", ("One.", "Two.", 3.8)),
    ("qqp", f"{_QQP}5\t1\t2\tWho?\tWhen?\t0\n6\t1\t3\tWho?\tWhom?\t1\n", ("Who?", "When?", 0)),
    ("mnli", _MNLI, ("It is.", "It was.", 1)),
    ("qnli", f"{_QNLI}0\tWho?\tHe did.\tnot_entailment\n", ("Who?", "He did.", 1)),
    ("rte", f"{_PAIRS}0\tIt rains.\tIt is wet.\tentailment\n", ("It rains.", "It is wet.", 0)),
    ("wnli", f"{_PAIRS}0\tIt is.\tIt was.\t1\n", ("It is.", "It was.", 1)),
]


@pytest.mark.parametrize(("name", "content", "first"), FILES, ids=[name for name, *_ in FILES])
def test_official_files_are_read(
    tmp_path: Path, name: str, content: str, first: tuple[str, str | None, float]
) -> None:
    task = TASKS[name]
    for file in ("train.tsv", *(file for file, *_ in task.dev.values())):
        write(tmp_path / file, content)
    files = training_files(task, tmp_path)
    splits = read_task(task, {"training": files.train, "validation": files.validation})
    example, *_ = splits.texts["training"]
    assert (example.text, example.pair, example.label) == first
    labels = [[example.label for example in texts] for texts in splits.texts.values()]
    assert labels[0] == labels[1]
    assert splits.names == (list(task.labels) or ["score"])
    for split, files_of_split in dev_files(task, tmp_path).items():
        assert [file.name for file in files_of_split] == list(task.dev[split][:1])


def test_training_parts_and_a_validation_file_without_a_header_are_read(tmp_path: Path) -> None:
    """`val.tsv` is held out for validation during training; `dev.tsv` is for evaluation."""
    rows = "2\tA.\tB.\tentailment\n7\tA.\tB.\tnot_entailment\n"
    for name in ("train.part1.tsv", "train.part2.tsv", "dev.tsv"):
        write(tmp_path / name, _PAIRS + rows)
    write(tmp_path / "val.tsv", rows)
    files = training_files(TASKS["rte"], tmp_path)
    assert [file.name for file in files.train] == ["train.part1.tsv", "train.part2.tsv"]
    assert [file.name for file in files.validation] == ["val.tsv"]
    assert [file.name for file in dev_files(TASKS["rte"], tmp_path)["dev"]] == ["dev.tsv"]
    splits = read_task(TASKS["rte"], {"training": files.train, "validation": files.validation})
    assert [len(splits.texts[split]) for split in ("training", "validation")] == [4, 2]


def test_missing_files_are_listed(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"has no training file .*\n.* has no held-out file "):
        training_files(TASKS["rte"], tmp_path)


# A row of each task in the columns of `nyu-mll/glue`.
_SENTENCES = {"sentence1": "A.", "sentence2": "B.", "label": 1}
ROWS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("mrpc", "rte", "wnli"), _SENTENCES),
    "cola": {"sentence": "A.", "label": 1},
    "sst2": {"sentence": "A.", "label": 1},
    "stsb": {**_SENTENCES, "label": 3.8},
    "qqp": {"question1": "A.", "question2": "B.", "label": 1},
    "mnli": {"premise": "A.", "hypothesis": "B.", "label": 1},
    "qnli": {"question": "A.", "sentence": "B.", "label": 1},
}


@pytest.mark.parametrize("name", TASKS)
def test_files_of_the_hub_are_read(tmp_path: Path, name: str) -> None:
    """The files are Parquet. The test files have no labels."""
    task, row = TASKS[name], {**ROWS[name], "idx": 0}
    suffixes = ("_matched", "_mismatched") if name == "mnli" else ("",)
    held_out = [f"{split}{suffix}" for split in ("validation", "test") for suffix in suffixes]
    for split in ("train", *held_out):
        label = -1 if split.startswith("test") else row["label"]
        table = pa.Table.from_pylist([{**row, "label": label}])
        pq.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    files = {"training": training_files(task, tmp_path).train, **dev_files(task, tmp_path)}
    assert list(files) == ["training", *task.dev]
    for texts in read_task(task, files).texts.values():
        [text] = texts
        assert (text.text, text.pair) == ("A.", None if name in ("cola", "sst2") else "B.")
        assert text.label == ROWS[name]["label"]
    tests = read_test(task, tmp_path)
    assert list(tests) == [suffix.strip("_") or "test" for suffix in suffixes]
    assert {file.name for pattern in patterns_of(task) for file in tmp_path.glob(pattern)} == {
        file.name for file in tmp_path.iterdir()
    }
