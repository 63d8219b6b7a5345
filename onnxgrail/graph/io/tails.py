"""Cut nodes with non-tensor outputs, such as ZipMap, off a model, and put them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.graph.io.model_file import copy
from onnxgrail.graph.io.opaque import is_tensor
from onnxgrail.graph.stored.declared import inferred
from onnxgrail.graph.trace.facts import bodies


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tail:
    """Nodes that were cut off the end of a model.

    Attributes:
        nodes: the nodes, still part of their original model.
        outputs: names of all outputs of the original model, in order.
        opsets: domain -> opset version of the nodes.
    """

    nodes: tuple[ir.Node, ...]
    outputs: tuple[str, ...]
    opsets: dict[str, int]


def cut(model: ir.Model) -> tuple[ir.Model, Tail]:
    """Return a model whose outputs are tensors, and the nodes that were cut off.

    The inputs of the cut nodes become outputs.  A node stays if other nodes read it, if it has bodies or several
    outputs, or if it reads graph inputs or initializers.
    """
    ends = [v for v in model.graph.outputs if not is_tensor(v) and _is_end(v)]
    nodes = tuple(node for v in ends if (node := v.producer()) is not None)
    outputs = tuple(v.name or "" for v in model.graph.outputs)
    tail = Tail(nodes=nodes, outputs=outputs, opsets={n.domain: model.opset_imports[n.domain] for n in nodes})
    if not nodes:
        return model, tail
    core = copy(model)
    gone = {v.name for v in ends}
    reads = {v.name: v for node in core.graph if node.outputs[0].name in gone for v in node.inputs if v is not None}
    _declare([v for v in reads.values() if v.type is None], model)
    core.graph.remove([node for node in core.graph if node.outputs[0].name in gone])
    stay = {v.name: v for v in core.graph.outputs if v.name not in gone}
    core.graph.outputs.clear()
    core.graph.outputs.extend((stay | reads).values())
    return core, tail


def _declare(values: Sequence[ir.Value], model: ir.Model) -> None:
    """Set the types of values from shape inference: outputs must have one."""
    if not values:
        return
    known = {info.name: info.type.tensor_type.elem_type for info in inferred(model)}
    for value in values:
        kind = known.get(value.name or "")
        if kind:
            value.type = ir.TensorType(ir.DataType(kind))


def joined(core: ir.Model, tail: Tail) -> ir.Model:
    """Append the nodes that were cut off, in place, and return the model."""
    there = {v.name: v for v in core.graph.outputs}
    for node in tail.nodes:
        inputs = [None if v is None else there[v.name] for v in node.inputs]
        again = ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), num_outputs=1, name=node.name)
        again.metadata_props.update(node.metadata_props)
        made, old = again.outputs[0], node.outputs[0]
        made.name, made.type, made.shape = old.name, old.type, old.shape
        made.meta.update(old.meta)
        core.graph.append(again)
        core.opset_imports.setdefault(node.domain, tail.opsets[node.domain])
        there[made.name] = made
    if tail.nodes:
        core.graph.outputs.clear()
        core.graph.outputs.extend(there[name] for name in tail.outputs)
    return core


def _is_end(value: ir.Value) -> bool:
    node = value.producer()
    if node is None or value.uses() or len(node.outputs) > 1 or bodies(node):
        return False
    return all(v is None or v.producer() is not None for v in node.inputs)
