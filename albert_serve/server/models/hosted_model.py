"""A hosted model: its tasks, its engine, and the queue in front of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from albert_serve import __version__
from albert_serve.api.schemas import ModelReply, TaskRequest
from albert_serve.batching.queue import Batcher, BatchObserver
from albert_serve.bundle.manifest import MANIFEST_FILE, Bundle
from albert_serve.errors import DeadlineExceededError, QueueFullError, TooMuchAtOnceError
from albert_serve.server.bodies import BodyBudget
from albert_serve.server.worker_thread import WorkerThread
from albert_serve.settings import Settings
from albert_serve.tasks import Logits, Prepared, Task, prepare_request, shape_reply
from albert_serve.tasks.base import finish_all, inputs_of
from albert_serve.tasks.description import describe

_ResultT = TypeVar("_ResultT")


def describe_hosted(name: str, bundle: Bundle, settings: Settings, mask_token: str) -> ModelReply:
    """Return a model's description and limits; it reads files, so call it off the event loop."""
    return ModelReply(
        **dict(describe(bundle.manifest, name, bundle.folder)),
        id=name,
        created=int((bundle.folder / MANIFEST_FILE).stat().st_mtime),
        version=__version__,
        mask_token=mask_token,
        max_items=settings.max_items,
        max_body_bytes=settings.max_body_bytes,
        needs_key=settings.needs_key,
    )


@dataclass(kw_only=True, slots=True, eq=False)
class HostedModel:
    """A model that answers requests. Belongs to one event loop.

    Attributes:
        tasks: the logic of each task of the bundle, by endpoint name.
        budget: limit of the bodies in progress.
        thread: reads and answers large requests.
        description: description of the model and its limits.
        info_json: the description as the reply of `/info`.
        observer: receives the batcher's events, and requests that never reach the queue.
    """

    name: str
    settings: Settings
    bundle: Bundle
    tasks: dict[str, Task]
    batcher: Batcher
    budget: BodyBudget
    thread: WorkerThread
    description: ModelReply
    observer: BatchObserver = field(default_factory=BatchObserver)
    info_json: str = field(init=False)
    _num_users: int = 0
    _unused: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.info_json = self.description.model_dump_json()
        self._unused.set()

    @contextmanager
    def in_use(self, task: str) -> Iterator[None]:
        """Keep the model open inside `with`, and count a request that is rejected or late."""
        self._num_users += 1
        self._unused.clear()
        try:
            yield
        except QueueFullError:
            self.observer.shed(task)
            raise
        except DeadlineExceededError:
            self.observer.expired(task)
            raise
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._unused.set()

    def prepare(self, task: Task, request: TaskRequest) -> list[Prepared[Any]]:
        """Return the encoder inputs of a valid request."""
        return prepare_request(task, request, max_tokens=self.settings.max_queue_tokens)

    async def answer(
        self,
        request: TaskRequest,
        prepared: Sequence[Prepared[Any]],
        encode: Callable[[Any], _ResultT],
        *,
        num_bytes: int,
        ends_s: float,
    ) -> _ResultT:
        """Run the prepared inputs of a request; return the reply, encoded.

        Args:
            encode: is called with the reply's value.
            num_bytes: the size of the request's body, which decides where the reply is made.
            ends_s: the deadline, on `time.monotonic`'s clock.
        """
        logits = await self.batcher.run(inputs_of(prepared), ends_s - time.monotonic())

        def finish(logits: list[Logits]) -> _ResultT:
            return encode(shape_reply(request, finish_all(prepared, logits)))

        return await self.thread.run(finish, logits, num_bytes=num_bytes, ends_s=ends_s)

    async def close(self) -> None:
        """Answer the accepted requests, and end the engine's thread."""
        await self._unused.wait()
        await self.batcher.close()

    def check_num_items(self, inputs: object, name: str = "inputs") -> None:
        """Refuse a list of too many inputs, before any of them is validated.

        Args:
            name: of the inputs, in the message.

        Raises:
            TooMuchAtOnceError: there are more than the setting allows.
        """
        if isinstance(inputs, list) and len(inputs) > self.settings.max_items:
            raise TooMuchAtOnceError(
                f"{name} holds {len(inputs)} items; at most {self.settings.max_items} are "
                "taken at once: split the list"
            )
