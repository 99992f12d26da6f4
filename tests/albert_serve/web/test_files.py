"""The page's files: their types, caching and security headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

import albert_serve.web
from albert_serve.web import page_routes

FOLDER = Path(albert_serve.web.__file__).parent
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in {".css", ".js", ".svg"})


@pytest.fixture(scope="module")
def http() -> TestClient:
    return TestClient(Starlette(routes=page_routes()))


def test_the_page_allows_nothing_from_elsewhere_and_nothing_inline(http: TestClient) -> None:
    reply = http.get("/")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.text.startswith("<!doctype html>")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<style|\son\w+=|\sstyle=|<script(?![^>]*\ssrc=)", reply.text)
    assert "://" not in reply.text
    assert loaded_by(reply.text) == set(NAMES)


def loaded_by(text: str) -> set[str]:
    """The files that a page or a module loads, directly or indirectly."""
    names = set(re.findall(r'(?:href|src)="web/(.+?)"|from \'\./(.+?)\'', text))
    found = {page or module for page, module in names}
    return found.union(*(loaded_by((FOLDER / name).read_text()) for name in found))


@pytest.mark.parametrize("name", NAMES)
def test_each_file_comes_whole_with_its_type(http: TestClient, name: str) -> None:
    reply = http.get(f"/web/{name}")
    assert reply.content == (FOLDER / name).read_bytes()
    kinds = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert reply.headers["content-type"].split(";")[0] == kinds[Path(name).suffix]
    named = re.findall(r"from '\./(.+?)'", reply.text) if name.endswith(".js") else []
    assert set(named) <= set(NAMES)


def test_a_copy_that_is_still_good_is_not_sent_again(http: TestClient) -> None:
    first = http.get("/")
    assert first.headers["cache-control"] == "no-cache"
    again = http.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert http.get("/", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("name", ["none.js", "index.html", "__init__.py"])
def test_other_names_are_not_found(http: TestClient, name: str) -> None:
    assert http.get(f"/web/{name}").status_code == 404
