"""A hosted model: its tasks, its engine, and the queue in front of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack

from pydantic import BaseModel

from albert_serve import __version__
from albert_serve.api.schemas import InfoReply, TaskInfo, TaskRequest
from albert_serve.batching.batcher import Batcher
from albert_serve.batching.scheduler import Priority
from albert_serve.bundle.manifest import Bundle
from albert_serve.errors import DeadlineExceededError, TooMuchAtOnceError
from albert_serve.settings import Settings
from albert_serve.tasks import AnyTask, Logits, Prepared, Work, prepare_request, shape_reply

_Args = TypeVarTuple("_Args")
_ResultT = TypeVar("_ResultT")


# Texts of a request that are tokenised by a thread of their own: some 10 ms of work and more.
_LONG_CHARS: Final = 1 << 14


@dataclass(kw_only=True, slots=True, eq=False)
class HostedModel:
    """A model that answers requests. Belongs to one event loop.

    Attributes:
        tasks: the logic of each task of the bundle, by endpoint name.
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
        """Keep the model open inside `with`."""
        self._num_users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._unused.set()

    async def answer(
        self,
        task: str,
        request: TaskRequest,
        ends_s: float,
        priority: Priority,
        encode: Callable[[Any], _ResultT],
    ) -> tuple[list[Prepared[Any]], _ResultT]:
        """Answer a valid request; return its prepared inputs, and the reply, encoded.

        Args:
            ends_s: the deadline, on `time.monotonic`'s clock.
            encode: is called with the reply's value, off the event loop.

        Raises:
            InvalidInputError: an item cannot be answered; for a list the message has its index.
            RequestError: the queue is full, or the deadline has passed.
            EngineError: the model failed.
        """
        is_long = num_chars([request.inputs, request.parameters]) > _LONG_CHARS
        pool = _long_texts() if is_long else None
        prepared = await _in_thread(self._prepare, task, request, ends_s=ends_s, pool=pool)
        work, is_begun = Work(prepared), False

        def take(logits: list[Logits]) -> _ResultT | None:
            """Return the reply if this was the last round, else None."""
            work.take(logits)
            return None if work.inputs else encode(shape_reply(request, work.answers))

        reply: _ResultT | None = None
        while reply is None:  # more than one round where inputs depend on earlier answers
            left_s = ends_s - time.monotonic()
            logits = await self.batcher.run(
                work.inputs, left_s, priority=priority, is_begun=is_begun
            )
            reply, is_begun = await _in_thread(take, logits, ends_s=ends_s), True
        return prepared, reply

    async def close(self) -> None:
        """Answer the accepted requests, and end the engine's thread."""
        await self._unused.wait()
        await self.batcher.close()

    def info(self) -> InfoReply:
        """Return the model's description and its limits."""
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

    def check_num_items(self, inputs: object) -> None:
        """Refuse a list of too many inputs, before any of them is validated.

        Raises:
            TooMuchAtOnceError: there are more than the setting allows.
        """
        if isinstance(inputs, list) and len(inputs) > self.settings.max_items:
            raise TooMuchAtOnceError(
                f"inputs holds {len(inputs)} items; at most {self.settings.max_items} are "
                "taken at once: split the list"
            )

    def _prepare(self, task: str, request: TaskRequest) -> list[Prepared[Any]]:
        return prepare_request(self.tasks[task], request, max_tokens=self.batcher.max_queue_tokens)


async def _in_thread(
    function: Callable[[Unpack[_Args]], _ResultT],
    *args: *_Args,
    ends_s: float,
    pool: Executor | None = None,
) -> _ResultT:
    """Run a function off the event loop; one that exceeds the deadline is not awaited.

    One that has not begun when the request is cancelled never begins.
    """
    run = partial(copy_context().run, function, *args)
    try:
        async with asyncio.timeout(ends_s - time.monotonic()):
            return await asyncio.get_running_loop().run_in_executor(pool, run)
    except TimeoutError:
        raise DeadlineExceededError("no answer before the deadline; send less at once") from None


@cache
def _long_texts() -> Executor:
    """The thread that tokenises long texts, so that those of others do not wait for them."""
    return ThreadPoolExecutor(1, thread_name_prefix="long-texts")


def num_chars(inputs: object) -> int:
    """Return the number of characters of all strings in a value of a request."""
    if isinstance(inputs, str):
        return len(inputs)
    if isinstance(inputs, BaseModel):
        return num_chars(list(vars(inputs).values()))
    return sum(map(num_chars, inputs)) if isinstance(inputs, list | tuple) else 0
