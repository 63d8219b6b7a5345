"""The section on output fidelity: per output a suitable measure, and the distances that all outputs have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from onnxgrail.fidelity.words import caveat, extent, more, value, where
from onnxgrail.report.page.html import figures
from onnxgrail.report.page.html.markup import Child, Markup, el, join, name
from onnxgrail.report.page.html.table import section, table

Outputs = Sequence[Mapping[str, Any]]

ALWAYS = ("cosine", "nmse", "max_abs")
SQUARED = "; the squared error is relative: 0 % is equal, 100 % as far off as all zeros"
COLUMNS: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("cosine", "Cosine", functools.partial(figures.number, spec=".5f")),
    ("cosine_min", "Cosine, worst sample", functools.partial(figures.number, spec=".5f")),
    ("nmse", "Squared error", figures.error),
    ("max_abs", "Largest difference", figures.number),
    ("agreement", "Same top class", figures.share),
    ("kl", "KL divergence", functools.partial(figures.number, spec=".2e")),
    ("top1", "Top-1 accuracy", functools.partial(figures.share, digits=2)),
    ("top1_reference", "Top-1, original", functools.partial(figures.share, digits=2)),
    ("perplexity", "Perplexity", functools.partial(figures.number, spec=".3f")),
    ("perplexity_reference", "Perplexity, original", functools.partial(figures.number, spec=".3f")),
)


def fidelity(data: Mapping[str, Any]) -> Markup | None:
    """Return the section: verdicts first, then distances; None if no outputs were compared."""
    found = list(_measured(data))
    if not found:
        return None
    return section("fidelity", "Output fidelity", _advice(data), _verdicts(found), _distances(found))


def _measured(data: Mapping[str, Any]) -> Iterator[tuple[str, Outputs]]:
    """Yield the compared samples in words with the results per output: the written model first."""
    for key, title in (("quantization", "quantized, "), ("verification", "")):
        entry = data.get(key) or {}
        if entry.get("outputs"):
            yield title + where(entry["judged"]), entry["outputs"]


def _verdicts(found: Sequence[tuple[str, Outputs]]) -> Markup | None:
    """Return a table with a row per output, or part of an output: its content, measure and result; None if empty."""
    rows: list[Sequence[Child]] = [
        (
            join((named(output["name"], verdict["part"]), el("span", place, class_="sub"))),
            join((verdict["measure"], el("span", f"{verdict['kind']}: {verdict['why']}", class_="sub"))),
            el("span", figures.words(value(verdict)), class_="option"),
            join((figures.words(extent(verdict)), el("span", figures.words(more(verdict)), class_="sub"))),
        )
        for place, outputs in found
        for output in outputs
        for verdict in output.get("verdicts") or ()
    ]
    if not rows:
        return None
    caption = "Each output by the measure that suits what it holds; intervals are of 95 %, from resampling the samples"
    columns = ("Output", "Measure", "Value", "Interval, and more")
    return table(caption, columns, rows, class_="stacked verdicts")


def named(output: object, part: str) -> Markup:
    """Return the name of an output, and that of a part of it if it has several."""
    return join((name(str(output)), f", {part}" if part else None))


def _distances(found: Sequence[tuple[str, Outputs]]) -> Markup:
    """Return the table of the distances that every output has."""
    every = [output for _, outputs in found for output in outputs]
    shown = [c for c in COLUMNS if c[0] in ALWAYS or any(o.get(c[0]) is not None for o in every)]
    rows: list[Sequence[Child]] = [
        (
            join((name(str(output["name"])), el("span", place, class_="sub"))),
            *(show(output.get(key)) for key, _, show in shown),
        )
        for place, outputs in found
        for output in outputs
    ]
    columns = ("Output", *(title for _, title, _ in shown))
    return table("Outputs beside the original model's" + SQUARED, columns, rows, class_="stacked")


def _advice(data: Mapping[str, Any]) -> Markup | None:
    """Return advice if the numbers are not from held-out samples, else None."""
    judged = data["verification"]["judged"]
    if judged["on"] == "random":
        return el("p", f"{caveat(judged).capitalize()}. Give --data with real samples; a fifth of them will judge.")
    if judged.get("seen"):
        return el("p", "The fit has seen these samples: give 32 or more, or others that judge with --held-out FILE.")
    return None
