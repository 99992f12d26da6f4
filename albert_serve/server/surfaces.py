"""The surface of the service that a path belongs to, and the path's label in metrics."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from albert_serve.api.schemas import MODEL_PATH, MODELS_PATH
from albert_serve.settings import Surface
from albert_serve.tasks import TASKS

HEALTH_PATHS: Final = frozenset({"/health", "/healthz", "/livez", "/readyz"})
METRICS_PATH: Final = "/metrics"
OTHER: Final = "/*"
_DOCS_PATHS: Final = frozenset({"/docs", "/docs.json", "/schema.json"})
_DOCS_FOLDERS: Final = ("/static_content/",)
# Open: the page holds no data and asks for the key itself, and a browser can send none for it.
_PAGE_PATHS: Final = frozenset({"/"})
_PAGE_FOLDERS: Final = ("/web/",)
_TASK_PATHS: Final = frozenset(f"/{name}" for name in TASKS)
_API_PATHS: Final = _TASK_PATHS | {"/info", MODELS_PATH}
# The paths after a model's name.
_MODEL_PATHS: Final = _TASK_PATHS | {"", "/info", "/health"}
_KNOWN: Final = HEALTH_PATHS | _PAGE_PATHS | _DOCS_PATHS | _API_PATHS | {METRICS_PATH}
# The scope key of the original path while the label replaces it.
_PATH: Final = "albert_serve.path"


def surface_of(path: str) -> Surface | None:
    """Return the surface of a path; None for health and the page, which are open.

    The health of a named model reveals that the model exists, so it belongs to the API, as do
    unknown paths.
    """
    if path in HEALTH_PATHS | _PAGE_PATHS or path.startswith(_PAGE_FOLDERS):
        return None
    if path == METRICS_PATH:
        return "metrics"
    if path in _DOCS_PATHS or path.startswith(_DOCS_FOLDERS):
        return "docs"
    return "api"


def label_of(path: str) -> str:
    """Return a known path itself, else a common label: callers must not create metrics."""
    if path in _KNOWN:
        return path
    if path.startswith(f"{MODELS_PATH}/"):
        name, slash, rest = path.removeprefix(f"{MODELS_PATH}/").partition("/")
        if name and slash + rest in _MODEL_PATHS:
            return MODEL_PATH + slash + rest
    for folder in _DOCS_FOLDERS + _PAGE_FOLDERS:
        if path.startswith(folder):
            return folder
    return OTHER


class Labels:
    """ASGI middleware outside of BentoML's, which keeps a metric for each path."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Replace the path by its label, until `Paths` restores it."""
        if scope["type"] != "lifespan":
            scope[_PATH] = scope["path"]
            scope["path"] = label_of(scope["path"])
        await self.app(scope, receive, send)


class Paths:
    """ASGI middleware inside of BentoML's that undoes `Labels`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Restore the path."""
        if _PATH in scope:
            scope["path"] = scope[_PATH]
        await self.app(scope, receive, send)
