"""Read names and attributes of ONNX nodes as plain Python values, with the operator's default for what is missing.

An attribute of the wrong type counts as missing: it is read before the runtime has refused the node.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

MICROSOFT = "com.microsoft"  # domain of the operators that ONNX Runtime adds
NUMBERS = (ir.AttributeType.INT, ir.AttributeType.FLOAT)


def names_of(values: Iterable[ir.Value | None]) -> list[str]:
    """Return the names of values, '' for those that are absent or have none."""
    return [(value.name or "") if value is not None else "" for value in values]


def name_of(node: ir.Node, operand: int) -> str:
    """Return the name of an input, '' if absent."""
    return names_of(node.inputs[operand : operand + 1])[0] if 0 <= operand < len(node.inputs) else ""


def integer(node: ir.Node, name: str, default: int = 0) -> int:
    """Return an integer attribute, or the default."""
    found = node.attributes.get(name)
    return default if found is None or found.type != ir.AttributeType.INT else found.as_int()


def integers(node: ir.Node, name: str, default: Iterable[int] = ()) -> tuple[int, ...]:
    """Return a list of integers attribute, or the default."""
    found = node.attributes.get(name)
    return tuple(default) if found is None or found.type != ir.AttributeType.INTS else tuple(found.as_ints())


def number(node: ir.Node, name: str, default: float = 0.0) -> float:
    """Return a numeric attribute (int or float) as a float, or the default."""
    found = node.attributes.get(name)
    return default if found is None or found.type not in NUMBERS else float(found.value)


def text(node: ir.Node, name: str, default: str = "") -> str:
    """Return a string attribute, or the default."""
    found = node.attributes.get(name)
    return default if found is None or found.type != ir.AttributeType.STRING else found.as_string()
