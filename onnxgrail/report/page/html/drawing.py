"""Small SVG drawings: widths in percent of the available place, heights in pixels, so that nothing is distorted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from onnxgrail.report.page.html.markup import Markup, el
from onnxgrail.report.page.network import BlockRow

SLENDER = 3.2  # maximum width in percent of a bar of the silhouette
LOWEST = 1e-4  # relative error at the left end of the scale
TICKS = (0.0, 0.01, 0.1, 1.0)  # errors at which a curve has grid lines
STRETCHED = {"viewBox": "0 0 100 100", "preserveAspectRatio": "none"}  # of a drawing that fills its place
ROW = 16  # pixels: height of a drawing in a row
INSET = 2.5  # percent between the outermost dots and the ends


def percent(value: float) -> str:
    """Format a length for SVG."""
    return f"{value:.2f}".rstrip("0").rstrip(".") + "%"


def svg(*children: Markup | None, height: int, label: str = "", class_: str = "") -> Markup:
    """Return a drawing as wide as its place; without a label it is hidden from screen readers."""
    said = {"role": "img", "aria_label": label} if label else {"aria_hidden": "true"}
    return el("svg", *children, class_=class_ or None, width="100%", height=height, focusable="false", **said)


def silhouette(blocks: Sequence[BlockRow], label: str) -> Markup:
    """Draw the network from left to right: per block, an outline for its old width and a solid bar for its new one."""
    widest = max((block.width for block in blocks), default=1)
    slot = 100 / max(len(blocks), 1)
    thick = min(0.62 * slot, SLENDER)
    height, middle = 132, 66.0
    shapes = [el("line", x1="0", x2="100%", y1=middle, y2=middle, class_="spine")]
    for number, block in enumerate(blocks):
        full = max(8.0, (height - 4) * math.sqrt(block.width / widest))
        x = (number + 0.5) * slot - thick / 2
        for size, style in ((full, "was"), (full * block.share, f"is k-{block.kind_class}")):
            top, sides = middle - size / 2, {"x": percent(x), "width": percent(thick)}
            shapes.append(el("rect", **sides, y=top, height=size, rx=3, class_=style))
    return svg(*shapes, height=height, label=label, class_="silhouette")


def lying(block: BlockRow, widest: int) -> Markup:
    """Draw the width of one block in its row: an outline for its old width and a solid bar for its new one."""
    full = max(8.0, 100 * math.sqrt(block.width / max(widest, 1)))
    shapes = [
        el("rect", x=percent(50 - size / 2), width=percent(size), y=1, height=ROW - 2, rx=4, class_=style)
        for size, style in ((full, "was"), (full * block.share, f"is k-{block.kind_class}"))
    ]
    return svg(*shapes, height=ROW)


def on_scale(error: float) -> float:
    """Return the position in percent of a relative error on a logarithmic scale from 0.01 % to 100 %."""
    place = 1 + math.log10(min(max(error, LOWEST), 1.0)) / -math.log10(LOWEST)
    return INSET + (100 - 2 * INSET) * place


def dumbbell(block: BlockRow) -> Markup | None:
    """Draw the error before compensation (ring), after it (dot) and on held-out samples (diamond)."""
    known = [e for e in (block.plain, block.compensated, block.validation) if e is not None]
    if not known:
        return None
    middle = ROW / 2
    shapes = [el("line", x1="0", x2="100%", y1=middle, y2=middle, class_="axis")]
    shapes += [
        el("line", x1=percent(x), x2=percent(x), y1=middle - 3, y2=middle + 3, class_="axis")
        for x in map(on_scale, (1e-4, 1e-3, 1e-2, 1e-1, 1.0))
    ]
    if block.plain is not None and block.compensated is not None:
        ends = percent(on_scale(block.plain)), percent(on_scale(block.compensated))
        shapes.append(el("line", x1=ends[0], x2=ends[1], y1=middle, y2=middle, class_="gain"))
    if block.plain is not None:
        shapes.append(el("circle", cx=percent(on_scale(block.plain)), cy=middle, r=4, class_="before"))
    if block.compensated is not None:
        shapes.append(el("circle", cx=percent(on_scale(block.compensated)), cy=middle, r=4.5, class_="after"))
    if block.validation is not None:
        diamond = el("path", d="M0 -5 L5 0 L0 5 L-5 0 Z", class_="heldout")
        x = percent(on_scale(block.validation))
        shapes.append(el("svg", diamond, x=x, y=middle, width=1, height=1, overflow="visible"))
    return svg(*shapes, height=ROW)


def bar(share: float, style: str, height: int = 10) -> Markup:
    """Draw a bar that covers a share of the whole width, from the left."""
    shapes = [
        el("rect", x=0, y=0, width="100%", height=height, rx=3, class_="track"),
        el("rect", x=0, y=0, width=percent(100 * min(max(share, 0.0), 1.0)), height=height, rx=3, class_=style),
    ]
    return svg(*shapes, height=height)


def curve(points: Sequence[tuple[float, float]], chosen: float | None, label: str) -> Markup:
    """Draw error over the share of units kept, both 0 to 1; the error axis is its root, to tell small errors apart.

    Args:
        points: (share kept, error).
        chosen: the share that the block keeps.
        label: for a screen reader.
    """
    path = rooted(points)
    height, inner = 96, 88
    ticks = {e: 4 + inner * (1 - math.sqrt(e)) for e in TICKS}
    grid = [el("line", x1="0", x2="100%", y1=y, y2=y, class_="axis") for y in ticks.values()]
    grid += [
        el("text", f"{100 * e:g} %", x="100%", y=y + 11, text_anchor="end", class_="tick")
        for e, y in ticks.items()
        if e >= 0.1
    ]
    under = el("polyline", points=f"0,100 {path} 100,100", class_="under")
    line = el(
        "svg", under, el("polyline", points=path, class_="curve"), x=0, y=4, width="100%", height=inner, **STRETCHED
    )
    marks: list[Markup] = []
    if chosen is not None:
        x = percent(min(max(100 * chosen, 1.5), 98.5))
        y = 4 + inner * (1 - math.sqrt(min(max(at(points, chosen), 0), 1)))
        marks = [
            el("line", x1=x, x2=x, y1=4, y2=height - 4, class_="taken"),
            el("circle", cx=x, cy=y, r=4.5, class_="after"),
        ]
    return svg(*grid, line, *marks, height=height, label=label)


def rooted(points: Sequence[tuple[float, float]]) -> str:
    """Return the points of a line over a square of 100 by 100; the root of y, from 0 to 1, rises from the bottom."""
    return " ".join(f"{100 * x:.2f},{100 * (1 - math.sqrt(min(max(y, 0), 1))):.2f}" for x, y in points)


def at(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value at x of the line through the points."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1] if points else 0.0
