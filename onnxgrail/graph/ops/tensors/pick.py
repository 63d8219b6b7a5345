"""Op rules that select, sort or scatter positions along an axis: the other axes pass."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrail.graph.attributes import MICROSOFT, integer
from onnxgrail.graph.ops.rule import narrow, refused, rule
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.ops.tensors.layout import RUNTIME, taken
from onnxgrail.graph.ops.tensors.reduce import mix
from onnxgrail.graph.stored.integers import kept
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

BATCH = "its index follows the batch along this axis"
RANKED = "it ranks the positions of this axis by their values"
POSITION = "it treats these positions by where they stand"
BODY = "the body of {} handles it"
SCATTER = "it writes into a tensor at numbered positions, which is not followed"


def _axis(site: Site, default: int = 0) -> int:
    return int(site.attribute("axis", default)) % len(site.shape(0))


@rule("GatherElements", since=11)
def gather_elements(site: Site) -> None:
    """Pass axes other than the gathered one; tie the index to them or narrow it too."""
    passing = []
    for mark in mix(site, site.marks(0), {_axis(site)}, RUNTIME):
        found = _with_index(site, mark)
        if found is not None:
            passing.append(found)
    for mark in site.marks(1):
        if not any(m.axes == mark.axes for m in passing):
            site.freeze([mark], RUNTIME)
    site.emit(passing)


def _with_index(site: Site, mark: Mark) -> Mark | None:
    """Return a mark of the data for the index, which covers the first positions of every axis."""
    shape = site.shape(1)
    if len(mark.axes) > 1:
        site.freeze([mark], RUNTIME)
        return None
    (axis,) = mark.axes
    varying = site.flow.facts.varying
    if axis in varying.get(site.name(0), ()) or axis in varying.get(site.name(1), ()):
        site.freeze([mark], BATCH)
        return None
    found = taken(mark, axis, np.arange(shape[axis]))
    for other in site.marks(1):
        if other.axes == found.axes:
            site.union(other.labels, found.labels)
    return found


@narrow("GatherElements")
def narrow_gather_elements(cut: Cut) -> None:
    """Narrow an index that has no channels of its own."""
    name = cut.input_name(1)
    own = cut.alive(name)
    lost = {axis: stays for axis, stays in cut.alive(cut.output_name()).items() if axis not in own}
    known = cut.facts.values.get(name) if name in cut.facts.constants else None
    if known is not None and lost:
        cut.set_operand(1, kept(known, lost), "index")
        return
    for axis, stays in lost.items():
        along = [ir.AttrInt64("axis", axis)]
        cut.compute_operand(1, "Gather", [cut.operand(1), np.flatnonzero(stays)], f"index{axis}", along)


@rule("TopK")
def top_k(site: Site) -> None:
    """Tie the ranked axis; pass the others."""
    passing = mix(site, site.marks(0), {_axis(site, -1)}, RANKED)
    for output in (0, 1):
        site.emit(passing, output)


@rule("Trilu", since=14)
@rule("Trilu", domain=MICROSOFT)
def trilu(site: Site) -> None:
    """Tie rows and columns; pass the other axes."""
    rank = len(site.shape(0))
    site.emit(mix(site, site.marks(0), {rank - 2, rank - 1}, POSITION))


@rule("ReverseSequence", since=10)
def reverse_sequence(site: Site) -> None:
    """Tie the time and batch axes; pass the others."""
    axes = {int(site.attribute("time_axis", 0)), int(site.attribute("batch_axis", 1))}
    site.emit(mix(site, site.marks(0), axes, POSITION))


@rule("Compress", since=9)
def compress(site: Site) -> None:
    """Select channels by a constant condition; pass the other axes."""
    condition = site.value(1)
    if site.attribute("axis") is None:
        site.freeze(site.marks(0), "it has no axis, so channels are mixed with positions")
        return
    axis = _axis(site)
    if condition is None or not site.is_constant(1):
        site.emit(mix(site, site.marks(0), {axis}, RUNTIME))
        return
    picked = np.flatnonzero(condition)
    site.emit(taken(m, axis, picked) for m in site.marks(0))


@narrow("Compress")
def narrow_compress(cut: Cut) -> None:
    """Narrow the condition."""
    if "axis" not in cut.node.attributes:
        return
    stays = cut.alive(cut.input_name(0)).get(integer(cut.node, "axis") % len(cut.shape(cut.input_name(0))))
    if stays is not None:
        condition = cut.facts.values[cut.input_name(1)]
        cut.set_operand(1, condition[stays[: len(condition)]], "condition")


refused("TensorScatter", why=SCATTER, told="Refuse: the positions it writes to span the channels.")
refused(
    "OneHot", "Unique", "Multinomial", why=POSITION, told="Refuse: values become positions, or positions become values."
)
refused("If", why=BODY, told="Flatten branches that samples take; refuse an If whose branches return sequences.")
refused("Loop", "Scan", why=BODY, told="Refuse: bodies are not traced.")
