"""A hosted model: its tasks, its engine, and the queue in front of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from albert_serve import __version__
from albert_serve.api.model_card import ModelCard, ModelSizes, TrainingStage
from albert_serve.api.schemas import (
    DepthInfo,
    HeadInfo,
    InfoReply,
    InputExample,
    TaskInfo,
    TaskQuality,
    TaskRequest,
    num_items_of,
)
from albert_serve.batching.batcher import Batcher
from albert_serve.batching.scheduler import Priority
from albert_serve.bundle.card import count_parameters, read_figures, read_metadata, read_stages
from albert_serve.bundle.figures import read_figure
from albert_serve.bundle.manifest import WEIGHTS_FILE, Bundle, Manifest, TaskEntry
from albert_serve.bundle.weights import CLASSIFICATION, further_head
from albert_serve.errors import TooMuchAtOnceError
from albert_serve.server.models.effort import effort_of, effort_of_answer
from albert_serve.server.process.threads import RequestThreads
from albert_serve.settings import Settings
from albert_serve.tasks import (
    AnyTask,
    Logits,
    Prepared,
    Work,
    prepare_request,
    shape_reply,
)
from albert_serve.tasks.text_classification import label_names

_ResultT = TypeVar("_ResultT")


@dataclass(kw_only=True, slots=True, eq=False)
class HostedModel:
    """A model that answers requests. Belongs to one event loop.

    Attributes:
        tasks: the logic of each task of the bundle, by endpoint name.
        threads: where requests are read and answered.
        card: of `read_card`.
    """

    name: str
    settings: Settings
    bundle: Bundle
    tasks: dict[str, AnyTask]
    batcher: Batcher
    threads: RequestThreads
    card: ModelCard
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
        encode: Callable[[Sequence[Prepared[Any]], Any], _ResultT],
    ) -> tuple[list[Prepared[Any]], _ResultT]:
        """Answer a valid request; return its prepared inputs, and the reply, encoded.

        Args:
            ends_s: the deadline, on `time.monotonic`'s clock.
            encode: is called with the prepared inputs and the reply's value, where the answer's
                effort belongs.

        Raises:
            InvalidInputError: an item cannot be answered; for a list the message has its index.
            RequestError: the queue is full, or the deadline has passed.
            EngineError: the model failed.
        """
        effort = effort_of(request)
        run = partial(self.threads.run, ends_s=ends_s)
        prepared = await run(self._prepare, task, request, effort=effort)
        work, is_begun = Work(prepared), False
        effort = max(effort, effort_of_answer(prepared))

        def take(logits: list[Logits]) -> _ResultT | None:
            """Return the reply if this was the last round, else None."""
            work.take(logits)
            if work.inputs:
                return None
            return encode(prepared, shape_reply(request, work.answers))

        reply: _ResultT | None = None
        while reply is None:  # more than one round where inputs depend on earlier answers
            left_s = ends_s - time.monotonic()
            logits = await self.batcher.run(
                work.inputs, left_s, priority=priority, is_begun=is_begun
            )
            reply = await run(take, logits, effort=effort)
            is_begun = True
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
            tasks=[_describe(name, manifest, self.bundle.config.num_layers) for name in self.tasks],
            max_positions=self.bundle.config.max_positions,
            mask_token="[MASK]",  # noqa: S106  # not that kind of token
            max_items=self.settings.max_items,
            max_body_bytes=self.settings.max_body_bytes,
            needs_key=self.settings.needs_key,
            card=self.card,
        )

    def check_num_items(self, inputs: object, name: str = "inputs") -> None:
        """Refuse a list of too many inputs, before any of them is validated.

        Args:
            name: of the inputs, in the message.

        Raises:
            TooMuchAtOnceError: there are more than the setting allows.
        """
        num_items = num_items_of(inputs)
        if num_items > self.settings.max_items:
            is_counted = isinstance(inputs, list) and len(inputs) == num_items
            each = "" if is_counted else ", and each choice is one"
            raise TooMuchAtOnceError(
                f"{name} holds {num_items} items; at most {self.settings.max_items} are "
                f"taken at once{each}: split the list"
            )

    def _prepare(self, task: str, request: TaskRequest) -> list[Prepared[Any]]:
        return prepare_request(self.tasks[task], request, max_tokens=self.settings.max_queue_tokens)


def read_card(bundle: Bundle) -> ModelCard:
    """Return the model card of a bundle, whose file is read; call it off the event loop."""
    config, manifest = bundle.config, bundle.manifest
    return ModelCard(
        **asdict(read_metadata(bundle.folder)),
        sizes=ModelSizes(
            num_parameters=count_parameters(config, manifest),
            weights_bytes=manifest.files[WEIGHTS_FILE].size,
            num_layers=config.num_layers * config.num_inner_layers,
            hidden_size=config.hidden_size,
            embedding_size=config.embedding_size,
            num_heads=config.num_heads,
            ffn_size=config.ffn_size,
            vocab_size=config.vocab_size,
        ),
        evaluation=read_figures(manifest),
        training=[TrainingStage(**stage) for stage in read_stages(manifest)],
    )


def _describe(task: str, manifest: Manifest, num_layers: int) -> TaskInfo:
    """Return the description of a task, which may have no head and so no entry."""
    for name, entry in manifest.tasks.items():
        if name != task:
            continue
        depth = entry.adaptive_depth
        examples = manifest.examples.get(name, [])
        return TaskInfo(
            name=name,
            labels=label_names(entry) if name == CLASSIFICATION else entry.labels,
            problem_type=entry.problem_type,
            null_score_diff_threshold=entry.null_score_diff_threshold,
            adaptive_depth=None
            if depth is None
            else DepthInfo(num_layers=num_layers, **depth.model_dump()),
            heads=_describe_heads(entry, manifest) if entry.head or entry.heads else None,
            question_head=entry.question_head,
            quality=_quality(manifest, name),
            examples=[InputExample(**example.model_dump()) for example in examples] or None,
        )
    return TaskInfo(name=task)


def _describe_heads(entry: TaskEntry, manifest: Manifest) -> list[HeadInfo]:
    """Return the description of each classifier of texts, the default one first."""
    keys: dict[str, str] = {entry.default_head: CLASSIFICATION}
    keys |= {name: further_head(name) for name in entry.heads}
    heads = manifest.heads
    return [
        HeadInfo(
            name=name,
            labels=label_names(heads[key]),
            problem_type=heads[key].problem_type,
            quality=_quality(manifest, key),
        )
        for name, key in keys.items()
    ]


def _quality(manifest: Manifest, head: str) -> TaskQuality | None:
    figure = read_figure(manifest, head)
    return None if figure is None else TaskQuality(**asdict(figure))
