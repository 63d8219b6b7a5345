"""Input compensation: queries, keys, softmax and values as nodes, at a graph's input or after its embedding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array
from onnxgrail.errors import ModelError
from onnxgrail.graph.attributes import given, moved_from
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.unique import free_name, names_kept
from onnxgrail.graph.trace.facts import Facts

Form = Literal["token", "image", "frame"]
FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16})
INTEGERS = frozenset({ir.DataType.INT64, ir.DataType.INT32})
LOOKUPS = frozenset({"Gather", "GatherBlockQuantized", "EmbedLayerNormalization"})
PASSING = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})  # from ids to lookup
CHANNELS = (1, 2, 3, 4)  # channel counts of an image
GRID = 4  # cells along each side of an image's query
SIDES = ("top", "bottom", "left", "right")
BORDER = 30 / 224  # width of a frame as a fraction of the shorter side
PADS_AS_INPUT = 11  # opset
LEAST = 4  # whole images of a smaller rank give way to a frame


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Entry:
    """The tensor to which a compensation is added.

    Attributes:
        value: name of the tensor: an input of the graph, or the output of its embedding.
        dtype: its dtype; size: its shape without the batch axis for images, else its last axis.
        rank: number of axes; image: True for (N, C, H, W).
    """

    value: str
    dtype: ir.DataType
    size: tuple[int, ...]
    rank: int
    image: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The size of a compensation pool.

    Attributes:
        form: `token` adds to every position depending on its vector, `image` to all pixels, `frame` to border pixels,
            with separate keys per side.
        rank: compensations in the pool (r).
        query: d_e, size of a query; value: size of a compensation, over all sides; sides: number of key sets.
    """

    form: Form
    rank: int
    query: int
    value: int
    sides: int = 1

    @property
    def parameters(self) -> int:
        """Return the number of elements of all keys and values: r (d_v + sides d_e)."""
        return self.rank * (self.value + self.sides * self.query)

    def macs(self, positions: int = 1) -> int:
        """Return the multiply-accumulates per sample with this many positions."""
        return positions * self.parameters


def entry_of(model: ir.Model, facts: Facts) -> Entry:
    """Return the entry: after the embedding of token ids, else the largest image, else another float input.

    Raises:
        ModelError: there is no such tensor.
    """
    for node in model.graph:
        value = _floats(node.outputs[0], facts) if node.op_type in LOOKUPS and _ids(node) else None
        if value is not None and len(_shape(value, facts)) > 1:
            return _entry(value, facts, image=False)
    open_ = [v for v in model.graph.inputs if v.name not in model.graph.initializers and v.dtype in FLOATS]
    images = [v for v in open_ if _is_image(v)]
    if images:
        return _entry(max(images, key=lambda v: math.prod(_fixed(v))), facts, image=True)
    vectors = [v for v in open_ if len(_shape(v, facts)) in (2, 3) and isinstance(_dims(v)[-1], int)]
    if vectors:
        return _entry(max(vectors, key=lambda v: _shape(v, facts)[-1]), facts, image=False)
    raise ModelError(
        "no place for input compensation: no image of fixed size (N, C, H, W), no lookup of token ids, no vectors",
        hint="Give the image input a fixed height and width, or leave out ic",
    )


def plan_of(entry: Entry, opset: int, *, limit: int | None, rank: int) -> Plan:
    """Return the largest pool within a parameter limit, up to a rank; a frame if whole images have too many pixels.

    Args:
        entry: the tensor.
        opset: of the model.
        limit: number of parameters; None for no limit.
        rank: the largest number of compensations.

    Raises:
        ModelError: not even one compensation fits.
    """
    query = query_size(entry)
    plans = [Plan(form="image" if entry.image else "token", rank=1, query=query, value=math.prod(entry.size))]
    if limit is None:
        return dataclasses.replace(plans[0], rank=rank)
    if entry.image and opset >= PADS_AS_INPUT:
        pixels = sum(map(math.prod, strips(entry, border_of(entry))))
        plans.append(Plan(form="frame", rank=1, query=query, value=pixels, sides=len(SIDES)))
    for plan, low in zip(plans, [LEAST if len(plans) > 1 else 1, 1], strict=False):
        found = min(rank, limit // plan.parameters)
        if found >= min(low, rank):
            return dataclasses.replace(plan, rank=found)
    raise ModelError(
        f"one compensation of {entry.value!r} has {min(p.parameters for p in plans)} numbers, and {limit} are allowed",
        hint="The model is too small for a pool at its input",
    )


def query_size(entry: Entry) -> int:
    """Return d_e: the size of a coarse copy of an image, or of the whole vector."""
    if not entry.image:
        return entry.size[-1]
    channels, *sides = entry.size
    return channels * math.prod((side - _cell(side)) // _cell(side) + 1 for side in sides)


def border_of(entry: Entry) -> int:
    """Return the width of a frame around an image in pixels."""
    return max(1, round(BORDER * min(entry.size[1:])))


def insert(model: ir.Model, entry: Entry, plan: Plan, keys: Sequence[Array], values: Sequence[Array]) -> list[str]:
    """Write a pool into a graph; return the names of its keys and values.

    Args:
        model: changed in place.
        entry: the tensor to compensate.
        plan: the size of the pool.
        keys: per side (d_e, r), already divided by sqrt(d_e).
        values: per side (r, numbers of that side).
    """
    graph = model.graph
    with names_kept(graph):
        value = next(v for v in (*graph.inputs, *(o for n in graph for o in n.outputs)) if v.name == entry.value)
        uses = [(use.node, use.idx) for use in value.uses()]
        made = _Maker(graph, entry)
        query, sides = made.query(value), SIDES if plan.form == "frame" else ("",)
        parts = [made.attend(query, k, v, side) for k, v, side in zip(keys, values, sides, strict=True)]
        shift = made.image(parts[0]) if plan.form == "image" else parts[0]
        shift = made.frame(parts, border_of(entry)) if plan.form == "frame" else shift
        total = made.node("Add", [value, shift], "compensated", value.dtype or entry.dtype)
        total.shape = value.shape
        for node, position in uses:
            node.replace_input_with(position, total)
        maker = value.producer()
        if maker is None:
            graph.insert_before(next(iter(graph)), made.nodes)
        else:
            graph.insert_after(maker, made.nodes)
    return made.weights


def strips(entry: Entry, border: int) -> list[tuple[int, int, int]]:
    """Return the shapes (C, h, w) of the sides of a frame: top, bottom, left, right."""
    channels, height, width = entry.size
    inner = height - 2 * border
    return [(channels, border, width)] * 2 + [(channels, inner, border)] * 2


class _Maker:
    """A list of new nodes that are not yet in the graph."""

    def __init__(self, graph: ir.Graph, entry: Entry) -> None:
        self.graph, self.entry = graph, entry
        self.nodes: list[ir.Node] = []
        self.weights: list[str] = []

    def node(self, op: str, inputs: Sequence[ir.Value | None], hint: str, dtype: ir.DataType, **given: Any) -> ir.Value:
        name = free_name(self.graph, f"ic/{hint}")
        node = ir.node(op, list(inputs), attributes=given, num_outputs=1, name=name)
        node.outputs[0].name, node.outputs[0].dtype = name, dtype
        self.nodes.append(node)
        return node.outputs[0]

    def query(self, value: ir.Value) -> ir.Value:
        """Return the query: flattened cell averages of an image; other tensors unchanged."""
        if not self.entry.image:
            return value
        cells = [_cell(side) for side in self.entry.size[1:]]
        pooled = self.node("AveragePool", [value], "cells", self.entry.dtype, kernel_shape=cells, strides=cells)
        return self.node("Flatten", [pooled], "query", self.entry.dtype, axis=1)

    def attend(self, query: ir.Value, keys: Array, values: Array, side: str) -> ir.Value:
        """Add nodes for softmax(q K) V."""
        end = f"/{side}" if side else ""
        held = [self._weight(a, f"{n}{end}") for a, n in ((keys, "keys"), (values, "values"))]
        axis = 1 if self.entry.image else self.entry.rank - 1
        found = self.node("MatMul", [query, held[0]], f"scores{end}", self.entry.dtype)
        found = self.node("Softmax", [found], f"weights{end}", self.entry.dtype, axis=axis)
        return self.node("MatMul", [found, held[1]], f"sum{end}", self.entry.dtype)

    def image(self, flat: ir.Value) -> ir.Value:
        return self._shaped(flat, self.entry.size, "image")

    def frame(self, parts: Sequence[ir.Value], border: int) -> ir.Value:
        """Add nodes that join the strips around zeros."""
        shapes = strips(self.entry, border)
        top, bottom, left, right = (self._shaped(p, s, side) for p, s, side in zip(parts, shapes, SIDES, strict=True))
        gap = self.entry.size[2] - 2 * border
        pads = constant(self.graph, np.array([0, 0, 0, 0, 0, 0, 0, gap], dtype=np.int64), "ic/gap")
        wide = self.node("Pad", [left, pads], "padded", self.entry.dtype, mode="constant")
        middle = self.node("Concat", [wide, right], "middle", self.entry.dtype, axis=3)
        return self.node("Concat", [top, middle, bottom], "frame", self.entry.dtype, axis=2)

    def _shaped(self, flat: ir.Value, size: Sequence[int], hint: str) -> ir.Value:
        shape = constant(self.graph, np.array([-1, *size], dtype=np.int64), "ic/shape")
        return self.node("Reshape", [flat, shape], f"{hint}/shaped", self.entry.dtype)

    def _weight(self, array: Array, hint: str) -> ir.Value:
        value = constant(self.graph, array.astype(self.entry.dtype.numpy()), f"ic/{hint}")
        self.weights.append(value.name or "")
        return value


def _entry(value: ir.Value, facts: Facts, *, image: bool) -> Entry:
    name, shape = value.name or "", _shape(value, facts)
    size = _fixed(value) if image else shape[-1:]
    return Entry(value=name, dtype=_type(value, facts), size=size, rank=len(shape), image=image)


def _ids(node: ir.Node) -> bool:
    """Return True if the lookup index is an integer input of the graph, on the first axis of the table."""
    place = 0 if node.op_type == "EmbedLayerNormalization" else 1
    value = moved_from(given(node, place), PASSING)
    axis = node.attributes.get("axis")
    first = node.op_type != "Gather" or axis is None or axis.as_int() == 0
    return value.is_graph_input() and value.dtype in INTEGERS and first


def _is_image(value: ir.Value) -> bool:
    dims = _dims(value)
    return len(dims) == 4 and dims[1] in CHANNELS and all(isinstance(d, int) and d >= GRID for d in dims[2:])


def _fixed(value: ir.Value) -> tuple[int, ...]:
    return tuple(d for d in _dims(value)[1:] if isinstance(d, int))


def _dims(value: ir.Value) -> list[Any]:
    return [] if value.shape is None else list(value.shape)


def _shape(value: ir.Value, facts: Facts) -> tuple[int, ...]:
    return tuple(facts.shapes.get(value.name or "", ()))


def _floats(value: ir.Value, facts: Facts) -> ir.Value | None:
    """Return the float output of a lookup, for integer tables the DequantizeLinear's output; None if there is none."""
    for found in (value, *(u.node.outputs[0] for u in value.uses() if u.node.op_type == "DequantizeLinear")):
        if found.name in facts.dtypes and _type(found, facts) in FLOATS:
            return found
    return None


def _type(value: ir.Value, facts: Facts) -> ir.DataType:
    return ir.DataType.from_numpy(facts.dtypes[value.name or ""])


def _cell(side: int) -> int:
    return max(1, side // GRID)
