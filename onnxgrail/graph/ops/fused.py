"""Fusions that ONNX Runtime writes into files: a known op with an activation, a bias or a residual sum inside."""

from __future__ import annotations

import numpy as np

from onnxgrail.graph.flow import Site
from onnxgrail.graph.ops.broadcast import Operand, combine, operand
from onnxgrail.graph.ops.conv import conv_marks, narrow_conv
from onnxgrail.graph.ops.linear import gemm, linear, product
from onnxgrail.graph.ops.pointwise import binary, unary
from onnxgrail.graph.ops.reduce import mix
from onnxgrail.graph.ops.rule import narrow, rule

MICROSOFT = "com.microsoft"

rule("Gelu", domain=MICROSOFT)(unary)
rule("BiasGelu", "FastGelu", domain=MICROSOFT)(binary)
rule("FusedGemm", domain=MICROSOFT)(gemm)
narrow("FusedConv", domain=MICROSOFT)(narrow_conv)


@rule("FusedConv", domain=MICROSOFT)
def fused_conv(site: Site) -> None:
    """As Conv; a summed tensor is tied to the outputs position by position."""
    marks = conv_marks(site)
    if site.name(3):
        shape = site.out_shape()
        own = Operand(0, shape, tuple(marks), constant=False, offset=0)
        site.kind(marks[0].labels if marks else np.zeros(0, dtype=np.int64), "stream")
        site.emit(combine(site, [own, operand(site, 3, len(shape))], shape))
    else:
        site.emit(marks)


@rule("FusedMatMul", domain=MICROSOFT)
def fused_matmul(site: Site) -> None:
    """As MatMul, with either operand transposed."""
    first, second = bool(site.attribute("transA", 0)), bool(site.attribute("transB", 0))
    marks = [m for k in (0, 1) for m in site.marks(k)]
    batches = site.attribute("transBatchA", 0) or site.attribute("transBatchB", 0)
    if batches or min(len(site.shape(k)) for k in (0, 1)) < 2 or site.is_constant(0):
        site.freeze(marks, "this form of FusedMatMul is left alone")
    elif not site.is_constant(1):
        product(site, transposed=(first, second))
    elif first or len(site.shape(1)) != 2:
        site.freeze(marks, "this form of FusedMatMul is left alone")
    else:
        linear(site, 0, 1, inward=1 if second else 0, outward=0 if second else 1)


@rule("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_normalisation(site: Site) -> None:
    """Input and skip are tied; the normalised last axis becomes one unit."""
    shape = site.out_shape()
    joined = combine(site, [operand(site, k, len(shape)) for k in (0, 1)], shape)
    passing = mix(site, tuple(joined), {len(shape) - 1})
    for output in (0, 3):
        site.emit(passing, output)
