"""Tensors with the same number at every position, such as the zero state of a recurrent cell.

They have no channels of their own.  Each reader gathers as many positions as it needs, so such a tensor does not tie
its readers to each other.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Bools, Ints
from onnxgrail.graph.attributes import integer, names_of
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.trace.facts import Facts
from onnxgrail.graph.trace.flow import Site

COPIES = frozenset(
    {"Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Expand", "Tile", "Neg"}
)


def is_filled(site: Site, operand: int) -> bool:
    """Return True if an operand without labels is filled with one number, in a computed shape."""
    return holds_one(site.node.inputs[operand], site.flow.facts, site.flow.marks)


def holds_one(value: ir.Value | None, facts: Facts, marks: Container[str] = ()) -> bool:
    """Return True if a tensor is filled with one number and computed from no tensor that is marked."""
    while value is not None and value.name not in facts.constants and value.name not in marks:
        node = value.producer()
        if node is None or node.domain:
            return False
        if node.op_type == "ConstantOfShape":
            return True
        if node.op_type not in COPIES:
            return False
        value = node.inputs[0]
    (name,) = names_of([value])
    return name in facts.constants and math.prod(facts.shapes[name]) == 1


def pick(cut: Cut, operand: int, lost: Mapping[int, Bools]) -> None:
    """Gather, per axis, the kept positions from an operand of full width; readers that keep the same share them."""
    for axis, stays in lost.items():
        value, kept = cut.operand(operand), np.flatnonzero(stays)
        known = next((node.outputs[0] for node in value.consumers() if _picks(node, value, axis, kept)), None)
        if known is not None:
            cut.node.replace_input_with(operand, known)
            continue
        along = [ir.AttrInt64("axis", axis)]
        cut.compute_operand(operand, "Gather", [value, kept], f"picked{operand}_{axis}", along)


def _picks(node: ir.Node, value: ir.Value, axis: int, kept: Ints) -> bool:
    """Return True if a node gathers these positions of a value."""
    if node.op_type != "Gather" or node.inputs[0] is not value or integer(node, "axis") != axis:
        return False
    index = node.inputs[1].const_value if node.inputs[1] is not None else None
    return index is not None and np.array_equal(index.numpy(), kept)
