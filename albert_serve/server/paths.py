"""The meaning of a request's path, which the middleware parses once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starlette.types import Scope

from albert_serve.api.embeddings import EMBED, EMBEDDINGS, EMBEDDINGS_PATH, FEATURE_EXTRACTION
from albert_serve.api.schemas import MODEL_PATH, MODELS_PATH
from albert_serve.api.zero_shot import ZERO_SHOT
from albert_serve.bundle.weights import CLASSIFICATION
from albert_serve.settings import Surface
from albert_serve.tasks import TASKS

HEALTH_PATHS: Final = frozenset({"/health", "/healthz", "/livez", "/readyz"})
METRICS_PATH: Final = "/metrics"
OTHER: Final = "/*"
_DOCS_PATHS: Final = frozenset({"/docs", "/docs.json", "/openapi.json", "/schema.json"})
_DOCS_FOLDER: Final = "/static_content/"
# These paths require no key: the page has no data, and browsers cannot send a key to load it.
_PAGE_PATH: Final = "/"
_PAGE_FOLDER: Final = "/web/"
# This maps endpoints to tasks.
ENDPOINTS: Final[dict[str, str]] = {
    **{name: name for name in TASKS},
    EMBEDDINGS: FEATURE_EXTRACTION,
    EMBED: FEATURE_EXTRACTION,
    ZERO_SHOT: CLASSIFICATION,
}
# This maps endpoints to the default model's paths.
DEFAULT_PATHS: Final = {
    **{name: f"/{name}" for name in ENDPOINTS},
    EMBEDDINGS: EMBEDDINGS_PATH,
}
# This maps paths to tasks, or to None.
_API_PATHS: Final[dict[str, str | None]] = {
    **{DEFAULT_PATHS[name]: task for name, task in ENDPOINTS.items()},
    "/info": None,
    MODELS_PATH: None,
}
# This maps the rest of a path, after a model's name, to a task or None.
_MODEL_PATHS: Final[dict[str, str | None]] = {
    **{f"/{name}": task for name, task in ENDPOINTS.items()},
    "": None,
    "/info": None,
    "/health": None,
}
_OPENAI_LABELS: Final = frozenset({EMBEDDINGS_PATH, f"{MODEL_PATH}/{EMBEDDINGS}"})
_TARGET: Final = "albert_serve.target"


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTarget:
    """The meaning of a path.

    Attributes:
        label: label in metrics. Unknown paths share a label, so that callers cannot create metrics.
        surface: surface that a key can guard, or None for health and the page, which are always
            open. The health of a named model reveals that the model exists, so it belongs to the
            API, like unknown paths.
        model: name of a model, which may not exist, or None for the default model.
        task: name of the task, if the path is an endpoint.
    """

    label: str
    surface: Surface | None
    model: str | None = None
    task: str | None = None

    @property
    def is_openai(self) -> bool:
        """Whether replies have OpenAI's format."""
        return self.label in _OPENAI_LABELS


def target_of(scope: Scope) -> RequestTarget:
    """Return the target of a request. Its path is parsed only at the first call."""
    if _TARGET not in scope:
        scope[_TARGET] = parse(scope["path"])
    target: RequestTarget = scope[_TARGET]
    return target


def parse(path: str) -> RequestTarget:
    """Return the target of a path."""
    if path in _API_PATHS:
        return RequestTarget(label=path, surface="api", task=_API_PATHS[path])
    if path in HEALTH_PATHS or path == _PAGE_PATH:
        return RequestTarget(label=path, surface=None)
    if path.startswith(_PAGE_FOLDER):
        return RequestTarget(label=_PAGE_FOLDER, surface=None)
    if path == METRICS_PATH:
        return RequestTarget(label=path, surface="metrics")
    if path in _DOCS_PATHS:
        return RequestTarget(label=path, surface="docs")
    if path.startswith(_DOCS_FOLDER):
        return RequestTarget(label=_DOCS_FOLDER, surface="docs")
    model, slash, rest = path.removeprefix(f"{MODELS_PATH}/").partition("/")
    end = slash + rest
    if model and path.startswith(f"{MODELS_PATH}/") and end in _MODEL_PATHS:
        label, task = MODEL_PATH + end, _MODEL_PATHS[end]
        return RequestTarget(label=label, surface="api", model=model, task=task)
    return RequestTarget(label=OTHER, surface="api")
