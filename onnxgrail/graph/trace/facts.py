"""Facts about a model from one run: concrete shapes, constants, and values of small integer tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Feed, Floats, Ints
from onnxgrail.graph.attributes import HALVES, LAYOUTS, given, input_of, integer, integers, name_of
from onnxgrail.graph.stored.integers import Stored

OWN, CHOICE = "onnxgrail", "If"  # domain and name of the in-memory operator that replaces an If with flattened branches
Branch = tuple[str, str]
"""Key of a choice node, and one of its branches: "then" or "else"."""

RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}
)


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """Shapes, dtypes and known values of tensors, by name.

    Attributes:
        shapes: concrete shape of every tensor under the probe feed.
        dtypes: numpy dtype of every tensor.
        values: arrays of values computed from constants alone, and of small integer tensors under the probe feed.
        constants: names of the values that depend on no graph input.
        varying: per tensor, the axes whose size depends on the input.
        other: a feed with other input sizes that the model accepts; None if there is none.
        stored: quantized weights; shapes and dtypes are those of the dequantized floats.
        grids: per ScatterND index, its positions along each axis: see `grid_of`.
        taken: branches that a feed executed; tensors of other branches are known only if constant.
        more: feeds besides the probe feed that are needed to take all of these branches.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, np.dtype]
    values: Mapping[str, Array]
    constants: frozenset[str]
    varying: Mapping[str, frozenset[int]]
    other: Feed | None = None
    stored: Mapping[str, Stored] = field(default_factory=dict)
    grids: Mapping[str, tuple[Ints, ...]] = field(default_factory=dict)
    taken: frozenset[Branch] = frozenset()
    more: tuple[Feed, ...] = ()

    def bytes_of(self, name: str) -> int:
        """Return the bytes of a tensor under the probe feed, 0 if it is not observed."""
        return math.prod(self.shapes[name]) * self.dtypes[name].itemsize if name in self.shapes else 0

    def has_floats(self, name: str) -> bool:
        """Return True for a float tensor; sequences, maps and optional values are not observed."""
        dtype = self.dtypes.get(name)
        return dtype is not None and dtype.kind in "fV"  # V is numpy's kind for bfloat16


def constants(model: ir.Model) -> frozenset[str]:
    """Return the names of values that depend on no graph input: initializers and values computed from them.

    Outputs of random nodes, nodes with bodies and choices between branches are left out.
    """
    known = set(model.graph.initializers)
    for node in model.graph:
        if node.op_type in RANDOM or is_choice(node) or bodies(node):
            continue
        inputs = node.inputs[:1] if node.op_type == "CastLike" else node.inputs  # only the type of the second is read
        if all(value is None or value.name in known for value in inputs):
            known.update(value.name for value in node.outputs if value.name)
    return frozenset(known)


def indices(model: ir.Model) -> frozenset[str]:
    """Return the names of the indices of all ScatterND nodes."""
    found = (node.inputs[1] for node in model.graph if node.op_type == "ScatterND")
    return frozenset(value.name for value in found if value is not None and value.name)


def grid_of(index: Array) -> tuple[Ints, ...]:
    """Return the positions of an index along each axis of its grid; empty if the index is not a grid.

    Args:
        index: (s_1, ..., s_r, r) positions in a tensor of r axes, as ScatterND reads them.

    Returns:
        For each axis a the s_a positions along it; empty for an axis whose positions depend on other axes too.
    """
    rank = index.shape[-1] if index.ndim else 0
    if not index.size or index.ndim != rank + 1:
        return ()
    lines = []
    for axis in range(rank):
        component = np.moveaxis(index[..., axis], axis, -1)
        line = component[(0,) * (rank - 1)]
        lines.append(line.astype(np.int64) if (component == line).all() else np.zeros(0, dtype=np.int64))
    return tuple(lines)


def half_of(value: ir.Value) -> ir.Value | None:
    """Return the weight in half precision that a cast to float32 makes a value of; None for any other value.

    Its numbers may be laid out anew before or after the cast.
    """
    node, casts = value.producer(), 0
    while node is not None and node.op_type in ("Cast", *LAYOUTS) and not node.domain:
        if node.op_type == "Cast":
            casts += 1 if integer(node, "to") == ir.DataType.FLOAT else 2
        value = given(node, 0)
        node = value.producer()
    tensor = value.const_value
    return value if casts == 1 and tensor is not None and tensor.dtype in HALVES else None


def constant_of(value: ir.Value | None, name: str, facts: Facts) -> Array | None:
    """Return the numbers of a constant: from its value, observed under the name, or from what is cast to it."""
    if value is not None and value.const_value is not None:
        return value.const_value.numpy()
    found = facts.values.get(name)
    half = half_of(value) if value is not None and found is None else None  # which no run has seen yet
    return found if half is None or half.const_value is None else half.const_value.numpy().astype(np.float32)


def scalar_of(value: ir.Value | None, facts: Facts) -> float | None:
    """Return a constant of one number; None for anything else."""
    if value is None or value.name not in facts.constants:
        return None
    array: Array | None = constant_of(value, value.name or "", facts)
    return float(array.ravel()[0]) if array is not None and array.size == 1 else None


def vector_of(node: ir.Node, operand: int, facts: Facts, width: int) -> Floats | None:
    """Return a constant operand with one number per position of the last axis; None for anything else."""
    value = input_of(node, operand)
    if value is None or value.name not in facts.constants or value.name in facts.stored:
        return None
    array = constant_of(value, value.name or "", facts)
    if array is None or array.size != width or array.shape[-1:] != (width,):
        return None
    return np.asarray(array, dtype=np.float64).ravel()


def held(value: ir.Value, facts: Facts) -> Array:
    """Return the numbers of a constant, stored or observed."""
    array = constant_of(value, value.name or "", facts)
    assert array is not None, f"{value.name} is no constant"
    return array


def bodies(node: ir.Node) -> list[ir.Graph]:
    """Return the graphs in a node's attributes (If branches, Loop bodies)."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found.extend(attribute.as_graphs())
    return found


def captures(node: ir.Node) -> set[str]:
    """Return the names of outer values that the bodies of a node read."""
    names: set[str] = set()
    for body in bodies(node):
        local = set(body.initializers) | {v.name for v in body.inputs if v.name}
        for inner in body:
            names |= {v.name for v in inner.inputs if v is not None and v.name} | captures(inner)
            local |= {v.name for v in inner.outputs if v.name}
        names |= {v.name for v in body.outputs if v.name}
        names -= local
    return names


def is_choice(node: ir.Node) -> bool:
    """Return True for a node that replaces an If with flattened branches."""
    return node.op_type == CHOICE and node.domain == OWN


def key(node: ir.Node) -> str:
    """Return a name for a node that is unique in its graph: its first named output."""
    return next((v.name for v in node.outputs if v.name), "")


def axes_of(node: ir.Node, facts: Facts) -> list[int]:
    """Return the axes that a node reduces, not negative; none if they are all, or not known."""
    told = facts.values.get(name_of(node, 1))
    axes = integers(node, "axes") if told is None else tuple(int(a) for a in told.ravel())
    return [axis % len(facts.shapes[name_of(node, 0)]) for axis in axes]
