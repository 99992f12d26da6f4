"""The workflow of a notebook: finetune on a DataFrame, export, and answer one of its columns."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pytest
from pyarrow import parquet
from sklearn.metrics import accuracy_score, f1_score

from albert_serve.client import AlbertClient
from export.job import ExportConfig, export
from training.commands.finetune import FinetuneConfig, finetune
from training.errors import RunError, TrainingError
from training.finetuning.record import export_command
from training.model.checkpoint import read_config

ROWS = [
    {"review": f"the {thing} was {word}", "mood": mood}
    for thing in ("game", "city", "music", "work", "school")
    for mood, words in {"glad": ("good", "great", "first"), "sad": ("lost", "died", "war")}.items()
    for word in words
]
Configure = Callable[..., FinetuneConfig]


@pytest.fixture
def configure(pretrained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    monkeypatch.setenv("ALBERT_SERVE_CACHE", str(tmp_path / "cache"))

    def configure(data: Any, **changes: Any) -> FinetuneConfig:
        values = {"text_classification": data, "text_column": "review", "label_column": ("mood",)}
        values |= {"initialize_from": str(pretrained_run / "checkpoint"), "device": "cpu"}
        values |= {"length": 32, "batch_size": (10,), "steps": 40, "lr": 5e-3, "adamw_lr": 1e-2}
        values |= {"output": tmp_path / "run", "precision": "fp32"}
        return FinetuneConfig(**{**values, **changes})

    return configure


def test_a_notebook_finetunes_on_a_data_frame_and_answers(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pandas.DataFrame(ROWS)
    run = finetune(configure(frame.sample(frac=1, random_state=0), validation=ROWS))
    validation = run.validations[-1]
    assert validation["step"] == run.num_steps == 40
    assert validation["validation/text-classification/accuracy"] > 0.9
    assert run.best == tmp_path / "run/best"
    exported = export(ExportConfig(checkpoint=run.best, bundle=tmp_path / "bundle", quality=False))
    with AlbertClient.local(exported.bundle.folder, num_threads=1) as albert:
        answers = albert.text_classification(frame["review"])
        text = ROWS[0]["review"]
        calibrated = albert.text_classification(text)
        softmax = albert.text_classification(text, function_to_apply="softmax")
        logits = albert.text_classification(text, function_to_apply="none")
    temperature = read_config(run.best)["albert_temperature"]
    gap = logits[0].score - logits[1].score
    assert softmax[0].score == pytest.approx(1 / (1 + np.exp(-gap)), abs=1e-6)
    assert calibrated[0].score == pytest.approx(1 / (1 + np.exp(-gap / temperature)), abs=1e-6)
    labels = [answer[0].label for answer in answers]
    metrics = {"accuracy": accuracy_score, "macro_f1": partial(f1_score, average="macro")}
    for name, measure in metrics.items():
        expected = pytest.approx(validation[f"validation/text-classification/{name}"])
        assert measure(frame["mood"], labels) == expected

    capsys.readouterr()
    same_config = configure(frame.copy().sample(frac=1, random_state=0), validation=ROWS)
    assert finetune(same_config).num_steps == 40
    assert "Resuming from step 40" in capsys.readouterr().out
    message = r"a run with text_classification \"\['table (\w+)'\]\", not \"\['table (?!\1)\w+'\]"
    with pytest.raises(RunError, match=message):
        finetune(configure(frame.head(20), validation=ROWS))


def _with_categories(rows: list[dict[str, Any]]) -> polars.DataFrame:
    return polars.DataFrame(rows).with_columns(polars.col("mood").cast(polars.Categorical))


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize("to_table", [_with_categories, _columns, list, pandas.DataFrame])
def test_a_table_is_stored_in_a_file_that_is_named_by_its_content(
    to_table: Callable[[Any], Any], configure: Configure
) -> None:
    (file,) = configure(to_table(ROWS)).text_classification
    assert parquet.read_table(file).to_pylist() == ROWS
    assert configure(to_table(ROWS)).text_classification == (file,)
    assert export_command(configure(file, validation=to_table(ROWS))) is None
    assert configure(to_table(ROWS[1:])).text_classification != (file,)
    assert configure([file, str(file)]).text_classification == (file, file)
    assert configure(str(file)).text_classification == (file,)


def test_an_error_in_a_row_names_the_data_frame_and_the_row(configure: Configure) -> None:
    frame = pandas.DataFrame([*ROWS, {"review": "x", "mood": "gald"}])
    with pytest.raises(TrainingError, match=r"^the DataFrame, row 31: Label .gald"):
        finetune(configure(frame, labels=["glad", "sad"]))


def test_an_interrupted_run_is_saved_and_resumes(configure: Configure, tmp_path: Path) -> None:
    config = configure(ROWS, steps=1_000_000, report_every=1)

    def interrupt() -> None:
        while not (tmp_path / "run/metrics.jsonl").is_file():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt, match="Stopped after step"):
        finetune(config)
    saved = next((tmp_path / "run/checkpoints").iterdir())
    assert (saved / "model.safetensors").is_file()
    run = finetune(replace(config, steps=40))
    assert run.num_steps >= 40
