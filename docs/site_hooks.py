"""Hooks of `mkdocs.yml`: files beside `docs/` become pages of the site, and links between them follow."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"\[([^\]\n]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that stand outside of `docs/`."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=relinked(text, "")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links from `docs/` to files beside it."""
    generated = page.file.src_uri in PAGES.values()
    return markdown if generated else relinked(markdown, posixpath.join("docs", posixpath.dirname(page.file.src_uri)))


def relinked(text: str, folder: str) -> str:
    """Markdown of a page in `folder` of the repository, its links as seen from the top of the site.

    Of a link to a file that the site does not have, the words stay.
    """

    def link(found: re.Match[str]) -> str:
        words, anchor = found[1], found[3] or ""
        path = posixpath.normpath(posixpath.join(folder, found[2]))
        if path in PAGES:
            return f"[{words}]({PAGES[path]}{anchor})"
        if path.startswith("docs/"):
            return f"[{words}]({path.removeprefix('docs/')}{anchor})"
        return words

    return LINK.sub(link, text)
