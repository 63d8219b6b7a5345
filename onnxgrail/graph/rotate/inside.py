"""Find what has a free basis inside attention heads: queries and keys, and values with what reads them.

Channels are followed as a trace does, but for every head of its own. A basis is free if nothing but weights, biases and
operators that treat all channels alike lies between. Queries and keys that are rotated by position or divided by their
root mean square have no free basis: their channels are picked, those that are rotated together as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.core import INNER, Ints, Kind, Refusal
from onnxgrail.graph.attributes import input_of, names_of
from onnxgrail.graph.ops.layers.inside import weighs
from onnxgrail.graph.products import axes_of, is_fused, is_product, makes_scores, reads_weights
from onnxgrail.graph.rewrite.caches import in_pairs, with_matrices, without_matrices
from onnxgrail.graph.rewrite.unique import names_kept
from onnxgrail.graph.rotate.classes import aligned, positions, spread, units_of
from onnxgrail.graph.rotate.heads import Inside, Part, complete
from onnxgrail.graph.rotate.marked import is_cached
from onnxgrail.graph.rotate.norms import Norm, roots_of
from onnxgrail.graph.rotate.passing import LAYERS, Channels, bends
from onnxgrail.graph.trace.facts import Facts, constant_of, key
from onnxgrail.graph.trace.flow import Flow, Use
from onnxgrail.graph.trace.labels import Mark
from onnxgrail.graph.trace.tracer import flow_of

FUSED = frozenset(("Attention", "MultiHeadAttention", "GroupQueryAttention", "PagedAttention", "QAttention"))
OTHERS = frozenset(("FusedMatMul", "TransposeMatMul", "Einsum"))
POSITIONS = "what it reads is rotated by position, normalized, cached, or computed by no weight, so its channels stay"
BENDS = "its result depends on the basis of channels inside heads"
CLAIMED = "several products read the same channels inside heads"
UNEVEN = "its heads share some of their channels, or differ in their number"
STORED = "its weight is shared, quantized or computed at run time, and takes no basis inside heads"
KERNEL = "a fused kernel reads heads of one size; channels inside of them stay"
OTHER = "channels inside heads are followed through matrix products only, so those that it multiplies stay"

REASONS = frozenset((POSITIONS, BENDS, CLAIMED, UNEVEN, STORED, KERNEL, OTHER))


_Place = tuple[str, int, int]
"""A product by its first output, one of its operands, and an axis of it."""


class _RefusedError(Exception):
    """Channels whose basis is not free; its argument is the refusal."""


def insides_of(
    model: ir.Model,
    facts: Facts,
    kinds: Iterable[Kind],
    only: Collection[str] | None = None,
    *,
    interface: bool = False,
) -> tuple[Facts, list[Inside], list[Refusal]]:
    """Return what has a free basis inside heads, and why other heads have none.

    Args:
        model: the graph. It is not changed, except that matrices stand between heads and their caches.
        facts: shapes and values.
        kinds: as for `rotatable`.
        only: names of the bases that are wanted; None for all.
        interface: as for `rotatable`.

    Returns:
        The facts with what is new, the channels, and the refusals.
    """
    if interface and set(INNER) & set(kinds):
        with names_kept(model.graph):
            facts = with_matrices(model, facts)
    found, refusals = _found(model, facts, kinds)
    found = [inside for inside in found if only is None or inside.name in only]
    found = complete(found) if "heads" in kinds else found
    without_matrices(model, {part.node for inside in found for part in inside.parts})
    return facts, found, refusals


def _found(model: ir.Model, facts: Facts, kinds: Iterable[Kind]) -> tuple[list[Inside], list[Refusal]]:
    """Return what `insides_of` does; with `qk` or `vo`, both, since heads that stay for one stay for the other."""
    if not set(INNER) & set(kinds):
        return [], []
    fused = [node for node in model.graph if node.op_type in FUSED and not weighs(node)]
    refusals = [_refusal(node, KERNEL) for node in fused]
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


def _is_bias(node: ir.Node, operand: int) -> bool:
    """Return True if a node adds an operand to channels."""
    places = {"Gemm": 2, "Conv": 2, "MultiHeadAttention": 3}
    return operand == places[node.op_type] if node.op_type in places else node.op_type in ("Add", "Sub")


def _reads_constants(node: ir.Node, facts: Facts) -> bool:
    return any(v is None or v.name in facts.constants for v in node.inputs)


def _distinct(parts: Iterable[Part]) -> list[Part]:
    """Return parts that differ: layers with the same weights are found from each of their products."""
    return [*{(p.node, p.operand, p.axes, p.inverse, p.index.tobytes()): p for p in parts}.values()]


def _refusal(node: ir.Node, reason: str) -> Refusal:
    return Refusal(value=key(node), node=node.name or key(node), op=node.op_type, reason=reason)


class _Finder:
    def __init__(self, model: ir.Model, flow: Flow, norms: Collection[Norm]) -> None:
        self.flow, self.facts, self.norms = flow, flow.facts, norms
        self.frozen = flow.labels.frozen()
        self.nodes = {key(node): node for node in model.graph}
        self.order = {node: number for number, node in enumerate(model.graph)}
        self.tables = flow.tables or {}
        self.owners: dict[int, list[_Place]] = {}
        for place, mark in self.tables.items():
            for root in np.unique(flow.labels.find(mark.labels)).tolist():
                self.owners.setdefault(root, []).append(place)
        self.carriers: dict[_Place, set[str]] = {place: set() for place in self.tables}
        for name, marks in flow.marks.items():
            for place in self._places(marks):
                self.carriers[place].add(name)
        self.uses: dict[_Place, list[Use]] = {place: [] for place in self.tables}
        for use in flow.uses:
            for place in self._places([use.mark]):
                self.uses[place].append(use)

    def _places(self, marks: Iterable[Mark]) -> set[_Place]:
        roots = {root for mark in marks for root in np.unique(self.flow.labels.find(mark.labels)).tolist()}
        return {place for root in roots for place in self.owners.get(root, ())}

    def inside(self, node: ir.Node, kind: Kind) -> Inside | None:
        """Return the channels of a product; None if it reads none.

        Raises:
            _RefusedError: their basis is not free.
        """
        wanted, own = self._wanted(node, kind), key(node)
        if not all(place in self.tables for place in wanted):
            asked = {"qk": makes_scores, "vo": reads_weights}[kind]
            other = self._wanted(node, "vo" if kind == "qk" else "qk")[-1:]
            if weighs(node) or (asked(node) and not all(place in self.tables for place in other)):
                raise _RefusedError(_refusal(node, POSITIONS))
        if not wanted or not all(place in self.tables for place in wanted):
            return None
        sides = self._together(node, kind)
        nodes = sorted({self.nodes[place[0]] for place in sides}, key=self.order.__getitem__)
        if node is not nodes[0]:
            return None  # it is found with the first product
        tables = tuple((self.nodes[n], k) for n, k in self.flow.positions.items() if self._carried(n, sides))
        norms = tuple(tuple(n for n in self.norms if self._carried(n.result.name or "", [p])) for p in sides)
        picked = kind == "qk" and bool(tables or any(norms))
        if picked and len(nodes) > 1:
            raise _RefusedError(_refusal(node, CLAIMED))
        rows = {place: self._rows(place) for place in sides}
        units = units_of([*rows.values()]) if picked else None
        products = [[place for place in self._wanted(one, kind) if place in sides] for one in nodes]
        found = aligned([[rows[place] for place in places] for places in products], units)
        if found is None:
            raise _RefusedError(_refusal(node, UNEVEN))
        groups = {p: t for ps, ts in zip(products, found, strict=True) for p, t in zip(ps, ts, strict=True)}
        passed = [table for table, _ in tables] + [node for side in norms for norm in side for node in norm.nodes]
        parts: list[Part] = []
        makers: list[Part] = []
        added: list[Part | None] = []
        for place, inverse in sides.items():
            channels = Channels(self.flow, self.carriers[place], self.uses[place], rows[place], units is not None)
            self._check(channels, nodes if units is None else [*nodes, *passed])
            mine = [self._part(use, groups[place], kind, units, inverse=inverse) for use in self.uses[place]]
            reader = self.nodes[place[0]]
            early = [part for part in mine if self.order[part.node] < self.order[reader]]
            makes = [part for part in early if not is_cached(part.node) and len(part.axes) == 1][-1:]
            if early and not makes:
                raise _RefusedError(_refusal(reader, POSITIONS))
            makers += makes
            added += [next((p for p in mine if p.node is reader or len(p.axes) > 1), None)] * len(makes)
            parts += mine
        self._check_owned(parts)
        parts = _distinct(parts)
        apart = {part.inverse for part in parts if not (_is_bias(part.node, part.operand) or is_cached(part.node))}
        if not {False, True} <= apart:
            return None
        return Inside(
            name=f"{own}/{kind}",
            kind=kind,
            node=node,
            more=tuple(nodes[1:]),
            groups=len(found[0][0]),
            width=found[0][0].shape[2],
            parts=tuple(parts),
            makers=tuple(makers),
            added=tuple(added),
            units=units,
            tables=tables,
            norms=norms,
            read=tuple((names_of(node.inputs)[operand], axis) for _, operand, axis in wanted),
        )

    def _wanted(self, node: ir.Node, kind: Kind) -> list[_Place]:
        """Return the operands and axes of a product that hold channels inside heads; empty for another node."""
        own = key(node)
        if not (is_product(node) or weighs(node)) or own not in self.facts.shapes:
            return []
        rank = [len(self.facts.shapes.get(name, ())) for name in names_of(node.inputs)]
        if weighs(node):
            return [(own, operand, rank[2] - 1) for operand in {"qk": (0, 1), "vo": (2,)}[kind]]
        summed, met, kept = axes_of(node, (rank[0], rank[1]))
        return [(own, 0, summed), (own, 1, met)] if kind == "qk" else [(own, 1, kept)]

    def _together(self, node: ir.Node, kind: Kind) -> dict[_Place, bool]:
        """Return the operands with a basis in common, and if they take its inverse: of all products that share some."""
        sides: dict[_Place, bool] = {}
        queue = list(zip(self._wanted(node, kind), (False, True), strict=False))
        while queue:
            place, inverse = queue.pop(0)
            mates = self._wanted(self.nodes[place[0]], kind)
            if place not in mates or any(mate not in self.tables for mate in mates):
                raise _RefusedError(_refusal(node, CLAIMED))
            if sides.setdefault(place, inverse) != inverse:
                raise _RefusedError(_refusal(node, CLAIMED))
            roots = np.unique(self._rows(place)).tolist()
            also = [(mate, not inverse) for mate in mates if mate != place]
            also += [(owner, inverse) for owner in dict.fromkeys(o for root in roots for o in self.owners[root])]
            queue += [(mate, side) for mate, side in also if sides.get(mate) != side and (mate, side) not in queue]
        return sides

    def _carried(self, name: str, places: Iterable[_Place]) -> bool:
        return any(name in self.carriers[place] for place in places)

    def _rows(self, place: _Place) -> Ints:
        """Return the (heads, channels) label classes of an operand."""
        mark = self.tables[place]
        table = np.moveaxis(self.flow.labels.find(mark.labels), mark.along(place[2]), -1)
        rows = table.reshape(-1, table.shape[-1])
        stuck = next((self.frozen[root] for root in np.unique(rows).tolist() if root in self.frozen), None)
        if stuck is not None:
            raise _RefusedError(stuck)
        return rows

    def _check(self, channels: Channels, passed: Collection[ir.Node]) -> None:
        """Raise the refusal of the first node between weights that depends on the basis, except some nodes."""
        for node in self.nodes.values():
            carries = any(v is not None and v.name in channels.names for v in (*node.inputs, *node.outputs))
            if node not in passed and carries and bends(node, channels):
                raise _RefusedError(_refusal(node, BENDS))

    def _part(self, use: Use, groups: Ints, kind: Kind, units: Ints | None, *, inverse: bool) -> Part:
        node = self.nodes[use.node]
        value = node.inputs[use.operand]
        layer = use.role != "passenger"
        bias = _is_bias(node, use.operand)
        linear = node.op_type in LAYERS or is_fused(node)
        if len(use.mark.axes) > 1 + bias or (layer and not linear) or (not layer and not bias):
            raise _RefusedError(_refusal(node, BENDS))
        read = use.role == "consumer"
        if (read and kind == "qk" and not is_cached(node)) or (use.role == "producer" and self._adds_alike(node)):
            raise _RefusedError(_refusal(node, BENDS))
        array = constant_of(value, (value.name if value is not None else "") or "", self.facts)
        if units is None and (array is None or use.value in self.facts.stored):
            raise _RefusedError(_refusal(node, STORED))
        roots = self.flow.labels.find(use.mark.labels).ravel()
        index = (positions if units is None else spread)(roots, groups)
        if index is None:
            raise _RefusedError(_refusal(node, BENDS))
        source = use.source or ((key(node), 2) if weighs(node) else self._made(node, use))
        return Part(
            node=node,
            operand=use.operand,
            axes=use.mark.axes,
            index=index,
            inverse=inverse != read,
            source=source,
            stored=use.value,
        )

    def _check_owned(self, parts: Sequence[Part]) -> None:
        """Raise a refusal if a layer that is no part reads the weight of one, or a cache is only read or written."""
        if not in_pairs(part.node for part in parts):
            raise _RefusedError(_refusal(parts[0].node, POSITIONS))
        mine = {(key(part.node), part.operand) for part in parts}
        for part in (part for part in parts if not _is_bias(part.node, part.operand)):
            if any(use.value == part.stored and (use.node, use.operand) not in mine for use in self.flow.uses):
                raise _RefusedError(_refusal(part.node, STORED))

    def _adds_alike(self, node: ir.Node) -> bool:
        """Return True if a layer adds a bias that is the same number for all channels."""
        bias = input_of(node, 2)
        return bias is not None and not any(use.node == key(node) and use.operand == 2 for use in self.flow.uses)

    def _made(self, node: ir.Node, use: Use) -> tuple[str, int]:
        """Return the tensor that a node computes, and the axis with the channels of its constant."""
        name, roots = key(node), self.flow.labels.find(use.mark.labels)
        alike = (m for m in self.flow.marks.get(name, ()) if len(m.axes) == len(use.mark.axes))
        mark = next((m for m in alike if np.array_equal(self.flow.labels.find(m.labels), roots)), None)
        if mark is None:
            raise _RefusedError(_refusal(node, BENDS))
        return name, mark.axes[-1]
