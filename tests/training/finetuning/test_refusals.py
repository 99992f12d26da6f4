"""What is wrong with options and data is found before a run starts, and said at once."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.training.support import RACE, SQUAD, refusal, run_command
from training.commands.finetune import main

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)


@pytest.fixture(scope="module")
def files(
    labelled: Path,
    easy_corpus: Path,
    finetuned: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, str]:
    """The words that stand for options and files in the tables."""
    folder = tmp_path_factory.mktemp("files")
    cola, lists = folder / "cola", folder / "lists.jsonl"
    cola.mkdir()
    for name in ("train.tsv", "dev.tsv"):
        (cola / name).write_text("x\t1\t\tGood is it.\nx\t0\t*\tIt good is.\n" * 4)
    rows = [("a good game", ["glad"]), ("a lost war", ["sad"]), ("a great war", ["glad", "sad"])]
    lists.write_text("\n".join(json.dumps({"text": t, "label": each}) for t, each in rows))
    (folder / "one-label.tsv").write_text("text\tlabel\na\tx\nb\tx\n")
    shutil.copytree(finetuned / "checkpoint", folder / "damaged")
    (folder / "damaged" / "model.safetensors").write_bytes(b"")
    return {
        "TEXTS": f"--text-classification {labelled}",
        "COLA": f"--task cola --data {cola}",
        "RACE": f"--task RACE --data {RACE}",
        "LISTS": f"--text-classification {lists}",
        "QUESTIONS": f"--question-answering {SQUAD}",
        "CHOICES": f"--multiple-choice {RACE / 'train'}",
        "ONE-LABEL": f"--text-classification {folder / 'one-label.tsv'}",
        "CORPUS": f"--pretraining {easy_corpus}",
        "texts": str(labelled),
        "questions": str(SQUAD),
        "damaged": str(folder / "damaged"),
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # the run and its sizes
        ("--steps 1", "There is nothing to train. Use --text-cl"),
        ("TEXTS QUESTIONS --batch-size 1 2 3", "--batch-size 1 2 3 is not one number per"),
        ("TEXTS --initialize-from runs/best", "runs/best is a local path, but there is no such"),
        ("TEXTS --initialize-from damaged", "model.safetensors is damaged: it has 0 bytes"),
        ("TEXTS --patience 2 --validation-split 0", "--patience requires --validation"),
        # files
        ("--text-classification none.tsv", "none.tsv does not exist."),
        ("ONE-LABEL", "A classifier needs two or more labels. All texts have x."),
        # tasks and recipes
        ("COLA --labels a --text-column b", "Omit --labels, --text-column.\n"),
        ("TEXTS --labels a b A", "--labels a b A: two labels differ only in case or outer spaces"),
        ("TEXTS --recipe paper", "--recipe paper differs from task to task. Use --task"),
        ("RACE --multiple-choice a.csv", "--task has its own files, columns and labels"),
        ("RACE --data nyu-mll/glue@main", "nyu-mll/glue@main is not a folder"),
        # validation and metrics
        ("QUESTIONS --metric f1", "--metric requires --validation"),
        ("CORPUS --validation texts", "--validation requires labelled data: --text-cl"),
        ("COLA --metric pearson", "--metric pearson does not apply to 2 labels. Choose one of acc"),
        ("RACE --metric f1", "f1 does not apply to multiple choice. Choose one of acc"),
        # kinds of labels
        ("COLA --class-weights 1 2 3", "--class-weights 1.0 2.0 3.0 does not match the labels."),
        ("LISTS --label-separator , --problem-type regression", "problem type is regression"),
        (
            "LISTS --labels a b --problem-type regression",
            "A regression has one score, but --labels has 2",
        ),
        (
            "LISTS --problem-type multi_label_classification --class-weights balanced",
            "--class-weights requires one label per text, not multi_label_classification",
        ),
        # multiple choice
        ("TEXTS --token-classification texts", "--token-classification cannot be combined with"),
        ("TEXTS CHOICES", "--multiple-choice cannot be combined with --text-classification"),
        # continued pretraining
        ("TEXTS --mask-rate 0.3", "--mask-rate requires --pretraining"),
        # further classifiers
        ("TEXTS --head default TEXTS", "--head default names the default classifier"),
        ("TEXTS --head a TEXTS --batch-size 1 2 3", "text-classification/a"),
        (
            "QUESTIONS --validation questions --head a TEXTS",
            "--validation before --head belongs to",
        ),
        # the fitted head
        ("QUESTIONS --head-only", "--head-only requires --text-classification or --task or --he"),
    ],
)
def test_impossible_options_are_one_line_and_no_run(
    start: list[str],
    files: dict[str, str],
    words: str,
    message: str,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    options = [word for each in words.split() for word in files.get(each, each).split()]
    assert run([*start, *options], tmp_path / "run") == 1
    assert message in refusal(capsys, tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--head", "a/b"], "--head 'a/b' is not a name"),
        (["--head", "a", "--head", "a"], "--head a is repeated"),
        (["--head", "a", "stray"], "--head a: unrecognized arguments: stray"),
        (["--hea", "a"], "unrecognized arguments: --hea a"),
        (["--steps", "0"], "argument --steps: '0' is not a whole number from 1"),
        (["--task", "NLI"], "argument --task: "),
    ],
)
def test_values_that_cannot_be_read_are_refused_by_the_parser(
    start: list[str], tmp_path: Path, capsys: Capture, words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run([*start, *words], tmp_path / "run")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def write(file: Path, *lines: str) -> Path:
    file.write_text("\n".join([*lines, ""]))
    return file


def errors_of(capsys: Capture, folder: Path) -> list[str]:
    """The lines of the error, without the folder of the files."""
    lines = capsys.readouterr().err.removeprefix("error: ").splitlines()
    return [line.replace(f"{folder}/", "") for line in lines]


def test_errors_of_all_splits_are_listed(start: list[str], tmp_path: Path, capsys: Capture) -> None:
    """Texts that are too long, and questions."""
    long = "a long text " * 20
    train = write(tmp_path / "a.tsv", "text\tlabel", "a\t0", f"{long}\t1")
    held_out = write(tmp_path / "b.tsv", "text\tlabel", f"{long}\t0")
    options = [*start, "--text-classification", str(train), "--validation", str(held_out)]
    assert run([*options, "--no-truncation"], tmp_path / "run") == 1
    lines = errors_of(capsys, tmp_path)
    assert [line.partition(": ")[0] for line in lines] == ["a.tsv, line 3", "b.tsv, line 2"]
    question = {"id": "1", "question": "Who?", "answers": [{"text": " ", "answer_start": 0}]}
    paragraph = {"context": "Ann left.", "qas": [question]}
    train = write(tmp_path / "a.json", json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    paragraph["qas"] = [{**question, "answers": [{"text": "Ann", "answer_start": 0}]}] * 2
    held_out = write(tmp_path / "b.json", json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    options = [*start, "--question-answering", str(train), "--validation", str(held_out)]
    assert run(options, tmp_path / "run") == 1
    first, second = errors_of(capsys, tmp_path)
    assert first.startswith("a.json, question 1: The answer is empty")
    assert second.startswith("Several questions have the same id, for 1 ids: ")


def test_missing_files_of_all_tasks_are_listed(
    start: list[str], tmp_path: Path, capsys: Capture
) -> None:
    for name in ("cola", "rte"):
        (tmp_path / name).mkdir()
    write(tmp_path / "rte" / "train.tsv", "index\tsentence1\tsentence2\tlabel")
    tasks = ["--task", "cola", "--data", str(tmp_path / "cola")]
    tasks += ["--head", "more", "--task", "rte", "--data", str(tmp_path / "rte")]
    assert run([*start, *tasks], tmp_path / "run") == 1
    assert [line.partition(" file ")[0] for line in errors_of(capsys, tmp_path)] == [
        "cola has no training",
        "cola has no held-out",
        "rte has no held-out",
    ]
    assert run([*start, "--task", "RACE", "--data", str(tmp_path)], tmp_path / "run") == 1
    kinds = [line.partition(" has no ")[2] for line in errors_of(capsys, tmp_path)]
    assert kinds == ["training files train/ or train*.jsonl.", "held-out files dev/ or dev*.jsonl."]


def test_all_that_is_wrong_with_the_data_is_listed_at_once(
    finetune_options: list[str], tmp_path: Path, capsys: Capture
) -> None:
    texts, broken, moved = (tmp_path / name for name in ("a.tsv", "broken.json", "moved.json"))
    texts.write_text("text\tlabel\nx\t1\t2\na war\t0\na game\t1\n")
    broken.write_text("{")
    content = json.loads(SQUAD.read_text())
    answers = content["data"][0]["paragraphs"][0]["qas"][0]["answers"]
    answers[0] = {"text": "not in there", "answer_start": 3}
    moved.write_text(json.dumps(content))
    more = ("--text-classification", str(texts), "--question-answering", str(broken), str(moved))
    assert run(finetune_options, tmp_path / "run", *more) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"error: {texts}, line 2 has 3 fields, but the header has 2")
    assert lines[1].startswith(f"{broken} is not in SQuAD's format: the file: Invalid JSON: ")
    assert lines[2].startswith(f"{moved}, question ")
    assert "not 'not in there', which occurs 0 times" in lines[2]
    assert len(lines) == 3
