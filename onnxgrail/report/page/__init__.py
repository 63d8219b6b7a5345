"""The report as one HTML file: a pure function of its data, without external resources.

A section is a function from the data to its markup, or to None if there is nothing to show, and a line of
`registry.REPORT_SECTIONS` or `registry.INSPECTION_SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onnxgrail import registry
from onnxgrail.errors import raised
from onnxgrail.registry import is_ours
from onnxgrail.report.page import beside, frontier
from onnxgrail.report.page.hero import hero, inspection_hero, title_of
from onnxgrail.report.page.html.markup import Markup, el
from onnxgrail.report.page.html.shell import document
from onnxgrail.report.page.html.table import section


def report_page(data: Mapping[str, Any]) -> str:
    """Return the page of a report of schema 1."""
    sections = _made(registry.REPORT_SECTIONS, data)
    title = f"{title_of(str(data['model']['input']))}: onnxgrail report"
    return document(title, hero(data), sections, _made_by(data))


def inspection_page(data: Mapping[str, Any]) -> str:
    """Return the page of an inspection: the same block map, without measurements."""
    sections = _made(registry.INSPECTION_SECTIONS, data)
    title = f"{title_of(str(data['path']))}: onnxgrail inspection"
    return document(title, inspection_hero(data), sections, _made_by({}))


def frontier_page(data: Mapping[str, Any]) -> str:
    """Return the page of a frontier: plots, a table, and the command of every point."""
    title = f"{title_of(str(data['model']['input']))}: onnxgrail frontier"
    return document(title, frontier.header(data), frontier.sections(data), _made_by(data))


def pair_page(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return the page of two reports side by side."""
    return document(
        f"{beside.title(a, b)}: two onnxgrail reports", beside.header(a, b), beside.sections(a, b), _made_by(b)
    )


def _made(sections: Mapping[str, Any], data: Mapping[str, Any]) -> list[Markup | None]:
    """Return the sections of a page; one that a program registers, and that raises an error, says so."""
    return [_one(name, make, data) for name, make in sections.items()]


def _one(name: str, make: Callable[..., Markup | None], data: Mapping[str, Any]) -> Markup | None:
    try:
        return make(data)
    except Exception as error:
        if is_ours(make):
            raise
        return section(name, name, el("p", f"This section {raised(error)}."))


def _made_by(data: Mapping[str, Any]) -> str:
    tool = data.get("tool") or {}
    return f"Made by onnxgrail {tool.get('version') or ''}".strip() + "; this file fetches nothing and sends nothing."
