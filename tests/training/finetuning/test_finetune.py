"""Several tasks and classifiers are learnt into one set of weights; faults are said at once."""

from __future__ import annotations

import itertools
import json
import signal
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.training.processes import before_step, die, run_in_process
from tests.training.support import (
    RACE,
    SQUAD,
    best_step,
    evaluated,
    read_metrics,
    refusal,
    run_command,
    same_weights,
    validations,
)
from training.commands.finetune import main
from training.model.checkpoint import load_checkpoint, read_config, read_shapes, read_weights

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)

PROGRAM = "training.commands.finetune"


def test_all_tasks_are_in_one_checkpoint(finetuned: Path, pretrained: Path) -> None:
    model = load_checkpoint(finetuned / "checkpoint")
    assert model.tasks == {
        "fill-mask": 800,
        "sentence-order": 2,
        "text-classification": 2,
        "question-answering": 2,
    }
    config = read_config(finetuned / "checkpoint")
    assert config["id2label"] == {"0": "negative", "1": "positive"}
    assert len(config["architectures"]) == 3
    for name in ("tokenizer.json", "spiece.model"):
        ours = (finetuned / "checkpoint" / name).read_bytes()
        assert ours == (pretrained / "checkpoint" / name).read_bytes()
    first, second = json.loads((finetuned / "checkpoint/training.json").read_text())["stages"]
    assert first["program"] == "albert-serve pretrain"
    assert second["program"] == "albert-serve finetune"
    assert second["settings"]["question_answering"] == ["squad.json"]
    names = {name for line in read_metrics(finetuned) for name in line}
    assert {f"{task}/loss" for task in model.tasks} <= names


def test_a_run_that_is_killed_goes_on_to_the_same_weights(
    finetuned: Path, finetune_options: list[str], tmp_path: Path
) -> None:
    """Again and again, with checkpoints between its deaths and without."""
    apart = partial(run_in_process, finetune_options, tmp_path / "run", program=PROGRAM)
    for step, saving in ((4, "10h"), (9, "0.0001s"), (9, "10h"), (30, "0.0001s")):
        ended = apart("--save-every", saving, fate=partial(before_step, step, die))
        assert ended.status == -signal.SIGKILL
    assert apart().status == 0
    assert same_weights(tmp_path / "run", finetuned)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [10, 20, 30, 40]


MOODS = {"glad": ("good", "great", "beautiful", "first"), "sad": ("died", "lost", "war", "not")}
THINGS = ("game", "city", "music")


def rows(thing_first: bool) -> list[str]:
    """Each text with what it is about, or with its mood."""
    return [
        f"the {thing} was {word},{thing if thing_first else mood}"
        for mood, words in MOODS.items()
        for thing, word in itertools.product(THINGS, words)
    ]


class Heads(NamedTuple):
    """A run of two classifiers, and the files of both."""

    folder: Path
    moods: Path
    things: Path


@pytest.fixture(scope="module")
def trained(start: list[str], tmp_path_factory: pytest.TempPathFactory) -> Heads:
    """The second classifier has columns, labels and a metric of its own."""
    folder = tmp_path_factory.mktemp("heads")
    moods, things = folder / "moods.csv", folder / "things.csv"
    moods.write_text("\n".join(["text,label", *rows(False)]))
    things.write_text("\n".join(["words,about", *rows(True)]))
    options = [
        *(*start, "--text-classification", str(moods), "--validation", str(moods)),
        *("--head", "thing", "--text-classification", str(things), "--validation", str(things)),
        *("--text-column", "words", "--label-column", "about", "--metric", "macro_f1"),
        *("--batch-size", "12", "--lr", "5e-3", "--steps", "160", "--validate-every", "40"),
    ]
    assert run(options, folder / "run") == 0
    return Heads(folder / "run", moods, things)


def test_both_are_learnt_each_with_labels_of_its_own(trained: Heads, tmp_path: Path) -> None:
    checkpoint = trained.folder / "best"
    hf = read_config(checkpoint)
    assert list(hf["id2label"].values()) == ["glad", "sad"]
    assert list(hf["albert_heads"]) == ["thing"]
    assert hf["albert_heads"]["thing"]["id2label"] == {"0": "city", "1": "game", "2": "music"}
    shapes = read_shapes(checkpoint)
    assert shapes["classifier.weight"] == (2, 32)
    assert shapes["heads.thing.classifier.weight"] == (3, 32)

    data = ["--text-classification", str(trained.moods), "--head", "thing"]
    data += ["--text-classification", str(trained.things)]
    data += ["--text-column", "words", "--label-column", "about"]
    figures = evaluated(checkpoint, *data, "--predictions", str(tmp_path / "predicted.tsv"))
    for end, name, right in (("", "", rows(False)), ("-thing", "/thing", rows(True))):
        lines = (tmp_path / f"predicted{end}.tsv").read_text().splitlines()[1:]
        pairs = zip(lines, right, strict=True)
        num_right = sum(one.split("\t")[1] == other.split(",")[1] for one, other in pairs)
        accuracy = figures[f"text_classification{name}_accuracy"]
        assert accuracy == pytest.approx(num_right / len(right))
        assert accuracy > 0.9
    assert list(figures["text_classification/thing_classes"]) == ["city", "game", "music"]


def test_each_is_validated_and_the_mean_decides(trained: Heads) -> None:
    folder = trained.folder
    moods = validations(folder, "text-classification", "accuracy")
    things = validations(folder, "text-classification/thing", "macro_f1")
    assert list(moods) == list(things) == [0, 40, 80, 120, 160]
    means = {step: (moods[step] + things[step]) / 2 for step in moods}
    assert means[best_step(folder)] == max(means.values())
    assert "thing" in json.loads((folder / "run.json").read_text())["heads"]
    training = json.loads((folder / "checkpoint/training.json").read_text())
    settings = training["stages"][-1]["settings"]
    assert settings["validation"] == settings["text_classification"] == ["moods.csv", "things.csv"]
    # Each step trains one of them.
    names = {name for line in read_metrics(folder) for name in line if name.endswith("/loss")}
    assert {"text-classification/loss", "text-classification/thing/loss"} <= names


def test_a_head_is_added_to_a_model_that_has_some(
    trained: Heads, start: list[str], tmp_path: Path
) -> None:
    """The others keep their weights but for the backbone's, and their labels and names."""
    best, moods, folder = trained.folder / "best", trained.moods, tmp_path / "added"
    tiny = ["--steps", "2", "--lr", "1e-9", "--adamw-lr", "1e-9", "--weight-decay", "0"]
    head = ["--head", "mood-2", "--text-classification", str(moods), "--labels", "sad", "glad"]
    options = [*start, "--initialize-from", str(best), *tiny, *head]
    assert run(options, folder) == 0
    before, after = (read_config(each) for each in (best, folder / "checkpoint"))
    for key in ("id2label", "label2id", "problem_type"):
        assert after[key] == before[key]
    assert list(after["albert_heads"]) == ["thing", "mood-2"]
    assert after["albert_heads"]["thing"] == before["albert_heads"]["thing"]
    assert list(after["albert_heads"]["mood-2"]["id2label"].values()) == ["sad", "glad"]
    for name in ("classifier.weight", "heads.thing.classifier.bias"):
        old, new = (read_weights(each)[name] for each in (best, folder / "checkpoint"))
        torch.testing.assert_close(new, old, atol=1e-6, rtol=0)
    # What was learnt is still answered.
    data = ("--text-classification", str(moods))
    assert evaluated(folder / "checkpoint", *data)["text_classification_accuracy"] > 0.9


@pytest.fixture(scope="module")
def files(
    labelled: Path, easy_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The words that stand for options and files in the table."""
    folder = tmp_path_factory.mktemp("files")
    cola = folder / "cola"
    cola.mkdir()
    for name in ("train.tsv", "dev.tsv"):
        (cola / name).write_text("x\t1\t\tGood is it.\nx\t0\t*\tIt good is.\n" * 4)
    (folder / "one-label.tsv").write_text("text\tlabel\na\tx\nb\tx\n")
    return {
        "TEXTS": f"--text-classification {labelled}",
        "COLA": f"--task cola --data {cola}",
        "QUESTIONS": f"--question-answering {SQUAD}",
        "CHOICES": f"--multiple-choice {RACE / 'train'}",
        "ONE-LABEL": f"--text-classification {folder / 'one-label.tsv'}",
        "CORPUS": f"--pretraining {easy_corpus}",
        "texts": str(labelled),
        "questions": str(SQUAD),
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps 1", "There is nothing to train. Use --text-cl"),
        ("TEXTS QUESTIONS --batch-size 1 2 3", "--batch-size 1 2 3 is not one number per"),
        ("--text-classification none.tsv", "none.tsv does not exist."),
        ("ONE-LABEL", "A classifier needs two or more labels. All texts have x."),
        ("TEXTS --recipe paper", "--recipe paper differs from task to task. Use --task"),
        ("CORPUS --validation texts", "--validation requires labelled data: --text-cl"),
        ("COLA --metric pearson", "--metric pearson does not apply to 2 labels. Choose one of acc"),
        ("COLA --class-weights 1 2 3", "--class-weights 1.0 2.0 3.0 does not match the labels."),
        ("TEXTS --token-classification texts", "--token-classification cannot be combined with"),
        ("TEXTS CHOICES", "--multiple-choice cannot be combined with --text-classification"),
        ("TEXTS --mask-rate 0.3", "--mask-rate requires --pretraining"),
        ("TEXTS --head default TEXTS", "--head default names the default classifier"),
        (
            "QUESTIONS --validation questions --head a TEXTS",
            "--validation before --head belongs to",
        ),
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
