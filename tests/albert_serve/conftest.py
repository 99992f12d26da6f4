"""A small model with four heads, its bundle, and a service process that all tests share.

Token classification has another model and service, because a checkpoint has only one head with
the name `classifier`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch

from albert_serve.bundle.manifest import HeadEntry
from albert_serve.cli import main
from albert_serve.config import AlbertConfig
from albert_serve.tasks import TaskSetup
from albert_serve.tokenizer import AlbertTokenizer
from tests.albert_serve.support import Answerer, RunningService, TorchEngine, served
from tests.export.exporting import export_bundle, write_real_checkpoint
from tests.training.support import WIKI
from training.data.corpus import read_documents
from training.model.albert import ModelInputs
from training.model.checkpoint import load_checkpoint, save_checkpoint

TOKEN_LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a vocabulary of 1,000 pieces, and random weights whose logits differ."""
    config = AlbertConfig(
        vocab_size=1000,
        embedding_size=32,
        hidden_size=64,
        num_layers=3,
        num_heads=4,
        ffn_size=128,
        max_positions=128,
    )
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    return write_real_checkpoint(folder, config, scale=0.8)  # larger weights amplify rounding


@pytest.fixture(scope="session")
def bundle_dir(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the checkpoint. Copy it before you change it."""
    return export_bundle(checkpoint_dir, tmp_path_factory.mktemp("bundles") / "tiny").bundle.folder


@pytest.fixture(scope="session")
def int8_dir(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle in int8. Its revision differs, and its answers differ slightly."""
    folder = tmp_path_factory.mktemp("int8") / "tiny"
    return export_bundle(checkpoint_dir, folder, precision="int8").bundle.folder


@pytest.fixture(scope="session")
def service(bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A running service of the small bundle."""
    with served(bundle_dir, tmp_path_factory.mktemp("service")) as started:
        yield started


@pytest.fixture(scope="session")
def client(service: RunningService) -> Iterator[httpx.Client]:
    """An HTTP client of the running service."""
    with httpx.Client(base_url=service.url, timeout=30) as http:
        yield http


@pytest.fixture(scope="session")
def token_checkpoint_dir(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same encoder with a head for token classification only.

    The bias of the head is set so that each label is the best label of some tokens.
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
) -> Iterator[RunningService]:
    """A running service of the bundle for token classification."""
    with served(token_bundle, tmp_path_factory.mktemp("token-service")) as started:
        yield started


@pytest.fixture
def service_of(request: pytest.FixtureRequest) -> Callable[[str], RunningService]:
    """A function that returns the running service of a task."""
    return lambda task: request.getfixturevalue(
        "token_service" if task == "token-classification" else "service"
    )


@pytest.fixture
def error_of_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs a command, which must fail, and returns its error of one line."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 1
        output = capsys.readouterr()
        assert output.out == ""
        (line,) = output.err.splitlines()
        return line.removeprefix("error: ")

    return run


@pytest.fixture(scope="session")
def tokenizer(checkpoint_dir: Path) -> AlbertTokenizer:
    return AlbertTokenizer.from_file(checkpoint_dir / "tokenizer.json")


@pytest.fixture(scope="session")
def torch_engine(checkpoint_dir: Path) -> TorchEngine:
    return TorchEngine(load_checkpoint(checkpoint_dir))


@pytest.fixture(scope="session")
def answer(torch_engine: TorchEngine) -> Answerer:
    """A function that runs a prepared input in torch and returns the answer."""
    return lambda prepared: prepared.finish(torch_engine.run(prepared.inputs))


@pytest.fixture(scope="session")
def task_setup(tokenizer: AlbertTokenizer, torch_engine: TorchEngine) -> TaskSetup:
    entry = HeadEntry(graph="a.onnx", num_outputs=2, labels=["negative", "positive"])
    return TaskSetup(
        tokenizer=tokenizer,
        max_positions=torch_engine.model.config.max_positions,
        hidden_size=torch_engine.model.config.hidden_size,
        heads={"text-classification": entry},
    )


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """Texts of 41 to 150 characters from Wikipedia."""
    documents = read_documents([WIKI])
    paragraphs = [line for text in documents for line in text.splitlines() if len(line) > 40]
    return [paragraph[:150] for paragraph in paragraphs[::7]][:12]
