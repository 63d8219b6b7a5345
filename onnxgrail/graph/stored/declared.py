"""Weights that the graph computes: which of their shapes the file declares, and the stored numbers of the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrail.core import Ints, Refusal
from onnxgrail.graph.attributes import LAYOUTS, given, integers, name_of
from onnxgrail.graph.ops.tensors.layout import reshaped
from onnxgrail.graph.stored.integers import Member
from onnxgrail.graph.trace.facts import Facts, is_choice, key
from onnxgrail.graph.trace.flow import Flow
from onnxgrail.graph.trace.labels import Mark

SMALL = 64  # elements of the largest tensor that may hold a target shape
UNKNOWN = (
    "the weight {} is computed in the graph and the file does not tell its shape; fold constants before compressing"
)


class Move(NamedTuple):
    """A change of an array's layout: of its shape, or of the order of its axes."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    order: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class LaidOut:
    """A weight with the numbers of one stored array in another order or shape.

    Attributes:
        name: of the weight; origin: of the stored array.
        moves: from the stored array to the weight.
    """

    name: str
    origin: str
    moves: tuple[Move, ...]

    def members(self, axis: int, positions: Ints) -> list[Member]:
        """Return the stored array that keeps these positions; the weight itself if they lie on no axis of it."""
        stays = np.zeros(self.moves[-1].after[axis], dtype=np.int64)
        stays[positions] = 1
        mark = Mark((axis,), stays)
        for move in reversed(self.moves):
            if move.order is None:
                mark = reshaped(mark, move.after, move.before)
            else:
                mark = mark.moved([move.order[a] for a in mark.axes])
        for place, stored in enumerate(mark.axes):
            line = np.moveaxis(mark.labels, place, 0).reshape(mark.labels.shape[place], -1)
            if (line == line[:, :1]).all():
                return [Member(self.origin, stored, np.flatnonzero(line[:, 0]))]
        return [Member(self.name, axis, positions)]


def freeze_undeclared(flow: Flow, model: ir.Model) -> None:
    """Freeze channels whose consumer has a computed weight with a shape that nothing in the file tells.

    The file alone does not tell which positions of such a weight belong to which channel.
    """
    names = {use.value for use in flow.uses if use.role == "consumer"}
    missing = _undeclared(model, flow.facts, names - laid_out(model, flow.facts, names).keys())
    for use in flow.uses:
        if use.role == "consumer" and use.value in missing:
            reason = UNKNOWN.format(use.value)
            flow.labels.freeze(use.mark.labels.ravel(), Refusal(value=use.value, node=use.node, op="", reason=reason))


def laid_out(model: ir.Model, facts: Facts, names: Iterable[str]) -> dict[str, LaidOut]:
    """Return those weights that are one stored array, which nothing else reads, laid out anew.

    Args:
        model: the graph.
        facts: shapes of its tensors.
        names: of weights.
    """
    computed = set(names) - facts.stored.keys() - set(model.graph.initializers)
    found: dict[str, LaidOut] = {}
    for node in model.graph if computed else ():
        if key(node) not in computed:
            continue
        value, moves = node.outputs[0], list[Move]()
        maker: ir.Node | None = node
        while maker is not None and maker.op_type in LAYOUTS and len(given(maker, 0).uses()) == 1:
            moves.append(_move(maker, facts))
            value = given(maker, 0)
            maker = value.producer()
        if moves and maker is None and value.const_value is not None:
            found[key(node)] = LaidOut(key(node), value.name or "", tuple(moves[::-1]))
    return found


def _move(node: ir.Node, facts: Facts) -> Move:
    before, after = facts.shapes[name_of(node, 0)], facts.shapes[key(node)]
    turned = node.op_type == "Transpose"
    return Move(before, after, integers(node, "perm", range(len(before))[::-1]) if turned else None)


def _undeclared(model: ir.Model, facts: Facts, names: set[str]) -> set[str]:
    """Return the names of computed weights whose shape ONNX shape inference cannot find."""
    plain = set(model.graph.initializers) | {key(n) for n in model.graph if n.op_type == "Constant"}
    computed = names - plain - facts.stored.keys()
    known = _shapes(model, computed) if computed else {}
    return {name for name in computed if known.get(name) != facts.shapes[name]}


def _shapes(model: ir.Model, names: set[str]) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes that ONNX shape inference finds for computed values."""
    return {
        info.name: tuple(d.dim_value for d in info.type.tensor_type.shape.dim)
        for info in inferred(model)
        if info.name in names
    }


def inferred(model: ir.Model) -> Sequence[onnx.ValueInfoProto]:
    """Return the value infos that ONNX shape inference finds; empty if it fails on an operator."""
    try:
        proto = onnx.shape_inference.infer_shapes(without_weights(model))
    except Exception:  # noqa: BLE001  it raises many exception types
        return ()
    found: Sequence[onnx.ValueInfoProto] = proto.graph.value_info
    return found


def without_weights(model: ir.Model) -> onnx.ModelProto:
    """Return the graph with its large weights declared as inputs: only small tensors can affect shapes."""
    graph = onnx.GraphProto(name="shapes")
    graph.node.extend(ir.to_proto(node) for node in model.graph if not is_choice(node))
    for value in model.graph.inputs:
        if value.name not in model.graph.initializers:
            graph.input.append(ir.to_proto(value))
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.size <= SMALL:
            graph.initializer.extend([] if tensor is None else [ir.to_proto(tensor)])
        else:
            shape = list(tensor.shape.numpy())
            graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.dtype.value, shape))
    recorded = (
        v for node in model.graph for v in node.outputs if v.name and v.type is not None and v.shape is not None
    )
    graph.value_info.extend(ir.to_proto(value) for value in recorded)
    opsets = [onnx.helper.make_opsetid(d, v) for d, v in model.opset_imports.items()]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=max(model.ir_version, 4))
