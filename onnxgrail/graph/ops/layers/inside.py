"""Op rules inside attention heads whose channels are in a basis of their own: these channels can go.

All heads then lose the same number of channels, and whole heads stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.core import INNER, Ints, Kind
from onnxgrail.graph.attributes import MICROSOFT, names_of, number
from onnxgrail.graph.ops.layers.cache import adopt
from onnxgrail.graph.ops.layers.contraction import BIAS, CONTRACTED
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.products import axes_of
from onnxgrail.graph.rotate.marked import ORDER, READ
from onnxgrail.graph.trace.flow import Flow, Site, Use
from onnxgrail.graph.trace.labels import Mark

HEADS = "its heads stay, because channels inside of them can go"
PASTS = ((1, 4), (2, 5))  # operands of the standard's Attention with keys and values, and those with their pasts


def weighs(node: ir.Node) -> bool:
    """Return True for a fused kernel whose heads may have one size in queries and keys, and another in values.

    It reads the three one by one. With caches, only that of the standard takes two sizes.
    """
    given = {k for k, name in enumerate(names_of(node.inputs)) if name}
    caches = {*given & {6, 7}, *names_of(node.outputs)[1:3]} - {""}
    own = (node.domain, node.op_type) == (MICROSOFT, "MultiHeadAttention") and not caches
    return given >= {0, 1, 2} and (own or (node.domain, node.op_type) == ("", "Attention"))


def is_inside(site: Site) -> bool:
    """Return True if channels inside heads are followed, at a product or a fused kernel."""
    return site.flow.tables is not None or any(_rotation(site, kind) for kind in INNER)


def _rotation(site: Site, kind: Kind) -> str:
    """Return the name of the rotation of a node's channels of a kind; '' if there was none."""
    return site.node.metadata_props.get(READ + kind, "")


def inside(site: Site) -> None:
    """Pass the channels of values, and tie those of queries to those of keys."""
    last, rank = len(site.out_shape()) - 1, len(site.shape(1))
    summed, met, kept = axes_of(site.node, (len(site.shape(0)), rank))
    places = [(0, summed), (1, met), (1, kept)]
    if site.flow.tables is not None:
        found = [_recorded(site, *place) for place in places]
        values = [mark for mark in found[2:] if mark is not None]
        site.emit([m.moved([last if a == kept else a + last + 1 - rank for a in m.axes]) for m in values])
        return
    if _rotation(site, "vo"):
        site.freeze(site.marks(0), HEADS)
        channels = _channels(site, *places[2])
        if channels is not None:
            site.rank(channels, "vo", _rotation(site, "vo"))
            site.emit([Mark((last,), channels)])
        return
    _meet(site, *(_channels(site, *place) for place in places[:2]))


def _meet(site: Site, queries: Ints | None, keys: Ints | None) -> None:
    """Tie the channels of queries to those of keys, one label per channel, and rank them."""
    if queries is None or keys is None:
        site.freeze([Mark((0,), labels) for labels in (queries, keys) if labels is not None], CONTRACTED)
        return
    _consumed(site, [queries, keys] if _is_normed(site.flow, keys) else [queries])
    site.union(queries, keys)
    order = site.node.metadata_props.get(ORDER)
    ranked = queries if order is None else queries[[int(n) for n in order.split(",")]]
    site.rank(ranked, "qk", _rotation(site, "qk"))


def kernel(site: Site, count: int, groups: int, biases: int | None = None) -> None:
    """Pass the channels of values through a fused kernel, and tie those of queries to those of keys.

    Args:
        site: the kernel.
        count: number of heads of queries, and of the result.
        groups: number of heads of keys and values.
        biases: operand with the biases of queries, keys and values in one vector.
    """
    last = len(site.shape(2)) - 1
    found = [_heads(site, operand, heads) for operand, heads in enumerate((count, groups, groups))]
    if biases is None:
        _join_pasts(site, found, groups)
    if site.flow.tables is not None:
        for operand, heads in enumerate(found):
            if heads is not None:  # every query head with the keys that it reads
                copies = 1 if operand == 2 else count // len(heads)
                site.flow.tables[site.key, operand, last] = Mark((last - 1, last), np.repeat(heads, copies, axis=0))
    if biases is not None and site.name(biases):
        site.passenger(biases, _in_one(site, found), BIAS, whole=True)
    if site.flow.tables is None:
        _rank(site, found, biases)
    if found[2] is not None:
        made = np.repeat(found[2], count // groups, axis=0)
        site.emit([Mark((1, 3), made) if last == 3 else Mark((2,), made.ravel())])


def _rank(site: Site, found: Sequence[Ints | None], biases: int | None) -> None:
    """Rank the channels of queries, keys and values of a fused kernel; see `kernel`."""
    queries, keys, values = (None if heads is None else heads[0] for heads in found)
    if _rotation(site, "qk"):
        _meet(site, queries, keys)
        if biases is not None and site.is_constant(biases) and queries is not None and keys is not None:
            mine = Mark((0,), _in_one(site, [found[0], None, None]))
            site.carry(biases, mine, "consumer", (site.name(0), len(site.shape(0)) - 1))  # it makes queries, too
    if values is not None:
        site.rank(values, "vo", _rotation(site, "vo"))


def _join_pasts(site: Site, found: Sequence[Ints | None], groups: int) -> None:
    """Tie the channels of keys and values of the standard's Attention to those of their pasts, and pass them on."""
    for (operand, past), output in zip(PASTS, (1, 2), strict=True):
        heads = found[operand]
        before = _heads(site, past, groups, "vo" if operand == 2 else "qk") if site.name(past) else None
        if before is not None and heads is not None:
            site.union(before, heads)
        elif site.name(past):
            held = [Mark((1, 3), labels) for labels in (before, heads) if labels is not None]
            site.freeze(held, adopt(site, past, held[0], CONTRACTED) if heads is not None else CONTRACTED)
        site.emit([] if heads is None else [Mark((1, 3), heads)], output)


def _in_one(site: Site, heads: Sequence[Ints | None]) -> Ints:
    """Return the labels of queries, keys and values in one vector, 0 for those that stay."""
    sizes = [site.shape(operand)[-1] for operand in range(3)]
    found = [np.zeros(n, np.int64) if some is None else some.ravel() for some, n in zip(heads, sizes, strict=True)]
    return np.concatenate(found)


def _heads(site: Site, operand: int, count: int, kind: Kind | None = None) -> Ints | None:
    """Return the (heads, channels) labels of an operand of a fused kernel; None if its channels stay.

    After a rotation, the channels of all heads are tied.
    """
    last = len(site.shape(operand)) - 1
    apart = last == 3  # heads have an axis of their own
    mine = [mark for mark in site.marks(operand) if last in mark.axes]
    site.freeze([mark for mark in site.marks(operand) if last not in mark.axes], HEADS)
    turned = site.flow.tables is not None or _rotation(site, kind or ("vo" if operand == 2 else "qk"))
    if len(mine) != 1 or not turned or not set(mine[0].axes) <= {last, 1 if apart else last}:
        site.freeze(mine, CONTRACTED if turned else HEADS)
        return None
    size = site.shape(operand)[last] // (1 if apart else count)
    heads = np.broadcast_to(mine[0].labels.reshape(-1, size), (count, size))
    if site.flow.tables is None:
        site.union(heads[:1], heads)
    return heads


def keep_scale(cut: Cut, count: int) -> None:
    """Write down the scale that a fused kernel takes from the size of its heads, if these lose channels."""
    name = cut.input_name(0)
    shape = cut.shape(name)
    labels = cut.labels(name, len(shape) - 1)
    if labels is None or number(cut.node, "scale", 0.0):
        return
    heads = ~cut.dead[labels.reshape(1 if len(shape) == 4 else count, -1)]
    if not heads[heads.any(axis=1)].all():
        cut.node.attributes["scale"] = ir.AttrFloat32("scale", heads.shape[1] ** -0.5)


def _recorded(site: Site, operand: int, axis: int) -> Mark | None:
    """Record the mark of an operand along its channel axis, and return it; freeze what lies along other axes."""
    mine = [mark for mark in site.marks(operand) if axis in mark.axes]
    own = {0: [axis], 1: [len(site.shape(1)) - 2, len(site.shape(1)) - 1]}[operand]
    site.freeze([m for m in site.marks(operand) if not set(own) & set(m.axes)], HEADS)
    if len(mine) != 1 or (operand == 1 and set(own) <= set(mine[0].axes)):
        site.freeze(mine, CONTRACTED)
        return None
    assert site.flow.tables is not None
    site.flow.tables[site.key, operand, axis] = mine[0]
    return mine[0]


def _channels(site: Site, operand: int, axis: int) -> Ints | None:
    """Return one label per channel of an operand after tying all heads; None if it has no channels that can go."""
    mine = [mark for mark in site.marks(operand) if axis in mark.axes]
    site.freeze([mark for mark in site.marks(operand) if axis not in mark.axes], HEADS)
    return site.collapse(mine[0], axis) if len(mine) == 1 else None


def _is_normed(flow: Flow, channels: Ints) -> bool:
    """Return True if channels are divided by a root mean square, which depends on all of them."""
    roots = flow.labels.find(channels)
    return any(np.isin(flow.labels.find(use.mark.labels), roots).any() for use in flow.uses if use.scaled)


def _consumed(site: Site, sides: Sequence[Ints]) -> None:
    """Record that what makes queries, weights and biases, reads the channels: a product with keys has no weight.

    If keys are normalized, what makes them is recorded next, since a channel that no query reads changes the others.
    """
    flow = site.flow
    first, roots = (np.unique(flow.labels.find(some)) for some in (sides[0], np.concatenate(sides)))
    uses = [use for use in flow.uses if use.role != "consumer" and not use.scaled]
    for use in sorted(uses, key=lambda use: not np.isin(flow.labels.find(use.mark.labels), first).any()):
        reads = np.isin(flow.labels.find(use.mark.labels), roots).any()
        mark = _on_one_axis(site, use.mark) if reads else None
        made = _made(site, use, mark, len(sides)) if mark is not None else None
        if mark is not None and made is not None:
            mine = np.isin(flow.labels.find(mark.labels), roots)
            own = Mark(mark.axes, np.where(mine, mark.labels, 0))
            flow.uses.append(Use(use.node, use.operand, use.value, own, "consumer", made))


def _on_one_axis(site: Site, mark: Mark) -> Mark | None:
    """Return a mark if it varies along one axis only, as that of a bias of several heads does once these are tied."""
    found = mark if len(mark.axes) == 1 else site.flow.labels.normal(mark, site.why_none(mark))
    return found if found is not None and len(found.axes) == 1 else None


def _made(site: Site, use: Use, mark: Mark, operands: int) -> tuple[str, int] | None:
    """Return the tensor that a weight computes, with its bias if that is added next, and the tensor's channel axis.

    None if that tensor has other channels, too.
    """
    flow = site.flow
    readers = [_next(flow, value, use.node) for value in site.node.inputs[:operands]]
    after = next((value for value in readers if value is not None), None)
    biased = after is not None and (node := after.producer()) and node.op_type == "Add"
    name = (after.name or "") if biased and after is not None else use.node
    roots = flow.labels.find(mark.labels)
    marks = [_on_one_axis(site, one) for one in flow.marks.get(name, ())]
    alike = next((m for m in marks if m is not None and np.array_equal(flow.labels.find(m.labels), roots)), None)
    return None if alike is None else (name, alike.axes[0])


def _next(flow: Flow, value: ir.Value | None, name: str) -> ir.Value | None:
    """Return what is computed first from the tensor of a name on the way to a value; None if there is no such way."""
    after = None
    while value is not None and value.name != name:
        node = value.producer()
        after = value
        value = next((v for v in node.inputs if v is not None and v.name in flow.marks), None) if node else None
    return None if value is None else after
