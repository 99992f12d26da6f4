"""A small model with four heads, its bundle, and one service process that all tests share.

Token classification has a model and a service of its own: a checkpoint has one head named
`classifier`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from albert_serve.bundle.manifest import HeadEntry
from albert_serve.cli import main
from albert_serve.config import AlbertConfig
from albert_serve.tasks import Prepared, TaskSetup
from albert_serve.tokenizer import AlbertTokenizer
from tests.albert_serve.support import ROOT, Answerer, Running, TorchEngine, served
from tests.export.exporting import export_bundle
from training.data.corpus import read_documents
from training.model.albert import ModelInputs
from training.model.checkpoint import load_checkpoint, save_checkpoint
from training.model.heads import AlbertForTasks
from training.vocabulary.spiece import build_tokenizer
from training.vocabulary.training import train_vocab

WIKI = ROOT / "tests/data/wiki.jsonl"
TOKEN_LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, large enough that logits differ, and a vocabulary of 1,000 pieces."""
    vocab = tmp_path_factory.mktemp("vocab")
    documents = read_documents([WIKI])
    spiece = train_vocab(documents, vocab, vocab_size=1000)
    build_tokenizer(spiece).save(str(vocab / "tokenizer.json"))
    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=1000,
        embedding_size=32,
        hidden_size=64,
        num_layers=3,
        num_heads=4,
        ffn_size=128,
        max_positions=128,
        initializer_range=0.2,
    )
    model = AlbertForTasks(
        config,
        {"fill-mask": 1000, "sentence-order": 2, "text-classification": 2, "question-answering": 2},
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    labels = {"id2label": {"0": "negative", "1": "positive"}}
    save_checkpoint(model, folder, tokenizer_from=vocab, extra_config=labels)
    return folder


@pytest.fixture(scope="session")
def bundle_dir(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint as a bundle. Copy it before changing it."""
    return export_bundle(checkpoint_dir, tmp_path_factory.mktemp("bundles") / "tiny").bundle.folder


@pytest.fixture(scope="session")
def int8_dir(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint in int8: another revision, whose answers differ a little."""
    folder = tmp_path_factory.mktemp("int8") / "tiny"
    return export_bundle(checkpoint_dir, folder, precision="int8").bundle.folder


@pytest.fixture(scope="session")
def service(bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A running service of the small bundle."""
    with served(bundle_dir, tmp_path_factory.mktemp("service")) as started:
        yield started


@pytest.fixture(scope="session")
def client(service: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=30) as http:
        yield http


@pytest.fixture(scope="session")
def token_checkpoint_dir(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a head for token classification in place of the others.

    Its bias is such that each label is the best of some tokens.
    """
    torch.manual_seed(1)
    model = load_checkpoint(checkpoint_dir, {"token-classification": len(TOKEN_LABELS)}).eval()
    ids = torch.randint(5, 1000, (1, 100))
    with torch.no_grad():
        hidden = model(ModelInputs(ids=ids, types=torch.zeros_like(ids)))[0]
        head = model.heads["token-classification"]
        head.get_parameter("output.bias").sub_(head(hidden).mean(0))
    folder = tmp_path_factory.mktemp("token-checkpoint")
    labels = {"id2label": {str(number): name for number, name in enumerate(TOKEN_LABELS)}}
    save_checkpoint(model, folder, tokenizer_from=checkpoint_dir, extra_config=labels)
    return folder


@pytest.fixture(scope="session")
def token_bundle(token_checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the model for token classification."""
    target = tmp_path_factory.mktemp("token-bundles") / "tokens"
    return export_bundle(token_checkpoint_dir, target).bundle.folder


@pytest.fixture(scope="session")
def token_service(
    token_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A running service of the bundle for token classification."""
    with served(token_bundle, tmp_path_factory.mktemp("token-service")) as started:
        yield started


@pytest.fixture
def service_of(request: pytest.FixtureRequest) -> Callable[[str], Running]:
    """The running service that answers a task."""

    def find(task: str) -> Running:
        name = "token_service" if task == "token-classification" else "service"
        found: Running = request.getfixturevalue(name)
        return found

    return find


@pytest.fixture
def failure(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Gives the one line of a command that fails."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        return line.removeprefix("error: ")

    return run


@pytest.fixture(scope="session")
def tokenizer(checkpoint_dir: Path) -> AlbertTokenizer:
    return AlbertTokenizer.from_file(checkpoint_dir / "tokenizer.json")


@pytest.fixture(scope="session")
def engine(checkpoint_dir: Path) -> TorchEngine:
    return TorchEngine(load_checkpoint(checkpoint_dir))


@pytest.fixture(scope="session")
def answer(engine: TorchEngine) -> Answerer:
    """Runs what a task prepared, and gives the answer."""

    def run(prepared: Prepared[Any]) -> Any:
        return prepared.finish(engine.run(prepared.inputs))

    return run


@pytest.fixture(scope="session")
def task_setup(tokenizer: AlbertTokenizer, engine: TorchEngine) -> TaskSetup:
    entry = HeadEntry(graph="a.onnx", num_outputs=2, labels=["negative", "positive"])
    return TaskSetup(
        tokenizer=tokenizer,
        max_positions=engine.model.config.max_positions,
        hidden_size=engine.model.config.hidden_size,
        heads={"text-classification": entry},
    )


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """Sentences of Wikipedia, short and long."""
    with WIKI.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    paragraphs = [line for text in texts for line in text.splitlines() if len(line) > 40]
    return [paragraph[:150] for paragraph in paragraphs[::7]][:12]
