"""Teachers of three architectures and tokenizers, and a distillation that all its tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.distillation.teachers import make_albert, make_bert, make_roberta
from training.commands import distil
from training.distillation.teacher import Teacher, load_teacher

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a BERT of three layers. Copy it before changing it."""
    return make_bert(tmp_path_factory.mktemp("teachers") / "tiny-bert")


@pytest.fixture(scope="session")
def teacher(teacher_dir: Path) -> Teacher:
    return load_teacher(str(teacher_dir), CPU)


@pytest.fixture(scope="session")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    folder = make_roberta(tmp_path_factory.mktemp("teachers") / "tiny-roberta")
    return load_teacher(str(folder), CPU)


@pytest.fixture(scope="session")
def albert(vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    folder = make_albert(tmp_path_factory.mktemp("teachers") / "tiny-albert", vocab_dir)
    return load_teacher(str(folder), CPU)


@pytest.fixture(scope="session")
def teachers(teacher: Teacher, roberta: Teacher, albert: Teacher) -> dict[str, Teacher]:
    """By the name of their tokenizers."""
    return {"WordPiece": teacher, "byte-level BPE": roberta, "unigram": albert}


@pytest.fixture(scope="session")
def distil_options(teacher_dir: Path, easy_corpus: Path, vocab_dir: Path) -> list[str]:
    """A distillation of 60 steps; its folder is left to be named."""
    return [
        *("--teacher", str(teacher_dir)),
        *("--corpus", str(easy_corpus), "--tokenizer", str(vocab_dir)),
        *("--embedding-size", "32", "--length", "32", "--batch-size", "8", "--steps", "60"),
        *("--lr", "1e-2", "--adamw-lr", "1e-2", "--no-compile", "--device", "cpu"),
        *("--report-every", "5"),
    ]


@pytest.fixture(scope="session")
def distilled(distil_options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that run, never interrupted. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("distilled") / "run"
    assert distil.main([*distil_options, "--output", str(folder)]) == 0
    return folder
