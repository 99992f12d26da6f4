"""A model that is served: its tasks, its engine, and the queue in front of that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from albert_serve import __version__
from albert_serve.batcher import Batcher
from albert_serve.bundle import Bundle
from albert_serve.errors import TooMuchAtOnceError
from albert_serve.scheduling import Priority
from albert_serve.schemas import InfoReply, TaskInfo, TaskRequest
from albert_serve.settings import Settings
from albert_serve.tasks import AnyTask, Prepared, Work, prepare_request


@dataclass(kw_only=True, slots=True, eq=False)
class ServedModel:
    """What answers the requests to one model. Belongs to one event loop.

    Attributes:
        tasks: the logic of each task that the bundle has, by endpoint name.
    """

    name: str
    settings: Settings
    bundle: Bundle
    tasks: dict[str, AnyTask]
    batcher: Batcher
    _num_users: int = 0
    _unused: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._unused.set()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside `with`, the model is not closed."""
        self._num_users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._unused.set()

    async def answer(
        self, task: str, given: TaskRequest, ends_s: float, priority: Priority
    ) -> tuple[list[Prepared[Any]], list[Any]]:
        """What a valid request was read as, and the answer to each of its items.

        Args:
            ends_s: when the deadline is, on `time.monotonic`'s clock.

        Raises:
            InvalidInputError: an item cannot be answered; for a list the message has its index.
            RequestError: the queue is full, or the deadline has passed.
            EngineError: the model failed.
        """
        # Off the event loop: a request's texts may be megabytes.
        prepared = await asyncio.to_thread(self._prepare, task, given)
        work = Work(prepared)
        while work.inputs:  # one round, but where the next inputs depend on these answers
            logits = await self.batcher.run(
                work.inputs, ends_s - time.monotonic(), priority=priority
            )
            await asyncio.to_thread(work.take, logits)
        return prepared, work.answers

    async def close(self) -> None:
        """Finish what was accepted, and end the engine's thread."""
        await self._unused.wait()
        await self.batcher.close()

    def info(self) -> InfoReply:
        """What is served, and the limits."""
        manifest = self.bundle.manifest
        return InfoReply(
            model_id=self.name,
            version=__version__,
            precision=manifest.precision,
            revision=manifest.revision,
            tasks=[
                TaskInfo(name=name, labels=entry.labels, problem_type=entry.problem_type)
                for name, entry in manifest.tasks.items()
                if name in self.tasks
            ],
            max_positions=self.bundle.config.max_positions,
            mask_token="[MASK]",  # noqa: S106  # not that kind of token
            max_items=self.settings.max_items,
            max_body_bytes=self.settings.max_body_bytes,
            needs_key=self.settings.needs_key,
        )

    def _prepare(self, task: str, given: TaskRequest) -> list[Prepared[Any]]:
        if isinstance(given.inputs, list) and len(given.inputs) > self.settings.max_items:
            raise TooMuchAtOnceError(
                f"inputs holds {len(given.inputs)} items; at most {self.settings.max_items} are "
                "taken at once: split the list"
            )
        return prepare_request(self.tasks[task], given)
