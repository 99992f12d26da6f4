"""A machine with torch and nothing of ours, and runs as small as can be."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import venv
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from scripts.bare_machine.pack import Job, Limits, pack
from scripts.bare_machine.selection import Selection

# What a machine for training has, and what each of them cannot do without; `tokenizers` asks for
# much that it needs to fetch files alone.
INSTALLED: Final = ("torch", "numpy", "safetensors", "tqdm")
ALONE: Final = ("tokenizers",)
SMALL: Final = Limits(load_bytes=400 << 10, piece_bytes=48 << 10)
ONE_LOAD: Final = Limits(load_bytes=8 << 20, piece_bytes=1 << 20)


def make_python(folder: Path, *, has_torch: bool) -> Path:
    """A Python of its own; with torch it has that and what else such a machine has, no more."""
    venv.create(folder, with_pip=False)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for name in _with_requirements() if has_torch else ():
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "bin" / "python"


def _with_requirements() -> set[str]:
    todo, known = [*INSTALLED], {*ALONE}
    while todo:
        name = todo.pop()
        if name in known:
            continue
        known.add(name)
        for line in metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return known


def run_there(python: Path, *command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program on that machine: with no module of ours within reach."""
    return subprocess.run(
        [python, *command],
        cwd=folder,
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def bare_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}


def write_run(folder: Path, step: int, *, seed: int = 0, state_bytes: int = 5000) -> Path:
    """A run's folder in the layout of `training.pretrain`, of no model; its checkpoint."""
    checkpoint = folder / "checkpoints" / f"step-{step:08}"
    checkpoint.mkdir(parents=True)
    content = {
        "config.json": b"{}",
        "model.safetensors": noise(f"weights {step} {seed}", 3000),
        "state.pt": noise(f"state {step} {seed}", state_bytes),
    }
    for name, data in content.items():
        (checkpoint / name).write_bytes(data)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
    (checkpoint / "hashes.json").write_text(json.dumps(hashes))
    record = {"settings": {"seed": seed}, "config": {}, "corpus": [["corpus", 0]]}
    (folder / "run.json").write_text(json.dumps(record))
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": step}) + "\n")
    return checkpoint


def noise(seed: str, num_bytes: int) -> bytes:
    """Bytes that follow from the seed."""
    return hashlib.shake_256(seed.encode()).digest(num_bytes)


def content(folder: Path) -> dict[str, bytes]:
    """All files in a folder."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def damage(file: Path) -> None:
    """Change one byte in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def pack_small(shards: Path, tokenizer: Path, output: Path, limits: Limits = SMALL) -> list[Path]:
    """The loads of a job that is not run."""
    job = Job(selection=Selection.of(shards), tokenizer=tokenizer, options=["--steps", "3"])
    pack(job, output, limits)
    return sorted(output.iterdir())
