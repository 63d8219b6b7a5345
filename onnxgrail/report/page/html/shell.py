"""The HTML file around the sections, with styles and script inside it and no external resources."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from string import Template

from onnxgrail.report.page.html.markup import Markup, el, escape, join


def document(
    title: str, header: Markup, sections: Sequence[Markup | None], footer: str, *, style: str = "", script: str = ""
) -> str:
    """Return a complete HTML file, with the styles and the script of one page added to those of all pages.

    Its content security policy allows only the embedded style and script, by their checksums, so that no name in a
    model can do anything even if it were mistaken for markup.
    """
    style, script = _text("page.css") + style, _text("page.js") + script
    present = [part for part in sections if part is not None]
    return Template(_text("page.html")).substitute(
        title=escape(title),
        policy=escape(
            f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        style=style,
        script=script,
        header=header,
        contents=_contents(present),
        sections=join(present),
        footer=escape(footer),
    )


def _contents(sections: Sequence[Markup]) -> Markup:
    """Return links to the sections, read from their headings."""
    pattern = re.compile(r'<h2 id="([a-z]+)-title">([^<]*)</h2>')
    found = [match for part in sections if (match := pattern.search(part))]
    links = [el("li", el("a", Markup(match[2]), href=f"#{match[1]}")) for match in found]
    return el("nav", el("ul", *links), aria_label="Sections")


@functools.cache
def _text(name: str) -> str:
    return resources.files("onnxgrail.report.page").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
