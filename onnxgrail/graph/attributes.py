"""A node's attributes as plain numbers, with the default that the operator gives a missing one."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir


def integer(node: ir.Node, name: str, default: int = 0) -> int:
    """An integer attribute."""
    found = node.attributes.get(name)
    return default if found is None else found.as_int()


def integers(node: ir.Node, name: str, default: Iterable[int] = ()) -> tuple[int, ...]:
    """An attribute of several integers."""
    found = node.attributes.get(name)
    return tuple(default) if found is None else tuple(found.as_ints())


def number(node: ir.Node, name: str, default: float = 0.0) -> float:
    """An attribute of one number, whole or not."""
    found = node.attributes.get(name)
    return default if found is None else float(found.value)
