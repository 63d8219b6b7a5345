"""Fused ops of ONNX Runtime: a standard op combined with an activation, a bias, a residual sum or a transposition."""

from __future__ import annotations

import numpy as np

from onnxgrail.graph.attributes import MICROSOFT, integer
from onnxgrail.graph.ops.layers.linear import VECTOR, Form, linear, product, stacked
from onnxgrail.graph.ops.rule import narrow, rule
from onnxgrail.graph.ops.tensors.broadcast import combine, operand
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.ops.tensors.pointwise import binary, unary
from onnxgrail.graph.ops.tensors.reduce import GROUP, MIXED, PARAMETERS, mix
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

COMPUTED = "its weight is computed at run time or has more than two axes"

rule("Gelu", domain=MICROSOFT)(unary)
rule("BiasGelu", "FastGelu", "BiasAdd", domain=MICROSOFT)(binary)


@rule("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_matmul(site: Site) -> None:
    """Pass as MatMul, with either operand transposed, or its first axis moved after its other batch axes."""
    transposed, moved = (
        tuple(bool(site.attribute(f"{name}{letter}", 0)) for letter in "AB") for name in ("trans", "transBatch")
    )
    form = Form((transposed[0], transposed[1]), (moved[0], moved[1]))
    constant = [site.is_constant(k) for k in (0, 1)]
    ranks = [len(site.shape(k)) for k in (0, 1)]
    if min(ranks) < 2:
        site.freeze([*site.marks(0), *site.marks(1)], VECTOR)
    elif constant == [False, True] and ranks[1] == 2:
        second = form.transposed[1]
        linear(site, inward=int(second), outward=int(not second), transposed=form.transposed[0])
    elif any(constant):
        stacked(site, form=form)
    else:
        product(site, form=form)


@rule("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_normalisation(site: Site) -> None:
    """Tie input and skip; tie all positions of the normalized last axis."""
    shape = site.out_shape()
    joined = combine(site, [operand(site, k, len(shape)) for k in (0, 1)], shape)
    passing = mix(site, tuple(joined), {len(shape) - 1})
    for output in (0, 3):
        site.emit(passing, output)


@rule("EmbedLayerNormalization", domain=MICROSOFT)
def embed_normalisation(site: Site) -> None:
    """Freeze the channels of its tables, which are normalized at once."""
    tables = [k for k in (2, 3, 4) if site.name(k) and site.is_constant(k)]
    for k in tables:
        produced = site.weight(k, 1)
        site.carry(k, Mark((1,), produced), "producer")
        site.freeze([Mark((0,), produced)], MIXED)


@rule("GemmFastGelu", domain=MICROSOFT)
def gemm_fast_gelu(site: Site) -> None:
    """Consume the last axis and produce a new one by a constant matrix; cut the bias with the outputs."""
    if site.is_constant(1) and len(site.shape(1)) == 2:
        linear(site, inward=0, outward=1, bias=2)
    else:
        site.refuse(COMPUTED)


@rule("BiasSplitGelu", domain=MICROSOFT)
def bias_split_gelu(site: Site) -> None:
    """Tie the two halves of the last axis: position i gates position i of the other half."""
    shape = site.shape(0)
    last = len(shape) - 1
    joined = combine(site, [operand(site, k, len(shape)) for k in (0, 1)], shape)
    found = []
    for mark in joined:
        if last in mark.axes:
            first, second = np.split(mark.labels, 2, axis=mark.along(last))
            site.union(first, second)
            found.append(Mark(mark.axes, first))
        else:
            found.append(mark)
    site.emit(found)


@rule("GroupNorm", "SkipGroupNorm", domain=MICROSOFT)
def group_norm(site: Site) -> None:
    """Tie the channels of each norm group; they are on the last axis unless `channels_last` is 0."""
    shape = site.shape(0)
    axis = len(shape) - 1 if site.attribute("channels_last", 1) else 1
    groups = int(site.attribute("groups"))
    skipped = [k for k in (3, 4) if site.name(k)]
    if any(len(site.shape(k)) not in (1, len(shape)) for k in skipped):
        site.refuse("its inputs have different shapes")
        return
    marks = combine(site, [operand(site, k, len(shape)) for k in (0, *skipped)], shape)
    sums = list(marks)
    for mark in marks:
        if axis in mark.axes:
            table = site.collapse(mark, axis).reshape(groups, -1)
            site.union(table[:, :1], table, GROUP)
            for k in (1, 2):
                site.passenger(k, table.ravel(), PARAMETERS)
    site.emit(mix(site, tuple(marks), set(range(1, len(shape))) - {axis}))
    site.emit(sums, 1)


@narrow("GroupNorm", "SkipGroupNorm", domain=MICROSOFT)
def narrow_group_norm(cut: Cut) -> None:
    """Update the number of groups."""
    axis = len(cut.shape(cut.input_name(0))) - 1 if integer(cut.node, "channels_last", 1) else 1
    cut.recount("groups", cut.input_name(0), axis)
