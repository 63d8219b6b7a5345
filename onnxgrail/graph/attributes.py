"""A node's attributes as plain numbers, with the default that the operator gives a missing one.

One of another type counts as missing: it is read before the runtime has refused the node.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

NUMBERS = (ir.AttributeType.INT, ir.AttributeType.FLOAT)


def integer(node: ir.Node, name: str, default: int = 0) -> int:
    """An integer attribute."""
    found = node.attributes.get(name)
    return default if found is None or found.type != ir.AttributeType.INT else found.as_int()


def integers(node: ir.Node, name: str, default: Iterable[int] = ()) -> tuple[int, ...]:
    """An attribute of several integers."""
    found = node.attributes.get(name)
    return tuple(default) if found is None or found.type != ir.AttributeType.INTS else tuple(found.as_ints())


def number(node: ir.Node, name: str, default: float = 0.0) -> float:
    """An attribute of one number, whole or not."""
    found = node.attributes.get(name)
    return default if found is None or found.type not in NUMBERS else float(found.value)


def text(node: ir.Node, name: str, default: str = "") -> str:
    """An attribute of text."""
    found = node.attributes.get(name)
    return default if found is None or found.type != ir.AttributeType.STRING else found.as_string()
