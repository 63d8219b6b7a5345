"""Figures of a report for papers and slides, as PNG and SVG.  matplotlib is an extra, and imported where it draws."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxgrail.errors import MissingExtraError
from onnxgrail.page import drawing, figures
from onnxgrail.page.network import BlockRow, blocks_of, rows_of
from onnxgrail.page.sensitivity import REMOVED
from onnxgrail.paths import check_output, make_folder, write_whole

KINDS = ("png", "svg")
NAMES = ("sizes", "errors", "curves", "sensitivity")
DPI = 150
COLOURS = {"conv": "#2a62a6", "mlp": "#0b6a61", "heads": "#7a41a3", "stream": "#93510f", "other": "#566068"}
BEFORE, AFTER, VALIDATION = "#ad4517", "#0b6a61", "#1d2428"
NAMED = 80  # with more blocks than this, names would lie over each other
FLOOR = 1e-4  # errors below it are drawn there
ERRORS = (
    ("before compensation", BEFORE, "o", "plain"),
    ("after", AFTER, "o", "compensated"),
    ("validation", VALIDATION, "D", "validation"),
)


def require() -> None:
    """Whether matplotlib is there.

    Raises:
        MissingExtraError: it is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(
            "plots need matplotlib, which is not installed", hint="Run: pip install 'onnxgrail[plots]'"
        )


def files(folder: Path) -> list[Path]:
    """Return the files that figures are written to, each of which a report may lack."""
    return [folder / f"{name}.{kind}" for name in NAMES for kind in KINDS]


def write(data: Mapping[str, Any], folder: Path, *, force: bool = False) -> list[Path]:
    """Draw what a report holds: sizes and latency, errors per block, and, where they were measured, error curves.

    Args:
        data: a report of schema 1.
        folder: made where it is missing.
        force: replace figures of the same names.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OutputError: a figure exists and `force` is not given, or the folder cannot be written.
    """
    require()
    for path in files(folder):
        check_output(path, force=force, what="figure")
    make_folder(folder)
    import matplotlib as mpl

    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "onnxgrail"}
    written = []
    with mpl.rc_context(style):
        for name, figure in _figures(data):
            for kind in KINDS:
                path = folder / f"{name}.{kind}"
                write_whole(path, _writer(figure, kind))
                written.append(path)
    return written


def _writer(figure: Any, kind: str) -> Callable[[Any], None]:
    """The same data give the same bytes: neither a date nor a version is written."""
    nothing = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    return lambda file: figure.savefig(file, format=kind, dpi=DPI, metadata=nothing)


def _figures(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    blocks = blocks_of(rows_of(data))
    yield "sizes", _sizes(data)
    if any(block.plain is not None or block.compensated is not None for block in blocks):
        yield "errors", _errors(blocks)
    place = {block.name: number for number, block in enumerate(blocks)}
    known = [c for c in (data.get("allocation") or {}).get("curves") or () if c["block"] in place]
    if known:
        curves = sorted(known, key=lambda curve: place[curve["block"]])
        yield "curves", _curves(curves, blocks)
        yield "sensitivity", _sensitivity(curves)


def _canvas(width: float, height: float, panels: int = 1) -> tuple[Any, list[Any]]:
    """A figure that no window knows of."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)
    return figure, list(axes[0])


def _sizes(data: Mapping[str, Any]) -> Any:
    """What is left of parameters, multiply-accumulates, bytes and time, in percent."""
    model = data["model"]
    rows: list[tuple[str, float, str]] = []
    keys = (
        ("Parameters", "params", figures.count),
        ("MACs", "macs", figures.count),
        ("File size", "bytes", figures.size),
    )
    for label, key, show in keys:
        before, after = model.get(f"{key}_before"), model.get(f"{key}_after")
        if before and after is not None:
            rows.append((label, after / before, f"{show(before)} → {show(after)}"))
    steps: Sequence[Mapping[str, Any]] = data.get("latency") or []
    for step in steps[1:]:
        times = " → ".join(f"{figures.number(one['median'])} ms" for one in (steps[0], step))
        rows.append((f"Latency, {step['name']}", step["median"] / steps[0]["median"], times))
    figure, (axis,) = _canvas(5.5, 0.5 + 0.4 * len(rows))
    axis.barh(range(len(rows)), [100 * share for _, share, _ in rows], color=AFTER, height=0.6)
    axis.axvline(100, color=BEFORE, linewidth=1)
    for number, (_, share, text) in enumerate(rows):
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axis.text(100 * share + 1.5, number, text, va="center", fontsize=7, bbox=behind)
    axis.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axis.set_xlim(0, 1.45 * max(100, *(100 * share for _, share, _ in rows)))
    axis.set_xlabel("percent of the original")
    axis.invert_yaxis()
    return figure


def _errors(blocks: Sequence[BlockRow]) -> Any:
    """Each block's error before and after compensation, the input above."""
    figure, (axis,) = _canvas(6, 0.9 + 0.22 * min(len(blocks), NAMED))
    for label, colour, mark, key in ERRORS:
        known = [(getattr(block, key), n) for n, block in enumerate(blocks) if getattr(block, key) is not None]
        if known:
            values = [max(value, FLOOR) for value, _ in known]
            fill = "none" if key != "compensated" else colour
            axis.scatter(
                values, [n for _, n in known], s=18, marker=mark, facecolors=fill, edgecolors=colour, label=label
            )
    axis.set_xscale("log")
    axis.set_xlabel("squared error, as a share of the block's output")
    _name_rows(axis, [block.name for block in blocks])
    axis.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    return figure


def _curves(curves: Sequence[Mapping[str, Any]], blocks: Sequence[BlockRow]) -> Any:
    """Error over width, a panel for each kind, lighter lines nearer to the input; dots where the widths were taken."""
    row = {block.name: block for block in blocks}
    kinds = list(dict.fromkeys(row[curve["block"]].kind_class for curve in curves))
    figure, axes = _canvas(0.6 + 2.9 * len(kinds), 2.8, len(kinds))
    for axis, kind in zip(axes, kinds, strict=True):
        mine = [curve for curve in curves if row[curve["block"]].kind_class == kind]
        for number, curve in enumerate(mine):
            points = [(kept / max(curve["units"], 1), max(float(e), FLOOR)) for kept, e in curve["points"]]
            look = {"color": COLOURS[kind], "alpha": 0.3 + 0.7 * (number + 1) / len(mine)}
            axis.plot([100 * x for x, _ in points], [100 * y for _, y in points], linewidth=1, **look)
            taken = row[curve["block"]].share
            axis.plot([100 * taken], [100 * drawing.at(points, taken)], marker="o", markersize=3, **look)
        axis.set_yscale("log")
        axis.set_title(row[mine[0]["block"]].kind_name, fontsize=9)
        axis.set_xlabel("percent of the units kept")
    axes[0].set_ylabel("error in percent of the block's output")
    return figure


def _sensitivity(curves: Sequence[Mapping[str, Any]]) -> Any:
    """The error of each block alone, by the share of its units that is removed."""
    from matplotlib.colors import LogNorm

    points = [[(kept / max(c["units"], 1), float(error)) for kept, error in c["points"]] for c in curves]
    grid = [[100 * max(drawing.at(one, 1 - removed), FLOOR) for removed in REMOVED] for one in points]
    figure, (axis,) = _canvas(5.5, 0.9 + 0.24 * min(len(curves), NAMED))
    heat = axis.imshow(grid, cmap="YlOrBr", norm=LogNorm(100 * FLOOR, 100), aspect="auto")
    axis.set_xticks(range(len(REMOVED)), [f"{100 * removed:g}" for removed in REMOVED])
    axis.set_xlabel("percent of the units removed")
    _name_rows(axis, [curve["block"] for curve in curves])
    figure.colorbar(heat, label="error in percent")
    return figure


def _name_rows(axis: Any, names: Sequence[str]) -> None:
    """Names beside the rows, the input above; every other one, or fewer, where they would lie over each other."""
    step = -(-len(names) // NAMED)
    places = range(0, len(names), max(step, 1))
    axis.set_yticks(places, [names[place] for place in places], fontsize=6)
    axis.set_ylim(len(names) - 0.5, -0.5)
