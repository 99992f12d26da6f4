"""A service process on this machine, its memory, and its requests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil

from albert_serve.bundle.manifest import MANIFEST_FILE, WEIGHTS_FILE, read_manifest
from albert_serve.default_bundle import shipped_bundle
from benchmarks.harness.load import http_request
from benchmarks.harness.service import REPOSITORY, ServiceProcess, start

_NOT_OF_FILES: Final = re.compile(r"^Pss_(?:Anon|Shmem): *(\d+) kB$", re.MULTILINE)
_SHORT_WORDS: Final = 12
_WORKER: Final = "_bentoml_impl.worker.service"


@dataclass(frozen=True, kw_only=True, slots=True)
class Service(ServiceProcess):
    """A running service of this package."""

    @property
    def pss_mb(self) -> float:
        """Memory of all its processes, what they share counted once, pages of files left out.

        Those are weights and libraries; how much of them is whose depends on who else reads them.
        """
        total_kb = 0
        for process in self._processes():
            with contextlib.suppress(psutil.Error, OSError):
                rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
                total_kb += sum(map(int, _NOT_OF_FILES.findall(rollup)))
        return total_kb * 1024 / 1e6

    @property
    def workers(self) -> list[int]:
        """The processes that answer."""
        pids = []
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                if _WORKER in process.cmdline():
                    pids.append(process.pid)
        return pids

    @property
    def revision(self) -> str:
        """The revision of the bundle that answers; empty without a reply."""
        status, body = self.get("/info")
        return str(json.loads(body)["revision"]) if status == 200 else ""

    def _processes(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@contextlib.contextmanager
def serving(
    bundle: Path | None, folder: Path, settings: Mapping[str, str] | None = None
) -> Iterator[Service]:
    """Start `albert-serve serve`, wait until it is ready, and end it afterwards.

    Args:
        bundle: None for the one that ships.
        folder: where its log goes.
        settings: as ALBERT_SERVE_NAME, by NAME.
    """
    chosen = {f"ALBERT_SERVE_{name}": value for name, value in (settings or {}).items()}
    if bundle is not None:
        chosen["ALBERT_SERVE_BUNDLE"] = str(bundle.absolute())
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        **chosen,
    }
    with start(["-m", "albert_serve", "serve"], folder, environment) as started:
        yield Service(process=started.process, port=started.port, log_file=started.log_file)


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleLink:
    """Bundles that a service can be turned from one to another: first, other and damaged.

    Attributes:
        link: symbolic link to one of them, which the service opens.
    """

    folder: Path
    link: Path

    @classmethod
    def make(cls, bundle: Path | None, folder: Path) -> BundleLink:
        """Copies of a bundle, the other with a word more in its manifest, with first put up."""
        folder = folder / "bundles"
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("first", "other", "damaged"):
            shutil.copytree(bundle or shipped_bundle(), folder / name)
        manifest = folder / "other" / MANIFEST_FILE
        content = json.loads(manifest.read_text(encoding="utf-8"))
        content["provenance"] = {**content.get("provenance", {}), "note": "the other one"}
        manifest.write_text(json.dumps(content), encoding="utf-8")
        with (folder / "damaged" / WEIGHTS_FILE).open("r+b") as weights:
            weights.truncate(1000)
        bundles = cls(folder=folder, link=folder / "link")
        bundles.put("first")
        return bundles

    def put(self, name: str) -> None:
        """Let the link point to a bundle, atomically."""
        new = self.folder / "new"
        new.symlink_to(self.folder / name)
        new.replace(self.link)


def revision_of(bundle: Path) -> str:
    """Return the revision of a bundle, as `/info` does."""
    return read_manifest(bundle).revision


def growth(samples: Sequence[float]) -> float:
    """Return the growth from the second to the last tenth, by their medians: 0.05 is 5 %."""
    tenth = max(1, len(samples) // 10)
    return median(samples[-tenth:]) / median(samples[tenth : 2 * tenth] or samples) - 1


def mixed_requests(num: int = 400, seed: int = 0) -> list[bytes]:
    """Requests of all tasks, short and long, one text or a few, of the repository's own texts."""
    chance = random.Random(seed)
    sentences = _sentences()
    return [_request(chance, sentences) for _ in range(num)]


def short_requests() -> list[bytes]:
    """Requests of one short text each, by turns of fill-mask and text-classification."""
    sentences = [text for text in _sentences() if len(text.split()) <= _SHORT_WORDS]
    requests = []
    for text in sentences:
        first, _, rest = text.partition(" ")
        requests.append(http_request("/fill-mask", {"inputs": f"{first} [MASK] {rest}"}))
        requests.append(http_request("/text-classification", {"inputs": text}))
    return requests


def _request(chance: random.Random, sentences: list[str]) -> bytes:
    task = chance.choice(list(_INPUTS))
    items = [_INPUTS[task](chance, sentences) for _ in range(chance.choice([1, 1, 1, 4]))]
    inputs = items[0] if len(items) == 1 else items
    parameters = {"truncation": "truncate"} if task == "text-classification" else {}
    body = {"inputs": inputs, **({"parameters": parameters} if parameters else {})}
    return http_request(f"/{task}", body)


def _sentences() -> list[str]:
    lines = (REPOSITORY / "tests/data/wiki.jsonl").read_text(encoding="utf-8").splitlines()
    texts = " ".join(json.loads(line)["text"] for line in lines).replace("\n", " ")
    return [text.strip() for text in texts.split(". ") if 5 <= len(text.split()) <= 25]


def _masked(chance: random.Random, sentences: list[str]) -> Any:
    words = chance.choice(sentences).split()
    words[chance.randrange(len(words))] = "[MASK]"
    return " ".join(words)


def _pair(chance: random.Random, sentences: list[str]) -> Any:
    at = chance.randrange(len(sentences) - 1)
    return {"text": sentences[at][:120], "text_pair": sentences[at + 1][:120]}


def _question(chance: random.Random, sentences: list[str]) -> Any:
    at = chance.randrange(len(sentences) - 4)
    return {"question": "When was it?", "context": ". ".join(sentences[at : at + 4])}


def _review(chance: random.Random, sentences: list[str]) -> Any:
    at = chance.randrange(len(sentences) - 4)
    return ". ".join(sentences[at : at + chance.randint(1, 4)])


_INPUTS: Final = {
    "fill-mask": _masked,
    "text-classification": _review,
    "question-answering": _question,
    "sentence-order": _pair,
}
