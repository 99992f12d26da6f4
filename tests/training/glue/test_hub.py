"""Tasks by name, from a server on this machine that speaks the protocol of the Hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.training.conversion.hub_server import Hub, Repository, serve
from tests.training.conversion.test_hub import run
from training.glue.files import dev_files, training_files
from training.glue.tasks import TASKS
from training.options.labelled import GLUE
from training.tasks.classification.files import read_task

pytestmark = pytest.mark.process

# The columns of `nyu-mll/glue`, and a row.
_SENTENCES = {"sentence1": "A.", "sentence2": "B.", "label": 1}
ROWS = {
    "cola": {"sentence": "A.", "label": 1},
    "sst2": {"sentence": "A.", "label": 1},
    "mrpc": _SENTENCES,
    "stsb": {**_SENTENCES, "label": 3.8},
    "qqp": {"question1": "A.", "question2": "B.", "label": 1},
    "mnli": {"premise": "A.", "hypothesis": "B.", "label": 1},
    "qnli": {"question": "A.", "sentence": "B.", "label": 1},
    "rte": _SENTENCES,
    "wnli": _SENTENCES,
}

# Finds the files of a task, without --data or by it, and prints the texts of each split.
_READ = """
import json, sys
from pathlib import Path
from training.errors import report_errors
from training.glue.files import (dev_files, training_files)
from training.tasks.classification.files import (read_task)
from training.glue.tasks import TASKS
from training.options.labelled import LabelledTexts
def main():
    data = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    options = LabelledTexts(task=sys.argv[1], data=data)
    task, folder = TASKS[options.task], options.task_folder
    files = {"training": training_files(task, folder).train, **dev_files(task, folder)}
    texts = read_task(task, files).texts
    print(json.dumps({split: [each.text for each in its] for split, its in texts.items()}))
    return 0
sys.exit(report_errors(main))
"""


@pytest.fixture
def glue(tmp_path: Path) -> Path:
    """A folder as that of the Hub: one of Parquet files for each task."""
    for name, row in ROWS.items():
        (tmp_path / "glue" / name).mkdir(parents=True)
        row = {**row, "idx": 0}
        ends = ("_matched", "_mismatched") if name == "mnli" else ("",)
        held_out = [f"{split}{end}" for split in ("validation", "test") for end in ends]
        for split in ("train", *held_out):
            label = -1 if split.startswith("test") else row["label"]
            table = pa.Table.from_pylist([{**row, "label": label}])
            pq.write_table(table, tmp_path / "glue" / name / f"{split}-00000-of-00001.parquet")
    return tmp_path / "glue"


@pytest.fixture
def hub(glue: Path) -> Iterator[Hub]:
    with serve({GLUE.repo_id: Repository({str(GLUE.revision): glue})}) as hub:
        yield hub


@pytest.mark.parametrize("name", TASKS)
def test_the_hub_s_files_of_every_task_are_read(glue: Path, name: str) -> None:
    task, folder = TASKS[name], glue / name
    files = {"training": training_files(task, folder).train, **dev_files(task, folder)}
    assert list(files) == ["training", *task.dev]
    for texts in read_task(task, files).texts.values():
        [text] = texts
        is_single = name in ("cola", "sst2")
        assert (text.text, text.pair) == ("A.", None if is_single else "B.")
        assert text.label == ROWS[name]["label"]


@pytest.mark.extended
def test_a_task_without_its_folder_is_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    expected = {"training": ["A."], "matched": ["A."], "mismatched": ["A."]}
    ended = run(["-c", _READ, "mnli"], hub, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == expected
    assert {path.split("/")[-2] for path in hub.downloads} == {"mnli"}
    hub.requests.clear()
    assert json.loads(run(["-c", _READ, "mnli"], hub, tmp_path).stdout) == expected
    assert not hub.requests  # not even for the list of files


@pytest.mark.extended
@pytest.mark.parametrize(
    "data", [[], pytest.param([f"{GLUE.repo_id}@main"], marks=pytest.mark.slow)]
)
def test_a_task_that_the_cache_lacks_is_named(data: list[str], glue: Path, tmp_path: Path) -> None:
    with serve({GLUE.repo_id: Repository({str(GLUE.revision): glue, "main": glue})}) as hub:
        assert run(["-c", _READ, "cola", *data], hub, tmp_path).returncode == 0
        ended = run(["-c", _READ, "rte", *data], hub, tmp_path, HF_HUB_OFFLINE="1")
    assert ended.returncode == 1
    error = ended.stderr.splitlines()[-1]
    assert error.startswith(f"error: {data[0] if data else GLUE} is ")
    assert error.endswith(
        "; HF_HUB_OFFLINE forbids a download; --data names a folder with the files of --task rte"
    )


@pytest.mark.slow
def test_files_are_those_of_one_commit_or_of_another_that_is_named(
    glue: Path, tmp_path: Path
) -> None:
    """Each is found again without a connection."""
    newer = shutil.copytree(glue, tmp_path / "newer")
    for file in (newer / "cola").iterdir():
        pq.write_table(pa.Table.from_pylist([{"sentence": "Newer.", "label": 0}]), file)
    repository = Repository({str(GLUE.revision): glue, "main": newer})
    with serve({GLUE.repo_id: repository}) as hub:
        for data, expected in (
            ([], "A."),
            ([f"{GLUE.repo_id}@main"], "Newer."),
            ([GLUE.repo_id], "A."),
        ):
            for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
                ended = run(["-c", _READ, "cola", *data], hub, tmp_path, **environment)
                assert ended.returncode == 0, ended.stderr
                assert json.loads(ended.stdout) == {"training": [expected], "dev": [expected]}
        ended = run(["-c", _READ, "cola", f"{GLUE.repo_id}@no"], hub, tmp_path)
        assert f"error: {GLUE.repo_id} has no revision no" in ended.stderr
