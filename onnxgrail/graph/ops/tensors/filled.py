"""Tensors with the same number at every position, such as the zero state of a recurrent cell.

They have no channels of their own.  Each reader gathers as many positions as it needs, so such a tensor does not tie
its readers to each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Bools
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.trace.flow import Site

COPIES = frozenset(
    {"Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Expand", "Tile", "Neg"}
)


def is_filled(site: Site, operand: int) -> bool:
    """Return True if an operand without labels is filled with one number, in a computed shape."""
    value = site.node.inputs[operand]
    facts = site.flow.facts
    while value is not None and value.name not in facts.constants and value.name not in site.flow.marks:
        node = value.producer()
        if node is None or node.domain:
            return False
        if node.op_type == "ConstantOfShape":
            return True
        if node.op_type not in COPIES:
            return False
        value = node.inputs[0]
    name = value.name or "" if value is not None else ""
    return name in facts.constants and math.prod(facts.shapes[name]) == 1


def pick(cut: Cut, operand: int, lost: Mapping[int, Bools]) -> None:
    """Gather, per axis, the kept positions from an operand of full width."""
    for axis, stays in lost.items():
        value = cut.node.inputs[operand]
        assert value is not None
        along = [ir.AttrInt64("axis", axis)]
        cut.compute_operand(operand, "Gather", [value, np.flatnonzero(stays)], f"picked{operand}_{axis}", along)
