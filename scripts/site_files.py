"""Add the files outside docs/ that documents link to to the site (a hook of mkdocs, `make site`).

They are below `repository/`, and Markdown files become pages. So links need no repository host.
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
    """Add the files that documents link to, also indirectly."""
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
    """Rewrite links between docs/ and the rest of the repository for the site."""
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
