"""A run trains several tasks and classifiers in one model; faults are reported at the start."""

from __future__ import annotations

import itertools
import json
import signal
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch

from tests.training.processes import before_step, kill_self, run_in_process
from tests.training.support import (
    RACE,
    SQUAD,
    best_step,
    evaluate_checkpoint,
    read_metrics,
    read_validations,
    run_command,
    same_weights,
    startup_error,
    write,
)
from training.commands.finetune import main
from training.model.checkpoint import load_checkpoint, read_config, read_weights

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)

PROGRAM = "training.commands.finetune"


def test_all_tasks_are_in_one_checkpoint(finetuned_run: Path, pretrained_run: Path) -> None:
    model = load_checkpoint(finetuned_run / "checkpoint")
    others = ("sentence-order", "text-classification", "question-answering")
    assert model.tasks == {"fill-mask": 800, **dict.fromkeys(others, 2)}
    config = read_config(finetuned_run / "checkpoint")
    assert config["id2label"] == {"0": "negative", "1": "positive"}
    assert len(config["architectures"]) == 3
    for name in ("tokenizer.json", "spiece.model"):
        content = (finetuned_run / "checkpoint" / name).read_bytes()
        assert content == (pretrained_run / "checkpoint" / name).read_bytes()
    first, second = json.loads((finetuned_run / "checkpoint/training.json").read_text())["stages"]
    assert first["program"] == "albert-serve pretrain"
    assert second["program"] == "albert-serve finetune"
    assert second["settings"]["question_answering"] == ["squad.json"]
    names = {name for line in read_metrics(finetuned_run) for name in line}
    assert {f"{task}/loss" for task in model.tasks} <= names


def test_a_killed_run_resumes_to_the_same_weights(
    finetuned_run: Path, finetune_options: list[str], tmp_path: Path
) -> None:
    """The run is killed four times, with and without a checkpoint since the last kill."""
    run_once = partial(run_in_process, finetune_options, tmp_path / "run", program=PROGRAM)
    for step, interval in ((4, "10h"), (9, "0.0001s"), (9, "10h"), (30, "0.0001s")):
        ended = run_once("--save-every", interval, hook=partial(before_step, step, kill_self))
        assert ended.status == -signal.SIGKILL
    assert run_once().status == 0
    assert same_weights(tmp_path / "run", finetuned_run)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [10, 20, 30, 40]


MOODS = {"glad": ("good", "great", "beautiful", "first"), "sad": ("died", "lost", "war", "not")}
THINGS = ("game", "city", "music")


def rows(label: Literal["mood", "thing"]) -> list[str]:
    """Return each text with its mood or its thing as the label."""
    return [
        f"the {thing} was {word},{mood if label == 'mood' else thing}"
        for mood, words in MOODS.items()
        for thing, word in itertools.product(THINGS, words)
    ]


class HeadsRun(NamedTuple):
    """A run with two classifiers, and the labelled texts of both."""

    folder: Path
    moods: Path
    things: Path


@pytest.fixture(scope="module")
def heads_run(
    short_finetune_options: list[str], tmp_path_factory: pytest.TempPathFactory
) -> HeadsRun:
    """A run whose second classifier has its own columns, labels and metric."""
    folder = tmp_path_factory.mktemp("heads")
    moods = write(folder / "moods.csv", "\n".join(["text,label", *rows("mood")]))
    things = write(folder / "things.csv", "\n".join(["words,about", *rows("thing")]))
    options = [
        *(*short_finetune_options, "--text-classification", str(moods), "--validation", str(moods)),
        *("--head", "thing", "--text-classification", str(things), "--validation", str(things)),
        *("--text-column", "words", "--label-column", "about", "--metric", "macro_f1"),
        *("--batch-size", "12", "--lr", "5e-3", "--steps", "160", "--validate-every", "40"),
    ]
    assert run(options, folder / "run") == 0
    return HeadsRun(folder / "run", moods, things)


def test_both_classifiers_learn_their_own_labels(heads_run: HeadsRun, tmp_path: Path) -> None:
    checkpoint = heads_run.folder / "best"
    hf = read_config(checkpoint)
    assert list(hf["id2label"].values()) == ["glad", "sad"]
    assert list(hf["albert_heads"]) == ["thing"]
    assert hf["albert_heads"]["thing"]["id2label"] == {"0": "city", "1": "game", "2": "music"}
    for head, record in (("", hf), ("/thing", hf["albert_heads"]["thing"])):
        by_step = read_validations(heads_run.folder, f"text-classification{head}", "temperature")
        temperature = by_step[best_step(heads_run.folder)]
        assert record["albert_temperature"] == pytest.approx(temperature, rel=1e-4)

    data = ["--text-classification", str(heads_run.moods), "--head", "thing"]
    data += ["--text-classification", str(heads_run.things)]
    data += ["--text-column", "words", "--label-column", "about"]
    data += ["--predictions", str(tmp_path / "predictions.tsv")]
    metrics = evaluate_checkpoint(checkpoint, *data)
    for suffix, name, labelled in (("", "", rows("mood")), ("-thing", "/thing", rows("thing"))):
        lines = (tmp_path / f"predictions{suffix}.tsv").read_text().splitlines()[1:]
        pairs = zip(lines, labelled, strict=True)
        num_right = sum(line.split("\t")[1] == row.split(",")[1] for line, row in pairs)
        accuracy = metrics[f"text_classification{name}_accuracy"]
        assert accuracy == pytest.approx(num_right / len(labelled))
        assert accuracy > 0.9
    assert list(metrics["text_classification/thing_classes"]) == ["city", "game", "music"]


def test_the_mean_of_both_validations_selects_the_best(heads_run: HeadsRun) -> None:
    folder = heads_run.folder
    moods = read_validations(folder, "text-classification", "accuracy")
    things = read_validations(folder, "text-classification/thing", "macro_f1")
    assert list(moods) == list(things) == [0, 40, 80, 120, 160]
    means = {step: (moods[step] + things[step]) / 2 for step in moods}
    assert means[best_step(folder)] == max(means.values())
    assert "thing" in json.loads((folder / "run.json").read_text())["heads"]
    training = json.loads((folder / "checkpoint/training.json").read_text())
    settings = training["stages"][-1]["settings"]
    assert settings["validation"] == settings["text_classification"] == ["moods.csv", "things.csv"]
    # Each step trains one of the classifiers.
    names = {name for line in read_metrics(folder) for name in line if name.endswith("/loss")}
    assert {"text-classification/loss", "text-classification/thing/loss"} <= names


def test_a_new_head_leaves_the_other_heads_unchanged(
    heads_run: HeadsRun, short_finetune_options: list[str], tmp_path: Path
) -> None:
    best, moods, folder = heads_run.folder / "best", heads_run.moods, tmp_path / "added"
    tiny_steps = ["--steps", "2", "--lr", "1e-9", "--adamw-lr", "1e-9", "--weight-decay", "0"]
    head = ["--head", "mood-2", "--text-classification", str(moods), "--labels", "sad", "glad"]
    options = [*short_finetune_options, "--initialize-from", str(best), *tiny_steps, *head]
    assert run(options, folder) == 0
    before, after = (read_config(path) for path in (best, folder / "checkpoint"))
    for key in ("id2label", "label2id", "problem_type"):
        assert after[key] == before[key]
    assert list(after["albert_heads"]) == ["thing", "mood-2"]
    assert after["albert_heads"]["thing"] == before["albert_heads"]["thing"]
    assert list(after["albert_heads"]["mood-2"]["id2label"].values()) == ["sad", "glad"]
    for name in ("classifier.weight", "heads.thing.classifier.bias"):
        old, new = (read_weights(path)[name] for path in (best, folder / "checkpoint"))
        torch.testing.assert_close(new, old, atol=1e-6, rtol=0)
    metrics = evaluate_checkpoint(folder / "checkpoint", "--text-classification", str(moods))
    assert metrics["text_classification_accuracy"] > 0.9


@pytest.fixture(scope="module")
def option_words(
    labelled_texts: Path, easy_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The options and file names behind the short words of the following table."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("train.tsv", "dev.tsv"):
        write(folder / "cola" / name, "x\t1\t\tGood is it.\nx\t0\t*\tIt good is.\n" * 4)
    one_label = write(folder / "one-label.tsv", "text\tlabel\na\tx\nb\tx\n")
    return {
        "TEXTS": f"--text-classification {labelled_texts}",
        "COLA": f"--task cola --data {folder / 'cola'}",
        "QUESTIONS": f"--question-answering {SQUAD}",
        "CHOICES": f"--multiple-choice {RACE / 'train'}",
        "ONE-LABEL": f"--text-classification {one_label}",
        "CORPUS": f"--pretraining {easy_corpus}",
        "texts": str(labelled_texts),
        "questions": str(SQUAD),
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps 1", "There is nothing to train. Use --text-cl"),
        ("TEXTS QUESTIONS --batch-size 1 2 3", "--batch-size 1 2 3 is not one number per"),
        ("--text-classification none.tsv", "none.tsv does not exist."),
        ("ONE-LABEL", "A classifier needs two or more labels. All texts have x."),
        ("TEXTS QUESTIONS --recipe paper", "--recipe paper differs from task to task. Use --task"),
        ("CORPUS --validation texts", "--validation requires labelled data: --text-cl"),
        ("COLA --metric mse", "labels. Choose one of accuracy, macro_f1, matthews_correlation, f1"),
        ("ONE-LABEL --labels x y z --metric f1", "--metric f1 does not apply to 3 labels."),
        ("COLA --class-weights 1 2 3", "--class-weights 1.0 2.0 3.0 does not match the labels."),
        ("TEXTS --token-classification texts", "--token-classification cannot be combined with"),
        ("TEXTS CHOICES", "--multiple-choice cannot be combined with --text-classification"),
        ("TEXTS --mask-rate 0.3", "--mask-rate requires --pretraining"),
        ("TEXTS --head default TEXTS", "--head default names the default classifier"),
        ("QUESTIONS --validation questions --head a TEXTS", "--validation before --head belon"),
        (
            "TEXTS --validation-split 0 --metric f1 --head a TEXTS --validation texts",
            "--metric requi",
        ),
        ("QUESTIONS --head-only", "--head-only requires --text-classification or --task or --he"),
    ],
)
def test_impossible_options_print_one_line_and_start_no_run(
    short_finetune_options: list[str],
    option_words: dict[str, str],
    words: str,
    message: str,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    options = " ".join(option_words.get(word, word) for word in words.split())
    assert run([*short_finetune_options, *options.split()], tmp_path / "run") == 1
    assert message in startup_error(capsys, tmp_path / "run")


@pytest.mark.parametrize("words", ["--text-class a.csv", "--head x --text-class a.csv"])
def test_options_cannot_be_abbreviated(words: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["--output", "run", *words.split()])
    assert "--text-class" in capsys.readouterr().err


def test_all_faults_of_the_data_are_listed_together(
    finetune_options: list[str], tmp_path: Path, capsys: Capture
) -> None:
    texts = write(tmp_path / "a.tsv", "text\tlabel\nx\t1\t2\na war\t0\na game\t1\n")
    not_json = write(tmp_path / "not-json.json", "{")
    content = json.loads(SQUAD.read_text())
    answers = content["data"][0]["paragraphs"][0]["qas"][0]["answers"]
    answers[0] = {"text": "not in there", "answer_start": 3}
    wrong_offset = write(tmp_path / "wrong-offset.json", json.dumps(content))
    data = ["--text-classification", str(texts), "--question-answering", str(not_json)]
    assert run(finetune_options, tmp_path / "run", *data, str(wrong_offset)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"error: {texts}, line 2 has 3 fields, but the header has 2")
    assert lines[1].startswith(f"{not_json} is not in SQuAD's format: the file: Invalid JSON: ")
    assert lines[2].startswith(f"{wrong_offset}, question ")
    assert "not 'not in there', which occurs 0 times" in lines[2]
    assert len(lines) == 3
