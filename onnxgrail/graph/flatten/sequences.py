"""Replace sequences that only hold the pieces of a split, so that channels can be followed through the pieces.

Unoptimized exports write `chunk` and `split` as `SplitToSequence`, read by one `SequenceAt` per piece.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Ints
from onnxgrail.graph.attributes import given, input_of, integer
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.assign import sweep


def unpack(model: ir.Model) -> None:
    """Replace every `SplitToSequence` whose pieces are read at constant positions by a `Split`, in place."""
    version = model.opset_imports.get("", 0)
    for node in list(model.graph):
        if node.op_type == "SplitToSequence" and not node.domain:
            sizes = _sizes(node)
            readers = _readers(model.graph, node, len(sizes)) if sizes is not None else None
            if sizes is not None and readers is not None:
                _replace(model.graph, node, sizes, readers, version)


def _sizes(node: ir.Node) -> Ints | None:
    """Return the sizes of the pieces; None if they are not known before the model runs."""
    source, split = node.inputs[0], input_of(node, 1)
    known = _value(split)
    if source is None or known is None:
        return None
    if known.ndim:
        return known.astype(np.int64)
    whole = source.shape[integer(node, "axis")] if source.shape is not None else None
    size = int(known)
    if not isinstance(whole, int) or whole < 1 or size < 1:
        return None
    return np.array([min(size, whole - start) for start in range(0, whole, size)], dtype=np.int64)


def _readers(graph: ir.Graph, node: ir.Node, count: int) -> list[tuple[int, ir.Node]] | None:
    """Return the nodes that read a piece, with its position in the sequence; None if there are other readers."""
    sequence = node.outputs[0]
    if sequence.is_graph_output():
        return None
    found = []
    for reader, operand in sequence.uses():
        place = _value(input_of(reader, 1))
        if reader.op_type != "SequenceAt" or reader.graph is not graph or operand or place is None:
            return None
        at = int(place.ravel()[0])
        if not -count <= at < count:
            return None
        found.append((at % count, reader))
    return found


def _value(value: ir.Value | None) -> Ints | None:
    """Return the integers of an initializer or a Constant node; None for other values."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else np.asarray(tensor.numpy())


def _replace(graph: ir.Graph, node: ir.Node, sizes: Ints, readers: list[tuple[int, ir.Node]], version: int) -> None:
    attributes: list[ir.Attr] = [node.attributes["axis"]] if "axis" in node.attributes else []
    inputs = [given(node, 0)]
    name = node.outputs[0].name or "split"
    if version < 13:
        attributes.append(ir.AttrInt64s("split", sizes.tolist()))
    else:
        inputs.append(constant(graph, sizes, f"{name}/sizes"))
    split = ir.Node("", "Split", inputs, attributes, num_outputs=len(sizes), name=node.name)
    split.metadata_props.update(node.metadata_props)
    for position, piece in enumerate(split.outputs):
        piece.name = f"{name}/{position}"
    operands = {v for n in (node, *(reader for _, reader in readers)) for v in n.inputs[1:] if v is not None}
    graph.insert_before(node, split)
    taken: set[int] = set()
    for at, reader in readers:
        piece = split.outputs[at]
        if at in taken:
            copy = ir.Node("", "Identity", [piece], num_outputs=1, name=reader.name)
            ir.convenience.replace_nodes_and_values(graph, reader, [reader], [copy], reader.outputs, copy.outputs)
        else:
            ir.convenience.replace_nodes_and_values(graph, reader, [reader], [], reader.outputs, [piece])
        taken.add(at)
    graph.remove(node, safe=True)
    sweep(graph, operands)
