"""A BentoML service that depends on ours. `test_service.py` serves it."""

from __future__ import annotations

from typing import Any

import bentoml

from albert_serve.service import AlbertServe


@bentoml.service(name="composed")
class Composed:
    """A service that passes calls on to ours."""

    albert = bentoml.depends(AlbertServe)

    @bentoml.api  # type: ignore[untyped-decorator]
    async def ask(self, task: str, inputs: Any, parameters: Any = None) -> Any:
        """Return the name of the reply's type, and the reply."""
        reply = await getattr(self.albert, task)(inputs=inputs, parameters=parameters)
        return [type(reply).__name__, reply]

    @bentoml.api  # type: ignore[untyped-decorator]
    async def names(self) -> list[str]:
        """Return the names of the default model and of its tasks."""
        info = await self.albert.info()
        return [info.model_id, *(task.name for task in info.tasks)]
