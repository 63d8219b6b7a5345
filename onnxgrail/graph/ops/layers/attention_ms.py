"""Fused attention of ONNX Runtime: packed and separate inputs, key-value caches, grouped queries."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Ints
from onnxgrail.graph.attributes import MICROSOFT, integer, integers
from onnxgrail.graph.ops.layers.attention import PARTIAL, bias, caches, heads_of, joined, key_value
from onnxgrail.graph.ops.layers.cache import past, present
from onnxgrail.graph.ops.layers.contraction import BIAS, contracted
from onnxgrail.graph.ops.layers.inside import is_inside, keep_scale, kernel, weighs
from onnxgrail.graph.ops.layers.linear import SHARED
from onnxgrail.graph.ops.rule import narrow, rule
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

QUANTISED = "its key-value cache is quantized"
DECODING = "its cache is shared by the beams of a search, which is not followed"


@rule("MultiHeadAttention", domain=MICROSOFT)
def multi_head(site: Site) -> None:
    """Tie heads across query, key and value, packed or not, and caches; cut the packed bias.

    If channels inside heads have a basis of their own, follow these channels, and keep the heads.
    """
    count = int(site.attribute("num_heads"))
    if is_inside(site) and weighs(site.node) and all(len(site.shape(operand)) == 3 for operand in range(3)):
        kernel(site, count, count, biases=3)
        return
    query = heads_of(site, site.marks(0), 2, count)
    # (batch, length, width), (batch, length, heads, 2, size) when packed, (batch, heads, length, size) as a past
    places = [(k, 1 if len(site.shape(k)) == 4 else 2) for k in (1, 2) if site.name(k)]
    parts, why = key_value(site, places, count, count)
    if not why and query is not None:
        why = caches(site, (6, 7), (query, query), (1, 2))
    heads = joined(site, query, parts, count, why)
    if heads is None:
        return
    if site.name(3):  # the concatenated biases of query, key and value
        first = (site.shape(3)[0] - site.out_shape()[2]) // 2
        biases = [np.repeat(heads, size // len(heads)) for size in (first, first, site.out_shape()[2])]
        site.passenger(3, np.concatenate(biases), BIAS, whole=True)
    bias(site, 5, heads)
    site.emit([Mark((2,), np.repeat(heads, site.out_shape()[2] // count))])
    site.emit([Mark((1,), heads)] if site.out_name(3) else [], 3)


@narrow("MultiHeadAttention", domain=MICROSOFT)
def narrow_multi_head(cut: Cut) -> None:
    """Update the head count; keep the scale if heads lose channels."""
    keep_scale(cut, integer(cut.node, "num_heads"))
    cut.recount("num_heads", cut.input_name(0), 2)


@rule("DecoderMaskedMultiHeadAttention", domain=MICROSOFT)
def decoder_masked(site: Site) -> None:
    """Refuse: its cache is a buffer shared by the beams of a search."""
    site.freeze([m for k in site.operands for m in site.marks(k) if m.axes != (0,)], DECODING)


@rule("Attention", domain=MICROSOFT)
def packed_attention(site: Site) -> None:
    """Consume the input and produce query, key and value heads by the packed weight; tie the heads."""
    if not site.is_constant(1):
        site.freeze([*site.marks(0), *site.marks(1)], "its weight is computed at run time")
        return
    count = int(site.attribute("num_heads"))
    width = site.shape(1)[1]
    sizes = list(site.attribute("qkv_hidden_sizes", None) or [width // 3] * 3)
    fed = [m for m in site.marks(0) if 2 in m.axes][:1]
    contracted(site, 1, 0, 2, [site.collapse(m, 2) for m in fed])
    produced = site.weight(1, 1)
    site.carry(1, Mark((1,), produced), "producer")
    pieces = np.split(produced, np.cumsum(sizes)[:2])
    parts = [heads_of(site, [Mark((0,), piece)], 0, count) for piece in pieces]
    assert parts[0] is not None
    # keys and values of the cache are stacked: (2, batch, heads, length, size)
    heads = joined(site, parts[0], parts[1:], count, past(site, 4, 2, parts[0], PARTIAL) or present(site, 1))
    if heads is None:
        return
    if site.name(2):
        site.carry(2, Mark((0,), produced))
    bias(site, 5, heads)
    site.emit([Mark((2,), pieces[2])])
    site.emit([Mark((2,), heads)] if site.out_name(1) else [], 1)


@narrow("Attention", domain=MICROSOFT)
def narrow_packed_attention(cut: Cut) -> None:
    """Update the head count and the three widths."""
    heads = integer(cut.node, "num_heads")
    cut.recount("num_heads", cut.output_name(), 2)
    if "qkv_hidden_sizes" in cut.node.attributes:
        left = integer(cut.node, "num_heads")
        scaled = [size // heads * left for size in integers(cut.node, "qkv_hidden_sizes")]
        cut.node.attributes["qkv_hidden_sizes"] = ir.AttrInt64s("qkv_hidden_sizes", scaled)


@rule("GroupQueryAttention", domain=MICROSOFT)
def group_query(site: Site) -> None:
    """Tie key-value heads to their query heads, packed or not, and caches and sinks, unless key-value heads stay."""
    count, groups = (int(site.attribute(name)) for name in ("num_heads", "kv_num_heads"))
    if site.name(12) or site.name(13):
        site.refuse(QUANTISED)
        return
    if site.name(1):
        query = heads_of(site, site.marks(0), 2, count)
        shared, why = key_value(site, [(1, 2), (2, 2)], count, groups)
    else:
        query, shared, why = *_unpacked(site, count, groups), ""
    heads = joined(site, query, shared, groups, why or caches(site, (3, 4), shared, (1, 2)))
    if heads is None:
        return
    bias(site, 10, heads)
    site.passenger(11, heads, "its sink is computed at run time", whole=True)  # one number per query head
    site.emit([Mark((2,), np.repeat(heads, site.out_shape()[2] // count))])
    site.emit([Mark((1,), heads)] if site.out_name(3) else [], 3)


def _unpacked(site: Site, count: int, groups: int) -> tuple[Ints | None, list[Ints | None]]:
    """Split the labels of query, key and value heads that are concatenated on the last axis of one tensor."""
    mark = next((m for m in site.marks(0) if 2 in m.axes), None)
    site.freeze([m for m in site.marks(0) if 2 not in m.axes and m.axes != (0,)], "attention mixes these positions")
    if mark is None:
        return None, [None, None]
    labels = site.collapse(mark, 2)
    size = len(labels) // (count + 2 * groups)
    pieces = np.split(labels, [count * size, (count + groups) * size])
    query = heads_of(site, [Mark((0,), pieces[0])], 0, count)
    if groups == 1 < count:
        site.freeze([Mark((0,), piece) for piece in pieces[1:]], SHARED)
        return query, [None, None]
    return query, [heads_of(site, [Mark((0,), piece)], 0, groups) for piece in pieces[1:]]


@narrow("GroupQueryAttention", domain=MICROSOFT)
def narrow_group_query(cut: Cut) -> None:
    """Update both head counts."""
    count, groups = (integer(cut.node, name) for name in ("num_heads", "kv_num_heads"))
    cut.recount("num_heads", cut.output_name(), 2)
    if cut.input_name(1):
        cut.recount("kv_num_heads", cut.input_name(1), 2)
        return
    labels = cut.labels(cut.input_name(0), 2)
    if labels is not None:
        keys = labels.reshape(count + 2 * groups, -1)[count : count + groups, 0]
        cut.set_int("kv_num_heads", int((~cut.dead[keys]).sum()))
