"""Standard fused attention and rotary embedding: a head is one unit in query, key and value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Ints
from onnxgrail.graph.attributes import MICROSOFT, integer
from onnxgrail.graph.ops.layers.cache import past, present
from onnxgrail.graph.ops.layers.inside import is_inside, keep_scale, kernel, weighs
from onnxgrail.graph.ops.layers.linear import SHARED
from onnxgrail.graph.ops.rule import narrow, rule
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.ops.tensors.filled import pick
from onnxgrail.graph.ops.tensors.reduce import mix
from onnxgrail.graph.rotate.marked import PICKED
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

PARTIAL = "query, key and value do not all carry heads that can go"


def heads_of(site: Site, marks: Sequence[Mark], axis: int, count: int) -> Ints | None:
    """Return one label per head for an axis that holds `count` heads of any size; None if the axis has no marks."""
    found = None
    for mark in marks:
        if axis in mark.axes:
            table = site.collapse(mark, axis).reshape(count, -1)
            site.union(table[:, :1], table)
            found = table[:, 0]
        elif mark.axes != (0,):
            site.freeze([mark], "attention mixes these positions")
    return found


def key_value(site: Site, places: Sequence[tuple[int, int]], count: int, groups: int) -> tuple[list[Ints | None], str]:
    """Return the labels of the key and value heads at (operand, axis), and the reason if they have none.

    A single key-value head shared by all query heads stays.  A four-axis operand without labels may be a cache that is
    used alone, as in cross attention to an encoder; it gets labels of its own.
    """
    if groups == 1 < count:
        site.freeze([m for operand, _ in places for m in site.marks(operand) if m.axes != (0,)], SHARED)
        return [None] * len(places), SHARED
    found, why = [], ""
    for operand, axis in places:
        labels = heads_of(site, site.marks(operand), axis, groups)
        if labels is None and len(site.shape(operand)) == 4:
            fresh = site.flow.labels.fresh(groups)
            reason = past(site, operand, axis, fresh, PARTIAL)
            labels, why = (None, why or reason) if reason else (fresh, why)
        found.append(labels)
    return found, why


def joined(site: Site, query: Ints | None, shared: Sequence[Ints | None], groups: int, why: str = "") -> Ints | None:
    """Tie heads across query, key and value, and return the labels of the query heads.

    A key-value head is removed together with the query heads that read it.  If key-value heads stay, because all query
    heads share one or for the reason `why`, every group must lose the same number of query heads.

    Args:
        site: the attention node.
        query: labels of the query heads.
        shared: labels of the key and value heads.
        groups: number of key-value heads.
        why: the reason why key-value heads stay, if any.

    Returns:
        The labels; None if no head can be removed: then all are frozen.
    """
    held = [labels for labels in shared if labels is not None]
    if query is None:
        site.freeze([Mark((0,), labels) for labels in held], PARTIAL)
        return None
    if groups == 1 < len(query):
        why = SHARED
    elif len(held) < len(shared):
        why = why or PARTIAL
    if not why:
        for labels in held:
            site.union(query, np.repeat(labels, len(query) // groups))
    else:
        site.freeze([Mark((0,), labels) for labels in held], why)
        if len(query) == groups:
            site.freeze([Mark((0,), query)], why)
            return None
        table = query.reshape(groups, -1)
        site.union(table[:1], table)
    site.kind(query, "heads")
    return query


def bias(site: Site, operand: int, heads: Ints) -> None:
    """Tie a mask or bias of shape (batch, heads, ...) to the heads, unless it is broadcast over them."""
    shape = site.shape(operand) if site.name(operand) else ()
    if len(shape) < 3 or shape[-3] == 1:
        return
    axis = len(shape) - 3
    if site.is_constant(operand):
        site.carry(operand, Mark((axis,), heads))
        return
    own = next((m for m in site.marks(operand) if axis in m.axes), None)
    if own is None:
        site.freeze([Mark((0,), heads)], "its mask differs from head to head and is computed at run time")
    else:
        site.union(site.collapse(own, axis), heads)


def caches(site: Site, operands: Sequence[int], shared: Sequence[Ints | None], outputs: Sequence[int]) -> str:
    """Tie past and present keys and values to their heads on axis 1; return the reason if that is not possible."""
    reasons = []
    for operand, output, labels in zip(operands, outputs, shared, strict=True):
        if labels is None:
            continue
        reasons.append(past(site, operand, 1, labels, PARTIAL) or present(site, output))
        site.emit([Mark((1,), labels)] if site.out_name(output) else [], output)
    return next((why for why in reasons if why), "")


@rule("Attention", since=23)
def attention(site: Site) -> None:
    """Tie heads across query, key and value, and query heads to their key-value head unless that must stay.

    If channels inside heads have a basis of their own, follow these channels, and keep the heads.
    """
    rank = len(site.shape(0))
    axis = 1 if rank == 4 else 2
    declared = [int(site.attribute(name, 0)) for name in ("q_num_heads", "kv_num_heads")]
    count, groups = (site.shape(0)[1], site.shape(1)[1]) if rank == 4 else declared
    if is_inside(site) and weighs(site.node):
        kernel(site, count, groups)
        return
    query = heads_of(site, site.marks(0), axis, count)
    shared, why = key_value(site, [(1, axis), (2, axis)], count, groups)
    heads = joined(site, query, shared, groups, why or caches(site, (4, 5), shared, (1, 2)))
    if heads is None:
        return
    bias(site, 3, heads)
    site.emit([Mark((axis,), np.repeat(heads, site.out_shape()[axis] // count))])
    site.emit([Mark((1,), heads)] if site.out_name(3) else [], 3)


@narrow("Attention")
def narrow_attention(cut: Cut) -> None:
    """Update the head counts of the three-dimensional form; keep the scale if heads lose channels."""
    keep_scale(cut, integer(cut.node, "q_num_heads", 1))
    if "q_num_heads" in cut.node.attributes:
        cut.recount("q_num_heads", cut.input_name(0), 2)
        cut.recount("kv_num_heads", cut.input_name(1), 2)


@rule("RotaryEmbedding", since=23)
@rule("RotaryEmbedding", domain=MICROSOFT)
def rotary(site: Site) -> None:
    """Pass heads; tie the features of a head, or if these are picked, the two that are rotated together."""
    shape = site.shape(0)
    inside = site.flow.tables is not None or PICKED in site.node.metadata_props
    if len(shape) == 4 and not inside:
        site.emit(mix(site, site.marks(0), {3}))
        return
    caches = caches_of(site.node)
    size = int(site.attribute("num_heads", 0)) or shape[-1]
    size = shape[-1] if len(shape) == 4 else shape[2] // size
    if len(shape) == 3 and not site.attribute("num_heads", 0):  # com.microsoft: tables hold half of a head's positions
        size = 2 * site.shape(caches)[-1]
    if not inside:
        heads_of(site, site.marks(0), 2, shape[2] // size)
    elif size % 2 == 0 and _tie_pairs(site, size, 2 * site.shape(caches)[-1]):
        site.flow.positions[site.key] = caches
    site.emit(site.marks(0))


def caches_of(node: ir.Node) -> int:
    """Return the first of the two operands of a rotary embedding that hold cosines and sines."""
    return 2 if node.domain == MICROSOFT else 1


def _tie_pairs(site: Site, size: int, turned: int) -> bool:
    """Tie the features that are rotated together, of the first `turned` features of every head; False if none go."""
    last = len(site.shape(0)) - 1
    pair = np.arange(size)
    if site.attribute("interleaved", 0):
        pair[:turned] = np.arange(turned) // 2 * 2
    else:
        pair[:turned] %= turned // 2
    heads = site.shape(0)[last] // size
    first = (np.arange(heads)[:, None] * size + pair).ravel()
    mine = [mark for mark in site.marks(0) if last in mark.axes]
    for mark in mine:
        site.union(np.take(mark.labels, first, axis=mark.along(last)), mark.labels)
    return bool(mine)


@narrow("RotaryEmbedding")
@narrow("RotaryEmbedding", domain=MICROSOFT)
def narrow_rotary(cut: Cut) -> None:
    """Update the head count; gather from the tables what the features that stay are rotated by."""
    name = cut.input_name(0)
    last = len(cut.shape(name)) - 1
    if PICKED not in cut.node.metadata_props:
        if integer(cut.node, "num_heads"):
            cut.recount("num_heads", name, 1 if last == 3 else 2)
        return
    stays, caches = cut.alive(name).get(last), caches_of(cut.node)
    if stays is None:
        return
    half = cut.shape(cut.input_name(caches))[-1]
    paired = stays[: 2 * half]
    kept = paired[::2] if integer(cut.node, "interleaved") else paired[:half]
    for operand in (caches, caches + 1):
        pick(cut, operand, {len(cut.shape(cut.input_name(operand))) - 1: kept})
    if integer(cut.node, "rotary_embedding_dim"):
        cut.set_int("rotary_embedding_dim", 2 * int(kept.sum()))
