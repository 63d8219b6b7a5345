"""The report as one HTML file: a pure function of its data, without external resources.

A section is a function from the data to its markup, or to None if there is nothing to show, and a line of
`registry.REPORT_SECTIONS` or `registry.INSPECTION_SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxgrail import registry
from onnxgrail.report.page import beside, frontier
from onnxgrail.report.page.hero import hero, inspection_hero, title_of
from onnxgrail.report.page.html.shell import document


def report_page(data: Mapping[str, Any]) -> str:
    """Return the page of a report of schema 1."""
    sections = [section(data) for section in registry.REPORT_SECTIONS.values()]
    title = f"{title_of(str(data['model']['input']))}: onnxgrail report"
    return document(title, hero(data), sections, _made_by(data))


def inspection_page(data: Mapping[str, Any]) -> str:
    """Return the page of an inspection: the same block map, without measurements."""
    sections = [section(data) for section in registry.INSPECTION_SECTIONS.values()]
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


def _made_by(data: Mapping[str, Any]) -> str:
    tool = data.get("tool") or {}
    return f"Made by onnxgrail {tool.get('version') or ''}".strip() + "; this file fetches nothing and sends nothing."
