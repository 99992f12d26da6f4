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
    async def ask(self, method: str, arguments: dict[str, Any]) -> Any:
        """Return the name of the reply's type, and the reply."""
        reply = await getattr(self.albert, method)(**arguments)
        return [type(reply).__name__, reply]
