"""Compute the numbers of tables and figures from cells: medians, spreads, and harm by compensation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.fidelity.methods import SIM_BASES

Data = Mapping[str, Any]
FLOOR = {"accuracy": 0.005, "perplexity": 0.005, "1 - cosine": 0.0005}
"""Smaller differences are noise: two images of 400, half a percent of a perplexity."""

EPSILON = 1e-9  # shares of 400 images are not exact in floating point


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A method at a ratio: median and extremes over the splits, and sizes."""

    score: float
    low: float
    high: float
    params: int
    macs: int | None
    shape: str
    note: str = ""
    seconds: float = 0.0


Series = dict[float, Point]


def series(data: Data, subject: str) -> dict[str, Series]:
    """Return the points of a subject by method and ratio; cells without a file have no point."""
    found: dict[tuple[str, float], list[Mapping[str, Any]]] = defaultdict(list)
    metric = data["subjects"][subject]["metric"]
    for cell in data["cells"]:
        if cell["subject"] == subject and cell["params"] is not None:
            found[cell["method"], cell["ratio"]].append(cell)
    result: dict[str, Series] = defaultdict(dict)
    for (method, ratio), cells in sorted(found.items()):
        result[method][ratio] = _point(cells, metric)
    return dict(result)


def _point(cells: Sequence[Mapping[str, Any]], metric: str) -> Point:
    worst = 0.0 if metric == "accuracy" else math.inf
    scores = [worst if cell["score"] is None else float(cell["score"]) for cell in cells]
    first = cells[0]
    return Point(
        score=median(scores),
        low=min(scores),
        high=max(scores),
        params=first["params"],
        macs=first["macs"],
        shape=first["shape"],
        note=first.get("note", ""),
        seconds=median(cell.get("seconds", 0.0) for cell in cells),
    )


def faults(data: Data, subject: str) -> dict[str, str]:
    """Return the methods without any file, with the error of the first cell."""
    notes: dict[str, str] = {}
    good = set()
    for cell in data["cells"]:
        if cell["subject"] == subject:
            notes.setdefault(cell["method"], cell.get("note", ""))
            if cell["params"] is not None:
                good.add(cell["method"])
    return {method: note for method, note in notes.items() if method not in good}


@dataclass(frozen=True, kw_only=True, slots=True)
class Harm:
    """The number of compensated files that are worse than without compensation by more than noise, and these cases."""

    subject: str
    repair: str
    pairs: int
    worse: tuple[tuple[str, float, float, float], ...]  # base, ratio, score without, score with


def harm(data: Data, subject: str, repair: str) -> Harm:
    """Compare medians; noise is the larger of the two spreads over splits, and at least `FLOOR`."""
    points = series(data, subject)
    metric = data["subjects"][subject]["metric"]
    pairs, worse = 0, []
    for method, repaired in points.items():
        base, own = method.split("/")
        plain = points.get(f"{base}/none", {})
        if own != repair or base in SIM_BASES:
            continue
        for ratio in sorted(set(plain) & set(repaired)):
            pairs += 1
            one, two = plain[ratio], repaired[ratio]
            noise = max(FLOOR[metric], spread(one, metric), spread(two, metric))
            if loss(two.score, metric) - loss(one.score, metric) > noise + EPSILON:
                worse.append((base, ratio, one.score, two.score))
    worse.sort(key=lambda case: loss(case[2], metric) - loss(case[3], metric))
    return Harm(subject=subject, repair=repair, pairs=pairs, worse=tuple(worse))


def loss(score: float, metric: str) -> float:
    """Return a loss (low is good) with comparable differences: the logarithm of a perplexity."""
    if metric == "accuracy":
        return -score
    if metric == "perplexity":
        return min(math.log(score), 700.0) if score < math.inf else 700.0
    return score


def spread(point: Point, metric: str) -> float:
    """Return the distance between the best and the worst split."""
    return abs(loss(point.high, metric) - loss(point.low, metric))


def milliseconds(data: Data, subject: str, shape: str) -> tuple[float, float] | None:
    """Return the latency of a shape and of the dense model, None if not measured."""
    for entry in data["latency"]:
        if (entry["subject"], entry["shape"]) == (subject, shape):
            return entry["ms"], entry["dense_ms"]
    return None


def bases(points: Mapping[str, Series]) -> list[str]:
    """Return the measured selectors and folds in the order of the methods, without slow methods and onnxsim."""
    from bench.fidelity.methods import FOLDS, PRUNE, named

    order = [*PRUNE, *FOLDS]
    other = {*SIM_BASES, *(m.base for m in named() if m.base not in order)}
    names = {method.split("/")[0] for method in points} - other
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))
