"""Op rule of Pad: positions of a constant are added to a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Ints
from onnxgrail.graph.attributes import MICROSOFT, integers
from onnxgrail.graph.ops.rule import narrow, rule
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.ops.tensors.layout import RUNTIME
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

Pads = dict[int, tuple[int, int]]  # axis -> positions added at the start and the end; only padded axes
OPERAND, AXES = 1, 3
NAMES = ("pads", "paddings")  # of the attribute, in old files
COPIED = "it copies or crops channels"
UNTOLD = "how many positions it adds is computed at run time"


@rule("Pad")
@rule("Pad", domain=MICROSOFT)
def pad(site: Site) -> None:
    """Pass; added positions get labels of their own, so that they can be tied to heads or channels downstream."""
    given = site.attribute("pads", site.attribute("paddings"))
    padded = _pads(len(site.shape(0)), given, *(site.value(k) if site.name(k) else None for k in (OPERAND, AXES)))
    marks = site.marks(0)
    if padded is None or (site.name(AXES) and site.value(AXES) is None):
        site.freeze(marks, RUNTIME)
        return
    copied = site.attribute("mode", "constant") != "constant"
    stuck = [m for m in marks if any((copied or min(padded[a]) < 0) for a in m.axes if a in padded)]
    site.freeze(stuck, COPIED)
    fixed = given is not None or site.is_constant(OPERAND)
    site.emit(_widened(site, m, padded, fixed=fixed) for m in marks if m not in stuck)


def _pads(rank: int, given: Sequence[int] | None, counts: Ints | None, axes: Ints | None) -> Pads | None:
    """Return the positions added along each axis; None if not known."""
    if given is None and counts is None:
        return None
    numbers = counts.ravel().tolist() if given is None and counts is not None else list(given or ())
    along = list(range(rank)) if axes is None else [int(a) % rank for a in axes.ravel()]
    ends = zip(along, numbers, numbers[len(along) :], strict=False)
    return {axis: (int(first), int(last)) for axis, first, last in ends if first or last}


def _widened(site: Site, mark: Mark, padded: Pads, *, fixed: bool) -> Mark | None:
    """Return a mark with new labels for the added positions; they are frozen if the count cannot be rewritten."""
    along = [a for a in mark.axes if a in padded]
    if not along:
        return mark
    ends = [padded.get(a, (0, 0)) for a in mark.axes]
    if fixed:
        wide = [size + sum(end) for size, end in zip(mark.labels.shape, ends, strict=True)]
        labels = site.flow.labels.fresh(math.prod(wide)).reshape(wide)
        labels[tuple(slice(first, size - last) for size, (first, last) in zip(wide, ends, strict=True))] = mark.labels
        return Mark(mark.axes, labels)
    if len(along) == len(mark.axes):
        return Mark(mark.axes, np.pad(mark.labels, ends))
    return site.tie(mark, along, UNTOLD)


@narrow("Pad")
@narrow("Pad", domain=MICROSOFT)
def narrow_pad(cut: Cut) -> None:
    """Update the counts of added positions."""
    given = next((integers(cut.node, name) for name in NAMES if name in cut.node.attributes), None)
    rank = len(cut.shape(cut.output_name()))
    counts, axes = (cut.facts.values.get(cut.input_name(k)) for k in (OPERAND, AXES))
    padded = _pads(rank, given, counts, axes) or {}
    along = list(range(rank)) if axes is None else [int(a) % rank for a in axes.ravel()]
    numbers = [int(n) for n in (given if given is not None else counts if counts is not None else ())]
    before = list(numbers)
    for axis, stays in cut.alive(cut.output_name()).items():
        first, last = padded.get(axis, (0, 0))
        if first or last:
            place = along.index(axis)
            numbers[place] = int(stays[:first].sum())
            numbers[place + len(along)] = int(stays[len(stays) - last :].sum())
    if numbers == before:
        return
    if given is not None:
        name = next(name for name in NAMES if name in cut.node.attributes)
        cut.node.attributes[name] = ir.AttrInt64s(name, numbers)
    else:
        cut.set_operand(OPERAND, np.array(numbers, dtype=np.int64), "pads")
