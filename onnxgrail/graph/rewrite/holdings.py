"""Decide and count how the file stores every constant that loses positions.

A constant may be computed from smaller ones, several operands may be cut from the same constant in different ways, and
numbers without readers are removed.  So working arrays that are made of the same stored numbers are counted together,
and no copy is stored that is larger than the numbers it is made of.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxgrail.graph.cost.counting import READERS, is_weight
from onnxgrail.graph.io.opset import opset_of
from onnxgrail.graph.stored.spread import spread_of
from onnxgrail.graph.trace.facts import Facts, captures, constant_of, half_of, key
from onnxgrail.graph.trace.sizes import SOURCES
from onnxgrail.graph.trace.survey import Form, Holding, Operand, Source

Operands = Mapping[tuple[str, int], Operand]
EXPANDS = 8  # opset
LITTLE = 64  # bytes; always allowed for a constant
INDEX = 8  # bytes per position that a Gather node picks


@dataclass(frozen=True, slots=True, eq=False)
class _Leaf:
    """Stored numbers, before their readers are known."""

    value: ir.Value
    numbers: int
    bytes: int


def holdings_of(model: ir.Model, facts: Facts, operands: Operands, fitted: Iterable[str]) -> tuple[Holding, ...]:
    """Find how the file stores every operand.

    Args:
        model: the graph.
        facts: shapes and values of its tensors.
        operands: the constants that lose positions.
        fitted: working arrays that may get new numbers, which are then stored in full.
    """
    finder = _Finder(model, facts, operands)
    leaves = {param: _leaves(values, facts) for param, values in finder.values.items()}
    held = {id(leaf.value): leaf for some in leaves.values() for leaf in some}
    groups = _joined({param: [id(leaf.value) for leaf in some] for param, some in leaves.items()})
    fixed = set(fitted)
    found = []
    for params, places in groups:
        sources = [finder.source(held[place]) for place in places]
        forms = [finder.form(param, sum(leaf.bytes for leaf in leaves[param])) for param in params]
        found.append(Holding(tuple(_shared(forms, sources, fixed)), tuple(sources)))
    return tuple(found)


def is_compact(value: ir.Value, facts: Facts) -> bool:
    """Return True if a constant is computed from fewer bytes than its size."""
    whole = facts.bytes_of(value.name or "")
    return value.producer() is not None and sum(leaf.bytes for leaf in _leaves([value], facts)) < whole


def _shared(forms: list[Form], sources: list[Source], fitted: set[str]) -> list[Form]:
    """Replace large copies by Gather nodes if copies for several readers take more space than their sources."""
    room = sum(source.bytes for source in sources) + LITTLE
    if len(forms) < 2 or sum(_bytes(form) for form in forms if not form.picked) <= room:
        return forms
    return [replace(form, picked=form.picked or _picks(form, fitted)) for form in forms]


def _picks(form: Form, fitted: set[str]) -> bool:
    """Return True if a Gather node takes less than half the space of a copy."""
    return form.stored is None and form.operand.param not in fitted and 2 * _index(form) < _bytes(form)


def _bytes(form: Form) -> int:
    if form.stored is not None:
        return form.stored.nbytes(form.shape)
    spread = form.spread
    sizes = form.shape if spread is None else [len(dim.units) for dim in spread.dims if not dim.repeated]
    return math.prod(sizes) * form.bits // 8


def _index(form: Form) -> int:
    return INDEX * sum(len(units) for units in form.operand.units.values())


def _joined(leaves: Mapping[str, list[int]]) -> list[tuple[list[str], list[int]]]:
    """Group working arrays that share leaves: return the names and the leaves of each group."""
    group: dict[str, int] = {}
    first: dict[int, str] = {}
    members: dict[int, list[str]] = {}
    for number, (param, some) in enumerate(leaves.items()):
        group[param], members[number] = number, [param]
        for leaf in some:
            other = group[first.setdefault(leaf, param)]
            mine = group[param]
            if other != mine:
                small, large = sorted((mine, other), key=lambda n: len(members[n]))
                group.update(dict.fromkeys(members[small], large))
                members[large] += members.pop(small)
    return [(params, list(dict.fromkeys(leaf for p in params for leaf in leaves[p]))) for params in members.values()]


class _Finder:
    """The state shared by all searches in one graph."""

    def __init__(self, model: ir.Model, facts: Facts, operands: Operands) -> None:
        self.model, self.facts, self.operands = model, facts, operands
        self.captured = {name for node in model.graph for name in captures(node)}
        self.values: dict[str, dict[ir.Value, None]] = defaultdict(dict)
        self.first: dict[str, Operand] = {}
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            for position, value in enumerate(node.inputs):
                operand = operands.get((key(node), position))
                if operand is not None and value is not None:
                    self.values[operand.param][value] = None
                    self.first.setdefault(operand.param, operand)
        self.direct = {value for values in self.values.values() for value in values}

    def source(self, leaf: _Leaf) -> Source:
        """Return a leaf with its readers."""
        readers, fixed = self._readers(leaf.value)
        return Source(leaf.value.name or "", leaf.numbers, leaf.bytes, readers, fixed)

    def _readers(self, value: ir.Value) -> tuple[frozenset[str], bool]:
        """Return the working arrays of the operands that a constant reaches, and True if anything else reads it."""
        queue, seen = [value], {value}
        found: set[str] = set()
        fixed = False
        while queue:
            now = queue.pop()
            uses = list(now.uses())
            fixed |= now.is_graph_output() or now.name in self.captured or not (uses or _beside(now))
            for use in uses:
                operand = self.operands.get((key(use.node), use.idx))
                made = [v for v in use.node.outputs if v.name]
                if operand is not None:
                    found.add(operand.param)
                elif not all(v.name in self.facts.constants for v in made):
                    fixed = True
                elif not (use.node.op_type in SOURCES and now in self.direct):  # sizes become constants
                    queue += [v for v in made if v not in seen]
                    seen.update(made)
        return frozenset(found), fixed

    def form(self, param: str, given: int) -> Form:
        """Return how a working array is stored.

        Args:
            param: the working array.
            given: bytes of the stored numbers that it is made of.
        """
        operand = self.first[param]
        name = operand.value
        shape, stored = self.facts.shapes[name], self.facts.stored.get(name)
        value = next(iter(self.values[param]))
        node = value.producer()
        filled = node is not None and node.op_type == "ConstantOfShape"
        half = half_of(value)
        bits = 0 if filled else 8 * self.facts.dtypes[half.name or "" if half is not None else name].itemsize
        form = Form(operand, shape, None, picked=False, counted=_counts(value, self.facts), bits=bits, stored=stored)
        if stored is not None or node is None or filled or _bytes(form) <= given:
            return form
        array = constant_of(None, name, self.facts) if opset_of(self.model) >= EXPANDS else None
        spread = spread_of(array, operand.units) if array is not None and array.size else None
        spread_form = replace(form, spread=spread)
        fits = spread is not None and _bytes(spread_form) <= given + LITTLE
        return spread_form if fits else replace(form, picked=True)


def _leaves(values: Iterable[ir.Value], facts: Facts) -> list[_Leaf]:
    """Return the stored numbers that constants are computed from."""
    found: dict[ir.Value, _Leaf] = {}
    queue, seen = list(values), set(values)
    while queue:
        value = queue.pop()
        leaf = _leaf(value, facts)
        if leaf is not None:
            found[value] = leaf
            continue
        node = value.producer()
        above = [v for v in node.inputs if v is not None and v not in seen] if node is not None else []
        seen.update(above)
        queue += above
    return list(found.values())


def _leaf(value: ir.Value, facts: Facts) -> _Leaf | None:
    """Return the numbers of a stored constant; None if the constant is computed."""
    name, node = value.name or "", value.producer()
    stored = facts.stored.get(name)
    if stored is not None:
        return _Leaf(value, math.prod(stored.shape), stored.nbytes(stored.shape))
    if node is None:
        tensor = value.const_value
        count = 0 if tensor is None else int(tensor.size)
        return _Leaf(value, count * _counts(value, facts), 0 if tensor is None else tensor.nbytes)
    if node.op_type not in ("Constant", "ConstantOfShape"):
        return None
    count = math.prod(facts.shapes.get(name, ()))
    if node.op_type == "ConstantOfShape":
        return _Leaf(value, count * _counts(value, facts), 0)
    size = count * facts.dtypes[name].itemsize if name in facts.dtypes else 0
    return _Leaf(value, count * _counts(value, facts) * (count > 1), size)


def _beside(value: ir.Value) -> bool:
    """Return True if another output of the node is read: new statistics beside a normalized weight stay unread."""
    node = value.producer()
    return node is not None and any(other.uses() for other in node.outputs)


def _counts(value: ir.Value, facts: Facts) -> bool:
    """Return True if the numbers count as parameters; filled numbers do if a layer reads them."""
    node = value.producer()
    if node is not None and node.op_type == "ConstantOfShape":
        return any(use.node.op_type in READERS and use.idx > 0 for use in value.uses())
    dtype = facts.dtypes.get(value.name or "", np.dtype(object))
    return dtype.kind != "O" and is_weight(ir.DataType.from_numpy(dtype))
