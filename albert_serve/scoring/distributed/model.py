"""The model of a worker: opened where the rows are, once in each process."""

from __future__ import annotations

import functools
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from albert_serve import __version__
from albert_serve.bundle.manifest import Bundle
from albert_serve.bundle.store import locate
from albert_serve.default_bundle import BUNDLE_VARIABLE, MODELS_VARIABLE
from albert_serve.errors import AlbertServeError
from albert_serve.scoring.errors import ChangedJobError
from albert_serve.scoring.local import LocalScorer
from albert_serve.settings import Device, Settings

# An engine is opened by one thread, while others wait for it.
_LOCK: Final = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerModel:
    """A model, and how a worker runs it.

    Attributes:
        bundle: its folder on each node, or `bentoml:` and a tag.
        task: the task that is scored.
        num_threads: threads of one run.
        device: the device to run on.
        prepack: where pre-packed weights are; "auto" is a folder of the node's that the processes
            of a node share.
        revision: the revision that the bundle must have; "" for any.
        version: the version that albert-serve must have on the node; "" for any.
    """

    bundle: str
    task: str
    num_threads: int = 1
    device: Device = "cpu"
    prepack: str = "auto"
    revision: str = ""
    version: str = ""

    def open(self) -> LocalScorer:
        """Return the scorer of this process, opened at the first call.

        Raises:
            AlbertServeError: the model cannot be opened on this node, or is another; the message
                names the node.
        """
        with _LOCK:
            return _opened(self)

    def _open(self) -> LocalScorer:
        if self.version not in ("", __version__):
            raise ChangedJobError(
                f"albert-serve is {__version__} here and {self.version} where the job was started"
            )
        variables = {
            BUNDLE_VARIABLE: self.bundle,
            MODELS_VARIABLE: "",
            "ALBERT_SERVE_THREADS": str(self.num_threads),
            "ALBERT_SERVE_DEVICE": self.device,
            "ALBERT_SERVE_PREPACK": self.prepack,
        }
        bundle = Bundle.open(locate(Path(self.bundle)))
        if self.revision not in ("", bundle.manifest.revision):
            raise ChangedJobError(
                f"{self.bundle} has revision {bundle.manifest.revision} here and {self.revision} "
                "where the job was started; copy the same bundle to each node"
            )
        return LocalScorer.open(bundle, self.task, Settings.from_environment(variables).job_runtime)


@functools.cache
def _opened(model: WorkerModel) -> LocalScorer:
    try:
        return model._open()
    except AlbertServeError as error:
        raise type(error)(f"on {socket.gethostname()}: {error}") from error
