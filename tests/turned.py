"""Streams in another basis, and their oracle: the original, in which every normalization reads a projection."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.observe import observe
from onnxgrail.core import Feed, Floats
from onnxgrail.graph.attributes import MICROSOFT
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.rotate.basis import Rotatable, rotatable, rotate
from onnxgrail.graph.rotate.restore import restore
from onnxgrail.graph.trace.survey import Ledger, Survey
from onnxgrail.graph.trace.tracer import trace
from tests.tiny import tiny

BEGIN = """
    x0 = Gather(table, ids)
    y0 = LayerNormalization(x0, g0, s0)
    h0 = MatMul(y0, up)
    r0 = Relu(h0)
    d0 = MatMul(r0, down)
    x1 = Add(x0, d0)
"""


def begun(rest: str, shapes: Mapping[str, tuple[int, ...]], outputs: str = "") -> ir.Model:
    """A model of ids whose residual stream, after one MLP, is read as the rest says; with the weights that it reads."""
    body = BEGIN + rest
    used = {name: shape for name, shape in shapes.items() if f"{name})" in body or f"{name}," in body}
    return tiny(f"int64[N,S] ids => float[N,S,3] y{outputs}", body, used)


def orthogonal(width: int, seed: int = 0) -> Floats:
    """A random basis; its last vector is constant, as the one that layer normalizations leave without energy."""
    draws = np.random.default_rng(seed).normal(size=(width, width))
    draws[:, 0] = 1
    return np.roll(np.linalg.qr(draws)[0], -1, axis=1)


def with_fused_products(model: ir.Model) -> ir.Model:
    """The model with half of every product by a matrix, as ONNX Runtime's operator by the transposed matrix."""
    model.opset_imports[MICROSOFT] = 1
    for node in model.graph:
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if weight is None or weight.const_value is None or len(weight.uses()) > 1:
            continue
        numbers = np.ascontiguousarray(weight.const_value.numpy().T)
        weight.const_value, weight.shape = ir.tensor(numbers, name=weight.name), ir.Shape(numbers.shape)
        node.op_type, node.domain = "FusedMatMul", MICROSOFT
        node.attributes.update({"alpha": ir.AttrFloat32("alpha", 0.5), "transB": ir.AttrInt64("transB", 1)})
    return model


def found_in(model: ir.Model, feed: Feed) -> Rotatable:
    """The streams of a model."""
    return rotatable(model, observe(model, feed), ("stream",))


def turned(model: ir.Model, feed: Feed, basis: Floats) -> tuple[ir.Model, Survey]:
    """The model with all streams in another basis, and its trace."""
    found = found_in(model, feed)
    assert found.streams
    assert not found.refusals
    other = rotate(found, dict.fromkeys(found.streams, basis))
    return other, trace(other, observe(other, feed))


def without(model: ir.Model, survey: Survey, kept: int) -> ir.Model:
    """A model without the last channels of its streams."""
    dead = np.zeros(survey.ids, dtype=bool)
    for block in survey.blocks:
        if block.ranked:
            dead[block.ids[kept:]] = True
    assert dead.any()
    slim = model.clone()
    apply(slim.graph, survey, Ledger(dead=dead, arrays={}))
    restore(slim)
    return slim


def projected(model: ir.Model, feed: Feed, basis: Floats) -> ir.Model:
    """The model with fused sums apart, in which all that reads a stream reads a projection on columns of a basis."""
    found = found_in(model, feed)
    graph = found.model.graph
    for stream in found.streams.values():
        centered = stream.centered and not stream.carries_mean
        projection = basis @ basis.T - (basis @ basis.T).mean(axis=0) * centered
        reads = [(node, norm.source) for norm in stream.norms for node in norm.nodes if norm.source in node.inputs]
        reads += [(slot.node, slot.node.inputs[0]) for slot in stream.slots if slot.reads and slot.norm is None]
        for number, (reader, value) in enumerate(reads):
            convolved, name = reader.op_type == "Conv", value.name
            numbers = projection.T.reshape(*projection.shape, *[1] * (len(found.facts.shapes[name]) - 2))
            numbers = (numbers if convolved else projection).astype(found.facts.dtypes[name])
            matrix = constant(graph, numbers, f"{stream.name}/projection/{number}")
            node = ir.Node("", "Conv" if convolved else "MatMul", [value, matrix], num_outputs=1)
            node.outputs[0].name = f"{stream.name}/projected/{number}"
            graph.insert_before(reader, node)
            for operand in [k for k, v in enumerate(reader.inputs) if v is value]:
                reader.replace_input_with(operand, node.outputs[0])
    return found.model
