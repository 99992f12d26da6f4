"""A server on this machine that speaks the protocol of the Hugging Face Hub, for its client."""

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
    """A model: a folder for each revision."""

    revisions: dict[str, Path]

    def commit(self, revision: str) -> str | None:
        """The commit of a branch or tag, or a commit itself."""
        commits = {
            name: name if len(name) == 40 else hashlib.sha1(name.encode()).hexdigest()
            for name in self.revisions
        }
        return revision if revision in commits.values() else commits.get(revision)

    def folder(self, commit: str) -> Path:
        return next(self.revisions[name] for name in self.revisions if self.commit(name) == commit)


@dataclass
class Hub:
    """The repositories of a server, and the methods and paths of the requests to it."""

    repositories: dict[str, Repository]
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def environment(self, cache: Path) -> dict[str, str]:
        """The environment of a process that takes this for the hub, with a cache of its own."""
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "PYTHONPATH": str(Path(__file__).parents[3]),
            "HF_HOME": str(cache),
            "HF_ENDPOINT": self.url,
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    @property
    def downloads(self) -> list[str]:
        """The paths of the files whose content was sent."""
        return [path for method, path in self.requests if method == "GET" and "/api/" not in path]


@contextmanager
def serve(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """Serve the models on a free port until the end of `with`."""
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

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.served.requests.append((self.command, path))
        status, headers, body = self._find(path.strip("/").split("/"))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _find(self, parts: list[str]) -> tuple[int, dict[str, str], bytes]:
        is_api = parts[:2] == ["api", "models"]
        if is_api:
            parts = parts[2:]
        repo_id, rest = "/".join(parts[:2]), parts[2:]
        repository = self.served.repositories.get(repo_id)
        if repository is None:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        revision = rest[1] if len(rest) > 1 else "main"
        commit = repository.commit(revision)
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if is_api:
            listing = rest[:1] == ["tree"]
            return _json(_tree(repository, commit) if listing else _info(repo_id, commit))
        file = repository.folder(commit) / "/".join(rest[2:])
        if not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        content = file.read_bytes()
        etag = hashlib.sha1(content).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, content


def _json(content: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()


def _info(repo_id: str, commit: str) -> dict[str, Any]:
    return {"id": repo_id, "modelId": repo_id, "sha": commit, "private": False, "siblings": []}


def _tree(repository: Repository, commit: str) -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "path": str(file.relative_to(repository.folder(commit))),
            "size": file.stat().st_size,
            "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
        }
        for file in sorted(repository.folder(commit).rglob("*"))
        if file.is_file()
    ]
