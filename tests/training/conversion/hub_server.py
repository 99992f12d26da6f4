"""A local server that implements the Hugging Face Hub's protocol for its client."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Repository:
    """A model repository with one folder per revision."""

    revisions: dict[str, Path]

    def commit(self, revision: str) -> str | None:
        """Return the commit of a branch, tag or commit."""
        commits = {
            name: name if len(name) == 40 else _sha1(name.encode()) for name in self.revisions
        }
        return revision if revision in commits.values() else commits.get(revision)

    def folder(self, commit: str) -> Path:
        return next(self.revisions[name] for name in self.revisions if self.commit(name) == commit)


@dataclass
class Hub:
    """The repositories of a server, and the method and path of each request that it received."""

    repositories: dict[str, Repository]
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def environment(self, cache: Path) -> dict[str, str]:
        """Return the environment of a process that uses this server as the Hub, with this cache."""
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "PYTHONPATH": str(Path(__file__).parents[3]),
            "HF_HOME": str(cache),
            "HF_ENDPOINT": self.url,
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    @property
    def downloads(self) -> list[str]:
        """The paths of the downloaded files."""
        return [path for method, path in self.requests if method == "GET" and "/api/" not in path]


@contextmanager
def serve(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """Serve the repositories on a free port inside `with`."""
    hub = Hub(repositories)

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.served.requests.append((self.command, path))
        status, headers, body = self._find(path.strip("/").split("/"))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def _find(self, parts: list[str]) -> tuple[int, dict[str, str], bytes]:
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        repo_id, rest = "/".join(parts[:2]), parts[2:]
        repository = self.served.repositories.get(repo_id)
        if repository is None:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        revision = rest[1] if len(rest) > 1 else "main"
        commit = repository.commit(revision)
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if is_api:
            names = {"id": repo_id, "modelId": repo_id, "sha": commit}
            info = {**names, "private": False, "siblings": []}
            content = _tree(repository.folder(commit)) if rest[:1] == ["tree"] else info
            return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()
        file = repository.folder(commit) / "/".join(rest[2:])
        if not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        body = file.read_bytes()
        return 200, {"ETag": f'"{_sha1(body)}"', "X-Repo-Commit": commit}, body


def _tree(folder: Path) -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "path": str(file.relative_to(folder)),
            "size": file.stat().st_size,
            "oid": _sha1(file.read_bytes()),
        }
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    ]


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
