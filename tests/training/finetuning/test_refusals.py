"""Options that do not go together, or not with the data, are refused in one line, without a run."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.training.support import (
    RACE,
    SQUAD,
    TINY,
    our_model,
    refusal,
    run_command,
)
from training.commands.finetune import main
from training.model.checkpoint import save_checkpoint

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
    (folder / "no-tokenizer").mkdir()
    save_checkpoint(our_model(TINY, ("fill-mask",)), folder / "no-tokenizer")
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
        "LOSS": "--metric loss",
        "texts": str(labelled),
        "lists": str(lists),
        "questions": str(SQUAD),
        "no-tokenizer": str(folder / "no-tokenizer"),
        "damaged": str(folder / "damaged"),
        "finetuned": str(finetuned / "checkpoint"),
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # the run and its sizes
        ("--steps 1", "nothing to train: give --text-classification"),
        ("QUESTIONS --length 4", "--length 4: a sequence has from 8 tokens to the model's 64"),
        ("TEXTS --length 65", "--length 65: a sequence"),
        ("TEXTS QUESTIONS --epochs 2", "epochs are those of one task; with several give"),
        ("TEXTS QUESTIONS --weights 1", "--weights [1.0]: give one for each of text-classificat"),
        ("TEXTS QUESTIONS --batch-size 1 2 3", "--batch-size 1 2 3: give one number, or one for"),
        ("TEXTS --initialize-from runs/best", "runs/best looks like a local folder, and there is"),
        ("TEXTS --initialize-from ./nowhere", "./nowhere is not a local folder"),
        ("QUESTIONS --initialize-from no-tokenizer --length 16", "tokenizer.json cannot be read"),
        ("TEXTS --initialize-from damaged", "model.safetensors is damaged: it has 0 bytes"),
        # files
        ("--text-classification none.tsv", "No such file or directory: 'none.tsv'"),
        ("--question-answering none.json", "none.json does not exist"),
        ("--pretraining none.txt", "none.txt does not exist"),
        ("ONE-LABEL", "all texts have the label x; a classifier needs two"),
        ("TEXTS --labels only", "label '1' (20 rows); allowed are only"),
        ("TEXTS --delimiter ab", "--delimiter 'ab': give one character"),
        ("TEXTS --label-column class", "no column class for --label-column; its columns are text,"),
        ("TEXTS --label-column a a", "--label-column a a: give each column once"),
        ("TEXTS --label-separator , --label-column a b", "--label-separator divides one column"),
        # tasks and recipes
        ("--data cola", "--data cola is the folder of a task; give --task"),
        ("COLA --labels a --text-column b", "leave out --labels, --text-column\n"),
        ("--task race", "--task RACE needs --data, the folder of its files"),
        ("TEXTS --recipe paper", "--recipe paper differs from task to task; give --task"),
        ("RACE --multiple-choice a.csv", "--task has its own files, columns and labels"),
        ("RACE --choice-columns a b", "leave out --choice-columns"),
        ("RACE --data nyu-mll/glue@main", "nyu-mll/glue@main is not a folder"),
        # validation and metrics
        ("TEXTS --patience 2", "--patience and --metric need held-out data; give --validation"),
        ("QUESTIONS --metric f1", "--metric requires --validation"),
        ("TEXTS --metric f1 --validation-split 0", "--metric requires --validation"),
        ("CORPUS --validation texts", "--validation requires labelled data: --text-cl"),
        ("TEXTS --validation questions", "line 1 begins an object of several lines; write one"),
        ("COLA --metric pearson", "--metric pearson does not apply to 2 labels; choose accuracy, "),
        ("QUESTIONS --validation questions --metric accuracy", "--metric accuracy does not apply"),
        ("RACE --metric f1", "f1 does not apply to multiple choice; choose accuracy, loss"),
        ("RACE --validation nowhere.csv", "nowhere.csv"),
        # kinds of labels
        ("COLA --class-weights 1 2 3", "--class-weights 1.0 2.0 3.0: give `balanced`, or one num"),
        ("LISTS --problem-type regression", "lists.jsonl, line 1: column label holds lists"),
        ("LISTS --label-separator , --problem-type regression", "this is regression"),
        ("LISTS --labels a b --problem-type regression", "a regression has one score; 2 "),
        (
            "LISTS --problem-type multi_label_classification --class-weights balanced",
            "--class-weights requires one label per text; this is multi_label_classification",
        ),
        (
            "LISTS --problem-type multi_label_classification --validation lists --metric accuracy",
            "does not apply to multi_label_classification; choose micro_f1, macro_f1, subset_",
        ),
        # multiple choice
        ("CHOICES --problem-type regression", "-choice cannot be combined with --problem-type"),
        ("RACE --class-weights balanced", "-choice cannot be combined with --class-weights"),
        ("TEXTS CHOICES", "--multiple-choice cannot be combined with --text-classification"),
        # continued pretraining
        ("CORPUS --order-share 1", "--order-share 1 leaves no step to masked tokens; give less"),
        ("CORPUS --order-length 65", "--order-length 65: a pair has from 8 tokens to the model's"),
        ("CORPUS --mask-rate 0.3 0.2 0.1", "--mask-rate takes one rate, or the first and the last"),
        ("TEXTS --mask-rate 0.3", "--mask-rate requires --pretraining"),
        ("TEXTS --order-sentences 1", "--order-sentences requires --pretraining"),
        # a teacher
        ("QUESTIONS --teacher nowhere", "--teacher requires --text-classification"),
        ("TEXTS --teacher nowhere --labels a b", "--teacher cannot be combined with --labels"),
        ("TEXTS --teacher nowhere --no-truncation", "cannot be combined with --no-truncation"),
        ("TEXTS --teacher /nowhere", "teacher /nowhere cannot be loaded: "),
        # further classifiers
        ("TEXTS --head a", "--head a is a classifier of texts; give its data after it"),
        ("TEXTS --head a --task race --data x", "is a classifier of texts"),
        ("TEXTS --head default TEXTS", "--head default names the default classifier"),
        ("TEXTS --head a TEXTS --metric accuracy", "--patience and --metric need held-out"),
        (
            "TEXTS --validation texts --head a TEXTS --validation texts LOSS",
            "--metric loss: with several classifiers validated",
        ),
        ("TEXTS --head a TEXTS --batch-size 1 2 3", "text-classification/a"),
        ("TEXTS --head a TEXTS --weights 1 2 3", "text-classification/a"),
        ("CHOICES --head a TEXTS", "--multiple-choice cannot be combined with --head"),
        ("QUESTIONS --validation questions --head a TEXTS", "--validation before --head is of the"),
        ("--labels sad glad --label-column b --head a TEXTS", "--labels requires --text-class"),
        ("QUESTIONS --recipe paper --head a TEXTS", "--recipe paper differs from task to task"),
        # the fitted head
        ("TEXTS --head-only", "--head-only cannot be combined with --steps"),
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


def test_a_run_of_several_tasks_needs_an_end(
    pretrained: Path, files: dict[str, str], tmp_path: Path, capsys: Capture
) -> None:
    data = f"{files['TEXTS']} {files['QUESTIONS']}".split()
    options = ["--initialize-from", str(pretrained / "checkpoint"), "--length", "64", *data]
    assert run(options, tmp_path / "run") == 1
    error = refusal(capsys, tmp_path / "run")
    assert error == "error: epochs are those of one task; with several give --steps or --budget\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--head", "a/b"], "--head 'a/b': a name has lower-case letters"),
        (["--head", "A"], "--head 'A': a name has"),
        (["--head="], "--head '': a name has"),
        (["--head", "a", "--head", "a"], "--head a is given twice"),
        (["--head", "a", "stray"], "--head a: unrecognized arguments: stray"),
        (["--hea", "a"], "unrecognized arguments: --hea a"),
        (["--head", "a", "--label-col", "b"], "unrecognized arguments: --label-col b"),
        (["--steps", "0"], "argument --steps: '0' is no whole number from 1"),
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
