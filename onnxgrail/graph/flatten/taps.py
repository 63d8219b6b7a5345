"""Build a model that reports which branches of its Ifs are taken, and computes only what that needs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from onnxgrail.graph.flatten.branches import SIDES, folded
from onnxgrail.graph.io.serial import Packed, pack
from onnxgrail.graph.trace.facts import is_choice, key

_PREFIX = "onnxgrail.taken/"


def tapped(model: ir.Model) -> tuple[Packed, dict[str, str]]:
    """Return a model for the runtime, and the key of each choice by the name of the output that reports it.

    An output is 1 if the then branch is taken, 0 if the else branch is taken, and empty if the If itself is in a branch
    that is not taken.
    """
    names = {_PREFIX + key(node): key(node) for node in model.graph if is_choice(node)}
    left = set[str]()

    def change(proto: onnx.ModelProto) -> None:
        _add(proto.graph, names)
        del proto.graph.output[:]
        proto.graph.output.extend(_number(name) for name in names)
        _prune(proto.graph)
        left.update(tensor.name for tensor in proto.graph.initializer)

    packed = pack(folded(model, own_names=False), change=change)
    return Packed(packed.data, {name: array for name, array in packed.weights.items() if name in left}), names


def _add(graph: onnx.GraphProto, names: Collection[str]) -> list[str]:
    """Make every If of a graph output the branch it takes, and pass on the outputs of inner Ifs; return all of them."""
    found = []
    for node in graph.node:
        name = _PREFIX + next((name for name in node.output if name), "")
        if node.op_type != "If" or name not in names:
            continue
        bodies = {side: next(a.g for a in node.attribute if a.name == SIDES[side]) for side in SIDES}
        inside = {side: _add(body, names) for side, body in bodies.items()}
        told = [name, *dict.fromkeys(one for some in inside.values() for one in some)]
        for side, body in bodies.items():
            for one in told:
                numbers = [int(side == "then")] if one == name else []
                _tell(body, one if one in inside[side] else numbers, f"{one} in {side} of {name}")
        node.output.extend(told)
        found += told
    return found


def _tell(body: onnx.GraphProto, what: str | list[int], name: str) -> None:
    """Add an output to a branch: the output of an inner If, or constant numbers."""
    if isinstance(what, str):
        body.node.append(onnx.helper.make_node("Identity", [what], [name]))
    else:
        tensor = numpy_helper.from_array(np.array(what, dtype=np.int64))
        body.node.append(onnx.helper.make_node("Constant", [], [name], value=tensor))
    body.output.append(_number(name))


def _number(name: str) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [None])


def _prune(graph: onnx.GraphProto) -> set[str]:
    """Remove nodes, If outputs and weights that no output of a graph needs; return the outer names it reads."""
    wanted = {value.name for value in graph.output}
    used = []
    for node in reversed(graph.node):
        used.append(bool(wanted.intersection(node.output)))
        if not used[-1]:
            continue
        bodies = [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
        if any(name.startswith(_PREFIX) for name in node.output):
            stays = [name in wanted for name in node.output]
            sides = [a.g for a in node.attribute if a.name in SIDES.values()]  # an odd file has other graphs, too
            for field in (node.output, *(body.output for body in sides)):
                _keep(field, stays)
        wanted |= {name for name in node.input if name} | {name for body in bodies for name in _prune(body)}
    _keep(graph.node, used[::-1])
    _keep(graph.initializer, [tensor.name in wanted for tensor in graph.initializer])
    del graph.value_info[:]
    made = {name for node in graph.node for name in node.output} | {tensor.name for tensor in graph.initializer}
    return wanted - made - {value.name for value in graph.input}


def _keep(field: Any, stays: list[bool]) -> None:
    """Remove the items of a repeated field whose flag is False."""
    for place in reversed([place for place, stay in enumerate(stays) if not stay]):
        del field[place]
