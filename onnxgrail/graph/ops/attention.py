"""Fused attention and rotary embedding: a head is one unit in query, key and value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Ints
from onnxgrail.graph.flow import Site
from onnxgrail.graph.labels import Mark
from onnxgrail.graph.ops.cut import Cut
from onnxgrail.graph.ops.linear import FIXED
from onnxgrail.graph.ops.reduce import mix
from onnxgrail.graph.ops.rule import narrow, rule

CACHE = "its key-value cache is an input or output of the model"
PARTIAL = "query, key and value do not all carry heads that can go"
MICROSOFT = "com.microsoft"


def heads_of(site: Site, marks: Sequence[Mark], axis: int, count: int) -> Ints | None:
    """One label per head, given marks of an axis that holds `count` heads of any size; None when there are none."""
    found = None
    for mark in marks:
        if axis in mark.axes:
            table = site.collapse(mark, axis).reshape(count, -1)
            site.union(np.broadcast_to(table[:, :1], table.shape), table)
            found = table[:, 0]
        elif mark.axes != (0,):
            site.freeze([mark], "attention mixes these positions")
    return found


def _joined(site: Site, query: Ints | None, key: Ints | None, value: Ints | None) -> Ints | None:
    """Query heads go with the key-value head they share; None, and all frozen, when one of the three is fixed."""
    if query is None or key is None or value is None:
        site.freeze([Mark((0,), labels) for labels in (query, key, value) if labels is not None], PARTIAL)
        return None
    for shared in (key, value):
        site.union(query, np.repeat(shared, len(query) // len(shared)))
    site.kind(query, "heads")
    return query


def _bias(site: Site, operand: int, heads: Ints) -> None:
    """A mask or bias of shape (batch, heads, ...) follows the heads unless it is broadcast over them."""
    shape = site.shape(operand) if site.name(operand) else ()
    if len(shape) < 3 or shape[-3] == 1:
        return
    axis = len(shape) - 3
    if site.is_constant(operand):
        site.carry(operand, Mark((axis,), heads))
        return
    own = next((m for m in site.marks(operand) if axis in m.axes), None)
    if own is None:
        site.freeze([Mark((0,), heads)], "its mask differs from head to head and is computed")
    else:
        site.union(site.collapse(own, axis), heads)


def _cached(site: Site, past: Sequence[int], present: Sequence[int]) -> bool:
    """Whether keys and values come from or go to a cache; its heads are then frozen."""
    if not any(site.name(k) for k in past) and not any(site.out_name(k) for k in present):
        return False
    site.freeze([m for k in site.operands for m in site.marks(k) if m.axes != (0,)], CACHE)
    return True


@rule("Attention", since=23)
def attention(site: Site) -> None:
    """Heads are tied across query, key and value; key-value heads take their query heads along."""
    if _cached(site, (4, 5), (1, 2, 3)):
        return
    rank = len(site.shape(0))
    axis = 1 if rank == 4 else 2
    counts = [site.shape(k)[1] for k in range(3)] if rank == 4 else _declared(site)
    query, key, value = (heads_of(site, site.marks(k), axis, counts[k]) for k in range(3))
    heads = _joined(site, query, key, value)
    if heads is None:
        return
    _bias(site, 3, heads)
    site.emit([Mark((axis,), np.repeat(heads, site.out_shape()[axis] // len(heads)))])


def _declared(site: Site) -> list[int]:
    key_value = int(site.attribute("kv_num_heads"))
    return [int(site.attribute("q_num_heads")), key_value, key_value]


@narrow("Attention")
def narrow_attention(cut: Cut) -> None:
    """The head counts of the three-dimensional form follow."""
    if "q_num_heads" in cut.node.attributes:
        _count(cut, "q_num_heads", 0)
        _count(cut, "kv_num_heads", 1)


def _count(cut: Cut, attribute: str, operand: int) -> None:
    """Set a head count from the heads that stay in an input's last axis."""
    name = cut.input_name(operand)
    labels = cut.labels(name, len(cut.shape(name)) - 1)
    if labels is not None:
        heads = cut.node.attributes[attribute].as_int()
        cut.set_int(attribute, int((~cut.dead[labels.reshape(heads, -1)[:, 0]]).sum()))


@rule("RotaryEmbedding", since=23)
@rule("RotaryEmbedding", domain=MICROSOFT)
def rotary(site: Site) -> None:
    """Heads pass, the features of a head are one unit."""
    if len(site.shape(0)) == 4:
        site.emit(mix(site, site.marks(0), {3}))
        return
    count = int(site.attribute("num_heads", 0))
    if not count:
        site.freeze(site.marks(0), "it does not say how many heads it turns")
        return
    heads_of(site, site.marks(0), 2, count)
    site.emit(site.marks(0))


@narrow("RotaryEmbedding")
@narrow("RotaryEmbedding", domain=MICROSOFT)
def narrow_rotary(cut: Cut) -> None:
    """The head count of the three-dimensional form follows."""
    attribute = cut.node.attributes.get("num_heads")
    if attribute is not None and attribute.as_int() and len(cut.shape(cut.input_name(0))) == 3:
        _count(cut, "num_heads", 0)


@rule("MultiHeadAttention", domain=MICROSOFT)
def multi_head(site: Site) -> None:
    """Heads are tied across query, key and value; the packed bias is cut."""
    if _cached(site, (6, 7), (1, 2)):
        return
    if not site.name(1) or not site.name(2) or any(len(site.shape(k)) != 3 for k in range(3)):
        site.freeze([m for k in site.operands for m in site.marks(k)], "its packed form is left alone")
        return
    count = int(site.attribute("num_heads"))
    parts = [heads_of(site, site.marks(k), 2, count) for k in range(3)]
    heads = _joined(site, parts[0], parts[1], parts[2])
    if heads is None:
        return
    if site.name(3):
        bias = np.concatenate([np.repeat(heads, site.shape(k)[2] // count) for k in range(3)])
        site.carry(3, Mark((0,), bias))
    _bias(site, 5, heads)
    site.emit([Mark((2,), np.repeat(heads, site.out_shape()[2] // count))])


@narrow("MultiHeadAttention", domain=MICROSOFT)
def narrow_multi_head(cut: Cut) -> None:
    """The head count follows."""
    _count(cut, "num_heads", 0)


@rule("Attention", domain=MICROSOFT)
def packed_attention(site: Site) -> None:
    """The packed weight consumes the input and produces query, key and value heads, which are tied."""
    if not site.is_constant(1) or _cached(site, (4,), (1,)):
        site.freeze(site.marks(0), "its weight is computed at run time")
        return
    count = int(site.attribute("num_heads"))
    width = site.shape(1)[1]
    sizes = list(site.attribute("qkv_hidden_sizes", None) or [width // 3] * 3)
    consumed, produced = site.weight(1, 0), site.weight(1, 1)
    fed = next((m for m in site.marks(0) if 2 in m.axes), None)
    if fed is None:
        site.freeze([Mark((0,), consumed)], FIXED)
    else:
        site.union(site.collapse(fed, 2), consumed)
    site.carry(1, Mark((0,), consumed), "consumer", (site.name(0), 2))
    site.carry(1, Mark((1,), produced), "producer")
    pieces = np.split(produced, np.cumsum(sizes)[:2])
    parts = [heads_of(site, [Mark((0,), piece)], 0, count) for piece in pieces]
    heads = _joined(site, parts[0], parts[1], parts[2])
    assert heads is not None
    if site.name(2):
        site.carry(2, Mark((0,), produced))
    _bias(site, 5, heads)
    site.emit([Mark((2,), pieces[2])])


@narrow("Attention", domain=MICROSOFT)
def narrow_packed_attention(cut: Cut) -> None:
    """The head count and the three widths follow."""
    labels = cut.labels(cut.output_name(), 2)
    if labels is None:
        return
    heads = cut.node.attributes["num_heads"].as_int()
    left = int((~cut.dead[labels.reshape(heads, -1)[:, 0]]).sum())
    cut.set_int("num_heads", left)
    sizes = cut.node.attributes.get("qkv_hidden_sizes")
    if sizes is not None:
        scaled = [size // heads * left for size in sizes.as_ints()]
        cut.node.attributes["qkv_hidden_sizes"] = ir.AttrInt64s("qkv_hidden_sizes", scaled)


@rule("GroupQueryAttention", domain=MICROSOFT)
def group_query(site: Site) -> None:
    """Left alone: its key-value cache is part of the model's interface."""
    site.freeze([m for k in site.operands for m in site.marks(k)], CACHE)
