"""Put what the documents link to outside of docs/ into the site (a hook of mkdocs, `make site`).

The site then has every file that a link names, without a host of the repository. Markdown becomes a
page, below `repository/`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT: Final = Path(__file__).resolve().parents[1]
_FOLDER: Final = "repository"
_LINK: Final = re.compile(r"(\]\()((?!https?:|#)[^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the linked files, and those that linked Markdown links to."""
    waiting = sorted((_ROOT / "docs").glob("*.md"))
    seen = set(waiting)
    while waiting:
        document = waiting.pop()
        for link in _LINK.findall(document.read_text(encoding="utf-8")):
            target = (document.parent / link[1]).resolve()
            if target in seen or target.is_relative_to(_ROOT / "docs") or not target.is_file():
                continue
            seen.add(target)
            path = f"{_FOLDER}/{target.relative_to(_ROOT)}"
            files.append(File.generated(config, path, abs_src_path=str(target)))
            waiting += [target] if target.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between docs/ and the rest of the repository into those of the site."""
    path = page.file.src_uri
    inside = path.removeprefix(f"{_FOLDER}/")
    source = _ROOT / inside if inside != path else _ROOT / "docs" / path
    depth = "../" * path.count("/")

    def replaced(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if target.is_relative_to(_ROOT / "docs"):
            return f"{match[1]}{depth}{target.relative_to(_ROOT / 'docs')}"
        return f"{match[1]}{depth}{_FOLDER}/{target.relative_to(_ROOT)}"

    return _LINK.sub(replaced, markdown)
