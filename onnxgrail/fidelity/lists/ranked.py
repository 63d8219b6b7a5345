"""Detections in the order of their scores: a small change of a score moves them to other rows.

Detectors that choose their results themselves (DETR and its kind, YOLO without suppression afterwards) list the best
ones, best first. Rows of two models at the same place may then be different things, so they are matched by their boxes
or points.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from onnxgrail.core import Array, Feed, Floats, Ints
from onnxgrail.fidelity.kinds.part import ACTIVE, BOX, in_unit, things

LEAST = 0.5  # intersection over union of boxes that are the same thing
POINT, APART = 2, 0.01  # columns of a point, and the largest distance of the same one, as a share of all points' extent
SEVERAL, MOST = 2, 1024  # detections of a sample
Scores = tuple[str, int | None]
"""The output that has the scores, and their column; None if it has nothing else."""


def aligned(wanted: Feed, got: Feed, listed: Collection[str] = ()) -> Feed:
    """Return the outputs of a model with detections in the rows of those of the reference that they match.

    Matches have the same class, and boxes that overlap or points that are near. A row without a match equals that of
    the reference but for its score: 0 where a detection was lost, and that of a wrong detection where the reference has
    none.

    Args:
        wanted: outputs of the reference, samples first.
        got: outputs of the other model, of the same shapes.
        listed: outputs without an axis of samples that list detections of the only sample, in any order, as after
            non-maximum suppression.
    """
    bare = _without_samples(wanted, listed)
    if bare:
        wanted, got = ({**side, **_sampled(side, bare)} for side in (wanted, got))
    found = dict(got)
    for scores, group in _lists(wanted, bare):
        if not all(name in got and _comparable(wanted[name], got[name]) for name in group):
            continue
        sides = [{name: outputs[name] for name in group} for outputs in (wanted, got)]
        rows = {name: np.array(array) for name, array in sides[0].items()}
        for sample in range(len(wanted[scores[0]])):
            mine, theirs = ({name: array[sample] for name, array in side.items()} for side in sides)
            for name, array in _row(scores, mine, theirs).items():
                rows[name][sample] = array
        found |= rows
    return found | {name: found[name][0][..., np.argsort(order)] for name, order in bare.items() if name in found}


def _sampled(outputs: Feed, bare: Mapping[str, Ints]) -> Feed:
    """Return outputs of one sample with an axis of samples, and their columns in the order of `things`."""
    return {name: outputs[name][None][..., order] for name, order in bare.items() if name in outputs}


def _without_samples(outputs: Feed, listed: Collection[str]) -> dict[str, Ints]:
    """Return the outputs that may list detections of one sample, a number or a row each; empty without scores.

    Returns:
        By name, the order of the columns, see `things`.
    """
    arrays = {name: outputs[name] for name in listed if isinstance(outputs.get(name), np.ndarray)}
    some = {name: array for name, array in arrays.items() if array.ndim in (1, 2) and len(array) > 1}
    orders = {name: things(array) for name, array in some.items()}
    if not any(array.ndim == 1 or orders[name] for name, array in some.items()):
        return {}
    return {name: np.array(orders[name] or range(array.shape[-1])) for name, array in some.items()}


def scores_alone(outputs: Feed, listed: Collection[str] = ()) -> frozenset[str]:
    """Return the names of outputs that have nothing but the scores of detections; arguments as for `aligned`."""
    bare = _without_samples(outputs, listed)
    return frozenset(
        name for (name, column), _ in _lists({**outputs, **_sampled(outputs, bare)}, bare) if column is None
    )


def _comparable(one: Array, two: Array) -> bool:
    """Return True if values have the same shape, and none is missing in the second ones."""
    return one.shape == two.shape and bool(np.isfinite(two).all())


def _lists(outputs: Feed, bare: Collection[str] = ()) -> list[tuple[Scores, tuple[str, ...]]]:
    """Return the lists of detections: their scores, and the names of all outputs that belong to them."""
    arrays = {name: array for name, array in outputs.items() if isinstance(array, np.ndarray) and array.ndim in (2, 3)}
    found: list[tuple[Scores, tuple[str, ...]]] = []
    for name, array in arrays.items():
        count = array.shape[1]
        if not SEVERAL <= count <= MOST or array.dtype.kind != "f" or not array.size:
            continue
        alone = name in bare and array.ndim == 3 and bool(things(array[0]))
        if alone or (array.ndim == 3 and array.shape[2] > BOX + 1 and _ranked(array[..., BOX])):
            found.append(((name, BOX), (name,)))
        elif array.ndim == 2 and (_ranked(array) or (name in bare and in_unit(array))):
            group = tuple(other for other, one in arrays.items() if one.shape[:2] == array.shape)
            if _place({other: arrays[other][0] for other in group}):
                found.append(((name, None), group))
    return found


def _place(detections: Mapping[str, Array]) -> str:
    """Return the output that tells where detections are, by a box or a point each; empty if there is not just one."""
    for columns in (BOX, POINT):
        found = [name for name, array in detections.items() if array.shape[1:] == (columns,)]
        if found:
            return found[0] if len(found) == 1 else ""
    return ""


def _ranked(scores: Array) -> bool:
    """Return True if scores (samples, detections) are in 0..1 and fall, and are not all the same."""
    return bool(in_unit(scores) and (np.diff(scores, axis=1) <= 0).all() and (scores[:, 0] > scores[:, -1]).any())


def _row(scores: Scores, mine: Mapping[str, Array], theirs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the detections of one sample; see `aligned`."""
    name, column = scores
    p, q = (_scores(scores, side).astype(np.float64) for side in (mine, theirs))
    ours, others = _matches(scores, mine, theirs)
    found = {key: np.array(array) for key, array in mine.items()}
    for key, array in found.items():
        array[ours] = theirs[key][others]
    lost, wrong = (np.setdiff1d(np.arange(len(p)), some) for some in (ours, others))
    left = np.roll(q[wrong], -int((q[wrong] > ACTIVE).sum()))  # wrong detections beside the lowest of the reference
    left = np.where((p[lost] > ACTIVE) & (left > ACTIVE), 0.0, left)
    found[name][(lost,) if column is None else (lost, column)] = left
    return found


def _scores(scores: Scores, side: Mapping[str, Array]) -> Array:
    """Return the scores (detections,) of one side."""
    name, column = scores
    return side[name] if column is None else side[name][:, column]


def _matches(scores: Scores, mine: Mapping[str, Array], theirs: Mapping[str, Array]) -> tuple[Ints, Ints]:
    """Return the rows of both models that are the same detections."""
    name, column = scores
    sides = []
    for side in (mine, theirs):
        some = np.flatnonzero(_scores(scores, side) > ACTIVE / 2)
        places = side[_place(side)] if column is None else side[name][:, :BOX]
        sides.append((some, places[some].astype(np.float64), _labels(scores, mine, side)[some]))
    from scipy.optimize import linear_sum_assignment  # slow to import, and few models detect things

    (ours, one, these), (others, two, those) = sides
    alike = (these[:, None] == those[None]).all(axis=2)
    near = np.where(alike, _near(one, two), 0.0)
    rows, columns = linear_sum_assignment(-near)
    kept = near[rows, columns] >= LEAST
    return ours[rows[kept]], others[columns[kept]]


def _labels(scores: Scores, mine: Mapping[str, Array], side: Mapping[str, Array]) -> Array:
    """Return the classes (detections, several) of one side: what is a whole number in all rows of the reference."""
    name, column = scores
    if column is not None:
        mine, side = ({str(n): one[name][:, n] for n in range(column + 1, one[name].shape[1])} for one in (mine, side))
    found = [side[key] for key, a in mine.items() if key != name and a.ndim == 1 and (a == np.round(a)).all()]
    return np.stack([np.zeros(len(next(iter(side.values())))), *found], axis=1)


def _near(one: Floats, two: Floats) -> Floats:
    """Return how near all pairs of places are: `LEAST` or more for the same thing."""
    if one.shape[1] == BOX:
        return _overlap(one, two)
    far = np.linalg.norm(one[:, None] - two[None], axis=2)
    return np.asarray(1 / (1 + far / max(APART * np.ptp(one), 1e-9)) if far.size else far)


def _overlap(one: Floats, two: Floats) -> Floats:
    """Return the intersection over union of all pairs of boxes: two corners each, or a center and a size."""
    if not all((boxes[:, 2:] >= boxes[:, :2]).all() for boxes in (one, two)):
        one, two = (np.hstack([b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2]) for b in (one, two))
    low = np.maximum(one[:, None, :2], two[None, :, :2])
    high = np.minimum(one[:, None, 2:], two[None, :, 2:])
    both = np.clip(high - low, 0, None).prod(axis=2)
    sizes = [np.clip(b[:, 2:] - b[:, :2], 0, None).prod(axis=1) for b in (one, two)]
    whole = sizes[0][:, None] + sizes[1][None] - both
    return np.where(whole > 0, both / np.where(whole > 0, whole, 1), 0.0)
