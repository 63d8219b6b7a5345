"""Separate the activations that ONNX Runtime fuses into convolutions and `Gemm`; it fuses them again when it loads."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrail.graph.attributes import MICROSOFT
from onnxgrail.graph.rewrite.unique import free_name, names_kept, take_place

LAYERS = {"FusedConv": "Conv", "FusedGemm": "Gemm"}
ACTIVATION = "activation"
NAMES = {  # the attributes of each activation, in the order of a convolution's `activation_params`
    "Relu": (), "Tanh": (), "Sigmoid": (), "Softplus": (), "Softsign": (), "Clip": ("min", "max"),
    "LeakyRelu": ("alpha",), "Elu": ("alpha",), "HardSigmoid": ("alpha", "beta"),
}  # fmt: skip
INPUTS = 11  # first opset in which the limits of Clip are inputs


def unfuse(model: ir.Model) -> None:
    """Replace each fused layer by a layer, the sum with another tensor if it has one, and an activation, in place."""
    opset = model.opset_imports.get("", 0)
    for graph in model.graphs() if opset else ():
        fused = [node for node in graph if node.domain == MICROSOFT and node.op_type in LAYERS]
        if not fused:
            continue
        with names_kept(graph):
            for node in fused:
                given = node.attributes.get(ACTIVATION)
                activation = given.as_string() if given is not None else ""
                if not activation or activation in NAMES:
                    _separate(graph, node, activation, opset)


def _separate(graph: ir.Graph, fused: ir.Node, activation: str, opset: int) -> None:
    own = [a for name, a in fused.attributes.items() if not name.startswith(ACTIVATION)]
    summed = fused.inputs[3] if len(fused.inputs) > 3 else None
    steps = [ir.Node("", LAYERS[fused.op_type], fused.inputs[:3], own, num_outputs=1, name=fused.name)]
    if summed is not None:
        steps.append(ir.Node("", "Add", [steps[-1].outputs[0], summed], num_outputs=1))
    if activation:
        numbers = _parameters(fused, activation)
        if activation == "Clip" and opset >= INPUTS:
            limits = [_limit(fused, value) for value in numbers.values()]
            read = [steps[-1].outputs[0], *(node.outputs[0] for node in limits)]
            steps += [*limits, ir.Node("", activation, read, num_outputs=1)]
        else:
            attributes = [ir.AttrFloat32(name, value) for name, value in numbers.items()]
            steps.append(ir.Node("", activation, steps[-1].outputs[:1], attributes, num_outputs=1))
    _put(graph, fused, steps)


def _parameters(fused: ir.Node, activation: str) -> dict[str, float]:
    """Return the numbers of an activation: a list of a convolution, or attributes of their own of `FusedGemm`."""
    if fused.op_type == "FusedConv":
        given = fused.attributes.get(f"{ACTIVATION}_params")
        return dict(zip(NAMES[activation], () if given is None else given.as_floats(), strict=False))
    found = {name: fused.attributes.get(f"{ACTIVATION}_{name}") for name in NAMES[activation]}
    return {name: given.as_float() for name, given in found.items() if given is not None}


def _limit(fused: ir.Node, value: float) -> ir.Node:
    """Return a constant of the type that the layer computes in."""
    weight = fused.inputs[1]
    dtype = np.float32 if weight is None or weight.dtype is None else weight.dtype.numpy()
    return ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(np.asarray(value, dtype)))], num_outputs=1)


def _put(graph: ir.Graph, fused: ir.Node, steps: list[ir.Node]) -> None:
    """Put nodes in the place of another one; the last one's output takes over its name."""
    out = fused.outputs[0]
    for node in steps:
        node.metadata_props.update(fused.metadata_props)
        if node is not steps[0]:
            node.name = free_name(graph, f"{fused.name or out.name}/{node.op_type}")
        if node is not steps[-1]:
            node.outputs[0].name = free_name(graph, f"{out.name}/{node.op_type}")
            node.outputs[0].type = out.type
    graph.insert_before(fused, steps)
    take_place(out, steps[-1].outputs[0])
    graph.remove(fused, safe=True)
