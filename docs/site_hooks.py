"""Hooks of `mkdocs.yml`: files next to `docs/` become pages of the site, and links are adapted."""

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
    """Add the pages that are outside of `docs/`."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=relinked(text, "")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adapt links from `docs/` to files next to it."""
    generated = page.file.src_uri in PAGES.values()
    return markdown if generated else relinked(markdown, posixpath.join("docs", posixpath.dirname(page.file.src_uri)))


def relinked(text: str, folder: str) -> str:
    """Return the Markdown of a page in `folder` of the repository, with links relative to the root of the site.

    A link to a file that is not part of the site is replaced by its text.
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
