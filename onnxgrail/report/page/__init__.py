"""The report as one HTML file: a pure function of its data, without external resources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxgrail.report.page import results
from onnxgrail.report.page.blockmap import block_map
from onnxgrail.report.page.command import again
from onnxgrail.report.page.deployment import deployment, low_rank
from onnxgrail.report.page.hero import hero, inspection_hero, title_of
from onnxgrail.report.page.html.shell import document
from onnxgrail.report.page.outputs import fidelity
from onnxgrail.report.page.sensitivity import sensitivity


def report_page(data: Mapping[str, Any]) -> str:
    """Return the page of a report of schema 1."""
    sections = (
        results.notes(data),
        results.sizes(data),
        fidelity(data),
        results.latency(data),
        block_map(data, narrowed=True),
        sensitivity(data),
        results.repairs(data),
        low_rank(data),
        deployment(data),
        results.left_alone(data),
        results.time(data),
        again(data),
    )
    title = f"{title_of(str(data['model']['input']))}: onnxgrail report"
    return document(title, hero(data), sections, _made_by(data))


def inspection_page(data: Mapping[str, Any]) -> str:
    """Return the page of an inspection: the same block map, without measurements."""
    sections = (
        results.notes(data),
        results.predicted(data),
        block_map(data, narrowed=False),
        results.left_alone(data),
    )
    return document(
        f"{title_of(str(data['path']))}: onnxgrail inspection", inspection_hero(data), sections, _made_by({})
    )


def _made_by(data: Mapping[str, Any]) -> str:
    tool = data.get("tool") or {}
    return f"Made by onnxgrail {tool.get('version') or ''}".strip() + "; this file fetches nothing and sends nothing."
