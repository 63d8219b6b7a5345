"""Find what has a free basis inside attention heads: queries and keys, and values with what reads them.

Channels are followed as a trace does, but for every head of its own. A basis is free if nothing but weights, biases and
operators that treat all channels alike lies between. Queries and keys that are rotated by position or divided by their
root mean square have no free basis: their channels are picked, those that are rotated together as one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.core import INNER, Floats, Ints, Kind, Probe, Refusal
from onnxgrail.graph.attention import makes_scores, reads_weights, scores_of
from onnxgrail.graph.attributes import integer, names_of
from onnxgrail.graph.ops.layers.inside import weighs
from onnxgrail.graph.products import axes_of, is_fused, is_product
from onnxgrail.graph.rotate.classes import groups_of, positions, spread, units_of
from onnxgrail.graph.rotate.norms import Norm, roots_of
from onnxgrail.graph.rotate.passing import is_zero
from onnxgrail.graph.trace.facts import Facts, constant_of, key
from onnxgrail.graph.trace.flow import Flow, Use
from onnxgrail.graph.trace.labels import Mark
from onnxgrail.graph.trace.tracer import flow_of

SHAPING = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Shape", "Size")
MOVES = frozenset((*SHAPING, "Identity", "Cast", "CastLike", "Neg", "Split", "Slice", "Concat", "Gather"))
LAYERS = frozenset(("MatMul", "Gemm", "Conv"))
FUSED = frozenset(("Attention", "MultiHeadAttention", "GroupQueryAttention", "PagedAttention", "QAttention"))
OTHERS = frozenset(("FusedMatMul", "TransposeMatMul", "Einsum"))
POSITIONS = "what it reads is rotated by position, normalized, cached, or computed by no weight, so its channels stay"
BENDS = "its result depends on the basis of channels inside heads"
CLAIMED = "several products read the same channels inside heads"
UNEVEN = "its heads share some of their channels, or differ in their number"
STORED = "its weight is shared, quantized or computed at run time, and takes no basis inside heads"
KERNEL = "a fused kernel reads heads of one size; channels inside of them stay"
QUERIES = "channels of queries and keys in a fused kernel stay"
OTHER = "channels inside heads are followed through matrix products only, so those that it multiplies stay"

REASONS = frozenset((POSITIONS, BENDS, CLAIMED, UNEVEN, STORED, KERNEL, QUERIES, OTHER))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """A constant operand that holds channels of heads along one axis.

    Attributes:
        node, operand: where it is read.
        axis: the axis.
        index: (groups, copies, channels) positions on the axis.
        inverse: it takes the inverse of the basis, transposed.
        source: tensor with the channels at the same positions, and its channel axis: what a weight reads, or computes.
    """

    node: ir.Node
    operand: int
    axis: int
    index: Ints
    inverse: bool
    source: tuple[str, int]

    @property
    def value(self) -> ir.Value:
        """Return the constant."""
        value = self.node.inputs[self.operand]
        assert value is not None
        return value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Inside:
    """Channels inside the heads of one attention; heads that share keys and values are one group with one basis.

    The channels between the two parts of a convolution are like those of a single head.

    Attributes:
        name: of the rotation.
        kind: `qk`, `vo` or `rank`.
        node: the product that reads the channels.
        groups, width: number of groups, and of channels in a head.
        parts: constants in the basis.
        units: (width,) unit of every channel, if units are picked instead: then the positions of parts are sorted by
            unit. None if the basis is free.
        tables: nodes with the operand that is a table of positions.
        norms: of queries and of keys, the normalizations that these pass.
        read: the operands of the product with their channel axes.
    """

    name: str
    kind: Kind
    node: ir.Node
    groups: int
    width: int
    parts: tuple[Part, ...]
    units: Ints | None = None
    tables: tuple[tuple[ir.Node, int], ...] = ()
    norms: tuple[tuple[Norm, ...], ...] = ()
    read: tuple[tuple[str, int], ...] = ()

    @property
    def same(self) -> Floats:
        """Return the bases that change nothing, or the order of the units as they are."""
        if self.units is not None:
            return np.unique(self.units).astype(np.float64)
        same = np.eye(self.width)
        return same if self.kind == "rank" else np.tile(same, (self.groups, 1, 1))

    @property
    def normed(self) -> list[bool]:
        """Return for queries and for keys if every head has a root mean square of its own."""
        return [any(norm.width == self.width for norm in side) for side in self.norms]

    @property
    def measured(self) -> list[Part]:
        """Return the parts with sources that tell the basis: what makes queries and keys last, what reads values."""
        if self.kind != "qk":
            return [part for part in self.parts if part.inverse]
        last = {part.inverse: part for part in self.parts}
        return [last[False], last[True]]

    @property
    def probes(self) -> list[Probe]:
        """Return probes of the channels of every head in the sources of the measured parts.

        If units are picked, probes of all queries and of all keys that the product reads follow.
        """
        heads = [(part.source, head) for part in self.measured for group in part.index for head in group]
        alone = self.units is not None
        if self.units is not None:
            heads += [(place, np.arange(len(self.units))) for place in self.read]
        return [Probe(value=v, axis=axis, index=head[:, None], pooled=False, alone=alone) for (v, axis), head in heads]


class _RefusedError(Exception):
    """Channels whose basis is not free; its argument is the refusal."""


def insides_of(model: ir.Model, facts: Facts, kinds: Iterable[Kind]) -> tuple[list[Inside], list[Refusal]]:
    """Return what has a free basis inside heads, and why other heads have none.

    Args:
        model: the graph; it is not changed.
        facts: shapes and values.
        kinds: with `qk` or `vo`, both are found, since heads that stay for one stay for the other.
    """
    if not set(INNER) & set(kinds):
        return [], []
    fused = [node for node in model.graph if node.op_type in FUSED]
    refusals = [_refusal(node, QUERIES if weighs(node) else KERNEL) for node in fused]
    others = [n for n in model.graph if n.op_type in OTHERS and not is_product(n) and not _reads_constants(n, facts)]
    refusals += [_refusal(node, OTHER) for node in others if makes_scores(node) or reads_weights(node)]
    if not any(weighs(n) or (is_product(n) and not _reads_constants(n, facts)) for n in model.graph):
        return [], refusals
    norms = roots_of(model, facts)
    normed = {key(node): "" for norm in norms for node in norm.nodes}
    normed |= {norm.result.name or "": norm.source.name or "" for norm in norms}
    finder = _Finder(model, flow_of(model, facts, inside=True, normed=normed), norms)
    found = []
    for node in model.graph:
        for kind in INNER:
            try:
                inside = finder.inside(node, kind)
            except _RefusedError as refused:
                refusals.append(refused.args[0])
            else:
                found += [inside] if inside is not None else []
    return found, refusals


def complete(found: Collection[Inside]) -> list[Inside]:
    """Return queries and keys, and values, of every attention in which both have a free basis."""
    products = {kind: {inside.node: inside for inside in found if inside.kind == kind} for kind in INNER}
    pairs = [(scores_of(node, products["qk"]), node) for node in products["vo"]]
    return [one for asked, node in pairs if asked is not None for one in (products["qk"][asked], products["vo"][node])]


def _is_bias(node: ir.Node, operand: int) -> bool:
    """Return True if a node adds an operand to channels."""
    places = {"Gemm": 2, "Conv": 2, "MultiHeadAttention": 3}
    return operand == places[node.op_type] if node.op_type in places else node.op_type in ("Add", "Sub")


def _reads_constants(node: ir.Node, facts: Facts) -> bool:
    return any(v is None or v.name in facts.constants for v in node.inputs)


def _refusal(node: ir.Node, reason: str) -> Refusal:
    return Refusal(value=key(node), node=node.name or key(node), op=node.op_type, reason=reason)


class _Finder:
    def __init__(self, model: ir.Model, flow: Flow, norms: Collection[Norm]) -> None:
        self.flow, self.facts, self.norms = flow, flow.facts, norms
        self.frozen = flow.labels.frozen()
        self.nodes = {key(node): node for node in model.graph}
        self.tables = flow.tables or {}
        self.owners: dict[int, list[tuple[str, int, int]]] = {}
        for place, mark in self.tables.items():
            for root in np.unique(flow.labels.find(mark.labels)).tolist():
                self.owners.setdefault(root, []).append(place)
        self.carriers: dict[tuple[str, int, int], set[str]] = {place: set() for place in self.tables}
        for name, marks in flow.marks.items():
            for place in self._places(marks):
                self.carriers[place].add(name)
        self.uses: dict[tuple[str, int, int], list[Use]] = {place: [] for place in self.tables}
        for use in flow.uses:
            for place in self._places([use.mark]):
                self.uses[place].append(use)

    def _places(self, marks: Iterable[Mark]) -> set[tuple[str, int, int]]:
        roots = {root for mark in marks for root in np.unique(self.flow.labels.find(mark.labels)).tolist()}
        return {place for root in roots for place in self.owners.get(root, ())}

    def inside(self, node: ir.Node, kind: Kind) -> Inside | None:
        """Return the channels of a product; None if it reads none.

        Raises:
            _RefusedError: their basis is not free.
        """
        own, fused = key(node), weighs(node)
        if not (is_product(node) or (fused and kind == "vo")) or own not in self.facts.shapes:
            return None
        names = names_of(node.inputs)
        rank, value = [len(self.facts.shapes.get(name, ())) for name in names], 2 if fused else 1
        summed, met, kept = axes_of(node, (rank[0], rank[1]))
        kept = rank[value] - 1 if fused else kept
        wanted = [(own, 0, summed), (own, 1, met)] if kind == "qk" else [(own, value, kept)]
        if not all(place in self.tables for place in wanted):
            asked = {"qk": makes_scores, "vo": reads_weights}[kind]
            if fused or ((own, 1, kept if kind == "qk" else met) not in self.tables and asked(node)):
                raise _RefusedError(_refusal(node, POSITIONS))
            return None
        sides = [self._rows(node, place) for place in wanted]
        tables = tuple((self.nodes[n], k) for n, k in self.flow.positions.items() if self._carried(n, wanted))
        norms = tuple(tuple(n for n in self.norms if self._carried(n.result.name or "", [p])) for p in wanted)
        picked = kind == "qk" and (tables or any(norms))
        units = units_of(sides) if picked else None
        groups = groups_of(sides, units)
        if groups is None:
            raise _RefusedError(_refusal(node, UNEVEN))
        passed = [table for table, _ in tables] + [node for side in norms for norm in side for node in norm.nodes]
        parts: list[Part] = []
        for place, roots, inverse in zip(wanted, groups, (False, True), strict=False):
            self._check(place, node, passed if units is not None else ())
            parts += [self._part(use, roots, kind, units, inverse=inverse) for use in self.uses[place]]
        if not {False, True} <= {part.inverse for part in parts if not _is_bias(part.node, part.operand)}:
            return None
        return Inside(
            name=f"{own}/{kind}",
            kind=kind,
            node=node,
            groups=len(groups[0]),
            width=groups[0].shape[2],
            parts=tuple(parts),
            units=units,
            tables=tables,
            norms=norms,
            read=tuple((names[operand], axis) for _, operand, axis in wanted),
        )

    def _carried(self, name: str, places: Iterable[tuple[str, int, int]]) -> bool:
        return any(name in self.carriers[place] for place in places)

    def _rows(self, node: ir.Node, place: tuple[str, int, int]) -> Ints:
        """Return the (heads, channels) label classes of an operand."""
        mark = self.tables[place]
        table = np.moveaxis(self.flow.labels.find(mark.labels), mark.along(place[2]), -1)
        rows = table.reshape(-1, table.shape[-1])
        stuck = next((self.frozen[root] for root in np.unique(rows).tolist() if root in self.frozen), None)
        if stuck is not None:
            raise _RefusedError(stuck)
        if any(self.owners[root] != [place] for root in np.unique(rows).tolist()):
            raise _RefusedError(_refusal(node, CLAIMED))
        return rows

    def _check(self, place: tuple[str, int, int], product: ir.Node, passed: Collection[ir.Node]) -> None:
        """Raise the refusal of the first node between weights that depends on the basis, except some nodes."""
        layers, mine = {use.node for use in self.uses[place]}, self.carriers[place]
        for node in self.nodes.values():
            if node not in passed and any(v is not None and v.name in mine for v in (*node.inputs, *node.outputs)):
                self._follows(node, place, product, layers)

    def _follows(self, node: ir.Node, place: tuple[str, int, int], product: ir.Node, layers: set[str]) -> None:
        if node is product or (node.domain in ("", "ai.onnx") and node.op_type in MOVES):
            return
        if (node.op_type in LAYERS or is_fused(node)) and key(node) in layers and integer(node, "group", 1) == 1:
            return
        mine = self.carriers[place]
        others = [k for k, v in enumerate(node.inputs) if v is not None and v.name not in mine]
        if node.op_type in ("Add", "Sub"):
            added = {use.operand for use in self.uses[place] if use.node == key(node)}
            if all(k in added or is_zero(node, k, self.facts) for k in others):
                return
        sizes = [math.prod(self.facts.shapes.get(v.name or "", (0,))) for v in node.inputs if v is not None]
        scales = node.op_type == "Mul" or (node.op_type == "Div" and others == [1])
        if not (scales and len(others) == 1 and sizes[others[0]] == 1):
            raise _RefusedError(_refusal(node, BENDS))

    def _part(self, use: Use, groups: Ints, kind: Kind, units: Ints | None, *, inverse: bool) -> Part:
        node = self.nodes[use.node]
        value = node.inputs[use.operand]
        layer = use.role != "passenger"
        bias = _is_bias(node, use.operand)
        linear = node.op_type in LAYERS or is_fused(node)
        if len(use.mark.axes) != 1 or (layer and not linear) or (not layer and not bias):
            raise _RefusedError(_refusal(node, BENDS))
        if (use.role == "consumer" and kind == "qk") or (use.role == "producer" and self._adds_alike(node)):
            raise _RefusedError(_refusal(node, BENDS))
        array = constant_of(value, (value.name if value is not None else "") or "", self.facts)
        shared = layer and len({u.node for u in self.flow.uses if u.value == use.value}) > 1
        if shared or (units is None and (array is None or use.value in self.facts.stored)):
            raise _RefusedError(_refusal(node, STORED))
        index = (positions if units is None else spread)(self.flow.labels.find(use.mark.labels), groups)
        if index is None:
            raise _RefusedError(_refusal(node, BENDS))
        source = use.source or ((key(node), 2) if weighs(node) else self._made(node, use))
        inverse = inverse or use.role == "consumer"
        return Part(node=node, operand=use.operand, axis=use.mark.axes[0], index=index, inverse=inverse, source=source)

    def _adds_alike(self, node: ir.Node) -> bool:
        """Return True if a layer adds a bias that is the same number for all channels."""
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        return bias is not None and not any(use.node == key(node) and use.operand == 2 for use in self.flow.uses)

    def _made(self, node: ir.Node, use: Use) -> tuple[str, int]:
        """Return the tensor that a node computes, and the axis with the channels of its constant."""
        name, roots = key(node), self.flow.labels.find(use.mark.labels)
        alike = (m for m in self.flow.marks.get(name, ()) if len(m.axes) == 1)
        mark = next((m for m in alike if np.array_equal(self.flow.labels.find(m.labels), roots)), None)
        if mark is None:
            raise _RefusedError(_refusal(node, BENDS))
        return name, mark.axes[0]
