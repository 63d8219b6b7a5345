"""Hooks of `mkdocs.yml`: files next to `docs/` and notebooks become pages of the site, and links are adapted."""

from __future__ import annotations

import json
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
NOTEBOOKS = {f"notebooks/{path.stem}.md": path for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))}
LINK = re.compile(r"\[([^\]\n]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are outside of `docs/`, and those of notebooks."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=relinked(text, "")))
    for page, path in NOTEBOOKS.items():
        files.append(File.generated(config, page, content=rendered(path)))
    return files


def rendered(notebook: Path) -> str:
    """Return a notebook as Markdown, with a link to the file."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
    parts = [f"```python\n{text}\n```" if code else text for text, code in texts]
    return "\n\n".join([*parts, f"[Download this notebook]({notebook.name})"]) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adapt links from `docs/` to files next to it."""
    generated = page.file.src_uri in {*PAGES.values(), *NOTEBOOKS}
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
            page = path.removeprefix("docs/").replace(".ipynb", ".md")  # the page, which leads to the file
            return f"[{words}]({page}{anchor})"
        return words

    return LINK.sub(link, text)
