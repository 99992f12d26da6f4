"""The page at `/` for trying the tasks, and the routes of its files.

The files contain no data and call only the service's endpoints. They need no build step, and work
under any path prefix.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources
from pathlib import PurePath
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_INDEX: Final = "index.html"
_MEDIA_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".json": "application/json; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY: Final = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)
_HEADERS: Final = {
    # A browser checks its copy for each request, so that files of two versions never mix.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": f"{_POLICY}; require-trusted-types-for 'script'; "
    "trusted-types 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# The API page needs these: Swagger UI writes HTML, sets styles, and embeds images.
API_PAGE_HEADERS: Final = {
    **_HEADERS,
    "Content-Security-Policy": f"{_POLICY}; img-src 'self' data:; style-src 'self' 'unsafe-inline'",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


def page_routes() -> list[Route]:
    """Return the routes of `/` and of its files under `/web/`, which require no key."""
    return [Route("/", _page), Route("/web/{name}", _asset)]


async def _page(request: Request) -> Response:
    return _reply(request, _files()[_INDEX])


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name == _INDEX or name not in _files():
        raise HTTPException(HTTPStatus.NOT_FOUND)
    return _reply(request, _files()[name])


def _reply(request: Request, file: _File) -> Response:
    headers = {**_HEADERS, "ETag": file.etag}
    tags = request.headers.get("if-none-match", "").split(",")
    # A proxy that compresses makes the tag weak.
    if file.etag in {tag.strip().removeprefix("W/") for tag in tags}:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(file.content, headers={**headers, "Content-Type": file.media_type})


@functools.cache
def _files() -> dict[str, _File]:
    """Return the page's files by name, which are read once."""
    files = {}
    for entry in resources.files(__name__).iterdir():
        media_type = _MEDIA_TYPES.get(PurePath(entry.name).suffix)
        if media_type is not None:
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            files[entry.name] = _File(content=content, media_type=media_type, etag=etag)
    return files
