"""Models of the hub, from a server on this machine, in processes that know it by `HF_ENDPOINT`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.conversion.forms import as_pickle, as_pickles
from tests.training.conversion.hub_server import Hub, Repository, serve
from tests.training.support import TINY, hf_model, our_model
from training.conversion.source import open_checkpoint
from training.model.checkpoint import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.process

# Opens each reference, and prints what came of it as a line of JSON.
_OPEN = """
import json, sys
from training.conversion.source import open_checkpoint
from albert_serve.errors import HubError
from training.model.checkpoint import CheckpointError, load_checkpoint
for reference in sys.argv[1:]:
    try:
        with open_checkpoint(reference) as checkpoint:
            model = load_checkpoint(checkpoint.folder)
            result = {"name": checkpoint.name, "bias": model.pooler.dense.bias[0].item()}
    except (CheckpointError, HubError) as error:
        result = {"error": str(error)}
    print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders as a hub has them: `both` forms of weights, one alone, and such as cannot be read."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("both", "pickle", "pickles", "older", "bert", "flax", "other")):
        model = hf_model(TINY, "AlbertForPreTraining", seed)
        model.save_pretrained(folder / name)
    shutil.copy(folder / "both" / "model.safetensors", folder / "keep")
    as_pickle(folder / "both")
    shutil.move(folder / "keep", folder / "both" / "model.safetensors")
    as_pickle(folder / "pickle")
    as_pickles(folder / "pickles")
    config = json.loads((folder / "bert" / "config.json").read_text())
    (folder / "bert" / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    shutil.move(folder / "flax" / "model.safetensors", folder / "flax" / "flax_model.msgpack")
    (folder / "other" / "config.json").unlink()
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def hub(models: dict[str, Path]) -> Iterator[Hub]:
    repositories = {
        "albert/both": Repository({"main": models["both"], "v1": models["older"]}),
    }
    for name in ("pickle", "pickles", "bert", "flax", "other"):
        repositories[f"albert/{name}"] = Repository({"main": models[name]})
    with serve(repositories) as hub:
        yield hub


def run(
    arguments: list[str], hub: Hub, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with a cache of its own there."""
    given = {**hub.environment(cwd / "cache"), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, timeout=300)


def open_all(hub: Hub, cwd: Path, *references: str, **environment: str) -> list[dict[str, Any]]:
    ended = run(["-c", _OPEN, *references], hub, cwd, **environment)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def bias(folder: Path) -> float:
    pooler = load_checkpoint(folder).pooler
    assert pooler is not None
    return pooler.dense.bias[0].item()


def test_models_of_each_form_and_revision(
    hub: Hub, models: dict[str, Path], tmp_path: Path
) -> None:
    """Each file is loaded once, of a model with both forms of weights one, of another none.

    What cannot be read is an error of one line.
    """
    main, commit = map(hub.repositories["albert/both"].commit, ("main", "v1"))
    names = {
        "albert/both": f"albert/both@{main}",
        "albert/both@v1": f"albert/both@{commit}",
        f"albert/both@{commit}": f"albert/both@{commit}",
        "albert/pickle": f"albert/pickle@{main}",
        "albert/pickles": f"albert/pickles@{main}",
    }
    errors = {
        "./albert/both": "./albert/both is a local path, but there is no such folder. ",
        "albert/bert": "config.json of albert/bert: model_type is 'bert'; only 'albert'",
        "albert/flax": ": neither model.safetensors nor pytorch_model.bin.",
        "albert/other": "albert/other is not a transformers model: it has no config.json.",
        "a/b/c": "a/b/c is not a local folder, and not the name of a model on the Hugging",
    }
    opened = open_all(hub, tmp_path, *names, *errors)
    assert [result["name"] for result in opened[: len(names)]] == list(names.values())
    for result, (reference, message) in zip(opened[len(names) :], errors.items(), strict=True):
        assert message in result["error"], reference
        assert "\n" not in result["error"]
    assert opened[0]["bias"] == bias(models["both"])
    assert opened[1]["bias"] == opened[2]["bias"] == bias(models["older"])
    assert len({result["bias"] for result in opened[: len(names)]}) == 4
    assert len(hub.downloads) == len(set(hub.downloads))
    both, bert = (
        [path.rpartition("/")[2] for path in hub.downloads if path.startswith(f"/albert/{name}/")]
        for name in ("both", "bert")
    )
    assert "model.safetensors" in both
    assert not any("bin" in name for name in both)
    assert not any("model" in name for name in bert)

    (snapshot,) = (tmp_path / "cache" / "hub" / "models--albert--pickles" / "snapshots").iterdir()
    (snapshot / "pytorch_model-00002-of-00002.bin").unlink()
    (half,) = open_all(hub, tmp_path, "albert/pickles", HF_HUB_OFFLINE="1")
    assert "does not have pytorch_model-00002-of-00002.bin of albert/pickles. " in half["error"]


def test_a_folder_wins_over_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(our_model(TINY, ("sentence-order",)), tmp_path / "albert" / "both")
    monkeypatch.chdir(tmp_path)
    with open_checkpoint("albert/both") as checkpoint:
        assert (checkpoint.folder, checkpoint.name) == (Path("albert/both"), "both")
