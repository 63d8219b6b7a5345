"""Any model with a part of it moved into the branches of an If, as it was and with other numbers."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

FLAG = "which_branch"


def branched(model: ir.Model, rng: np.random.Generator) -> ir.Model | None:
    """Move some neighboring nodes into an If, as both of its branches; None if nothing leaves them.

    Weights that nothing else reads move along, as initializers or as Constant nodes; those of the second branch hold
    other numbers.  Values may have the same names in both branches.
    """
    proto = ir.to_proto(model)
    count = len(proto.graph.node)
    first, last = sorted(rng.integers(0, count + 1, 2).tolist())
    part, rest = list(proto.graph.node[first:last]), [*proto.graph.node[:first], *proto.graph.node[last:]]
    made = [name for node in part for name in node.output if name]
    read = {name for node in rest for name in node.input} | {value.name for value in proto.graph.output}
    left = [name for name in made if name in read]
    if not left:
        return None
    names = {name for node in part for name in node.input} - read
    weights = [t for t in proto.graph.initializer if t.name in names and not _listed(proto, t.name)]
    twins = bool(rng.integers(2))
    bodies = [
        _body(side, part, made, left, _others(weights, rng) if side == "e" else weights, rng, twins=twins)
        for side in "te"
    ]
    node = helper.make_node("If", [FLAG], left, name="If", then_branch=bodies[0], else_branch=bodies[1])
    del proto.graph.node[first:last]
    proto.graph.node.insert(first, node)
    stay = [t for t in proto.graph.initializer if t.name not in {w.name for w in weights}]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(stay)
    proto.graph.input.append(helper.make_tensor_value_info(FLAG, onnx.TensorProto.BOOL, []))
    del proto.graph.value_info[:]
    return ir.from_proto(proto)


def _listed(proto: onnx.ModelProto, name: str) -> bool:
    return any(value.name == name for value in (*proto.graph.input, *proto.graph.output))


def _others(weights: list[onnx.TensorProto], rng: np.random.Generator) -> list[onnx.TensorProto]:
    """Matrices with other numbers; smaller constants may be sizes or positions."""
    found = []
    for tensor in weights:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32 and array.ndim > 1:
            array = rng.permutation(array.ravel()).reshape(array.shape)
        found.append(numpy_helper.from_array(array, tensor.name))
    return found


def _body(
    side: str,
    part: list[onnx.NodeProto],
    made: list[str],
    left: list[str],
    weights: list[onnx.TensorProto],
    rng: np.random.Generator,
    *,
    twins: bool,
) -> onnx.GraphProto:
    ending = "/own" if twins else f"/{side}"
    own = {name: name + ending for name in (*made, *(t.name for t in weights))}
    nodes, tensors = [], []
    for tensor in weights:
        renamed = onnx.TensorProto.FromString(tensor.SerializeToString())
        renamed.name = own[tensor.name]
        if rng.integers(2):
            nodes.append(helper.make_node("Constant", [], [renamed.name], value=renamed))
        else:
            tensors.append(renamed)
    for node in part:
        copy = onnx.NodeProto.FromString(node.SerializeToString())
        for field in (copy.input, copy.output):
            field[:] = [own.get(name, name) for name in field]
        nodes.append(copy)
    return helper.make_graph(nodes, side, [], [onnx.ValueInfoProto(name=own[n]) for n in left], tensors)
