"""Channels inside attention heads, and their basis, which changes without changing the function of the model.

Any invertible matrix may stand between values and what reads them, and between queries and keys. Queries and keys that
are rotated by position keep their basis, and get an order in which channels are picked.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.core import INNER, Floats, Ints, Kind, Probe, Stats
from onnxgrail.graph import slots
from onnxgrail.graph.attributes import given
from onnxgrail.graph.ops.layers.inside import weighs
from onnxgrail.graph.products import scores_of
from onnxgrail.graph.rewrite.assign import set_operands, sweep
from onnxgrail.graph.rotate import norms
from onnxgrail.graph.rotate.marked import FUSED, INSIDE, MARK, ORDER, PICKED, RANK, READ, is_cached
from onnxgrail.graph.rotate.norms import Norm
from onnxgrail.graph.rotate.restore import simplify
from onnxgrail.graph.trace.facts import Facts, held


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """A constant operand that holds channels of heads along one axis, or a bias with an axis of heads next to it.

    Attributes:
        node, operand: where it is read.
        axes: the axes, in ascending order.
        index: (groups, copies, channels) positions on the axes, of which the last counts fastest.
        inverse: it takes the inverse of the basis, transposed.
        source: tensor with the channels at the same positions, and its last channel axis: what a weight reads, or
            computes.
        stored: name of the stored constant, which other nodes may read under another name.
    """

    node: ir.Node
    operand: int
    axes: tuple[int, ...]
    index: Ints
    inverse: bool
    source: tuple[str, int]
    stored: str = ""

    @property
    def value(self) -> ir.Value:
        """Return the constant."""
        return given(self.node, self.operand)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Inside:
    """Channels inside the heads of one attention; heads that share keys and values are one group with one basis.

    Products that read the same channels have one basis: layers with the same weights (ALBERT), and queries that are
    multiplied by keys and by positions (DeBERTa). The channels between the two parts of a convolution are like those
    of a single head.

    Attributes:
        name: of the rotation.
        kind: `qk`, `vo` or `rank`.
        node: the first product that reads the channels.
        more: the other products.
        groups, width: number of groups, and of channels in a head.
        parts: constants in the basis.
        makers: of these, the weights and biases that make queries and keys last, for every product; added: for each,
            the biases that are added later, by a fused kernel or with an axis of heads.
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
    more: tuple[ir.Node, ...] = ()
    makers: tuple[Part, ...] = ()
    added: tuple[Part | None, ...] = ()
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
        reads = [part for part in self.parts if part.inverse and not is_cached(part.node)]
        return list(self.makers) if self.kind == "qk" else reads

    @property
    def products(self) -> tuple[ir.Node, ...]:
        """Return the products that read the channels."""
        return (self.node, *self.more)

    def sides(self, measured: Sequence[Sequence[Sequence[Stats]]]) -> list[list[list[Stats]]]:
        """Return, for queries and for keys, per group the statistics of all heads, whatever product reads them.

        Args:
            measured: for each measured part, per group those of its heads.
        """
        pairs = [*zip(self.measured, measured, strict=True)]
        apart = [[groups for part, groups in pairs if part.inverse == keys] for keys in (False, True)]
        return [[[one for heads in group for one in heads] for group in zip(*some, strict=True)] for some in apart]

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


def complete(found: Collection[Inside]) -> list[Inside]:
    """Return queries and keys, and values, of every attention in which both have a free basis."""
    products = {kind: {node: one for one in found if one.kind == kind for node in one.products} for kind in INNER}
    chosen: list[Inside] = []
    for values in dict.fromkeys(products["vo"].values()):
        scores = [node if weighs(node) else scores_of(node, products["qk"]) for node in values.products]
        asked = [products["qk"][node] for node in scores if node in products["qk"]]
        chosen += [*asked, values] if len(asked) == len(scores) else []
    return list(dict.fromkeys(chosen))


def rotate_heads(graph: ir.Graph, inside: Inside, basis: Floats, facts: Facts, captured: Collection[str]) -> None:
    """Change the basis of channels inside heads, or rank them, in place, and mark the product that reads them.

    Args:
        graph: changed in place.
        inside: the channels.
        basis: (groups, width, width) invertible matrices; their columns are the new channels. If units are picked,
            (units,) their numbers, the most important first.
        facts: of the graph.
        captured: names that bodies of nodes read.
    """
    for product in inside.products:
        product.metadata_props[RANK if inside.kind == "rank" else READ + inside.kind] = inside.name
    if inside.units is not None:
        first = [inside.units.tolist().index(unit) for unit in basis.astype(int).tolist()]
        inside.node.metadata_props[ORDER] = ",".join(map(str, first))
        for node, operand in inside.tables:
            node.metadata_props[PICKED] = str(operand)
        for norm in [norm for side in inside.norms for norm in side]:
            op = norm.nodes[-1].op_type
            dtype, marks = facts.dtypes[norm.source.name or ""], {MARK: inside.name, INSIDE: inside.kind}
            simplify(graph, norm, {**marks, FUSED: op} if op in norms.FUSED else marks, (dtype, dtype))
        return
    inverse = np.swapaxes(np.linalg.inv(basis), 1, 2)
    alike: dict[tuple[str, tuple[int, ...], bool, bytes], list[Part]] = {}
    for part in inside.parts:
        name = part.stored or part.value.name or ""
        alike.setdefault((name, part.axes, part.inverse, part.index.tobytes()), []).append(part)
    for same in alike.values():
        part = same[0]
        array = held(part.value, facts)
        values = _changed(array.astype(np.float64), part, inverse if part.inverse else basis)
        read = dict.fromkeys(one.value for one in same)
        set_operands(graph, [(one.node, one.operand) for one in same], slots.clamped(values, array.dtype), captured)
        sweep(graph, read)


def _changed(array: Floats, part: Part, basis: Floats) -> Floats:
    ahead = range(len(part.axes))
    moved = np.moveaxis(array, part.axes, ahead)
    front = _in_front(array, part)
    rows = front[part.index]
    turned = np.swapaxes(basis, 1, 2)[:, None] @ rows.reshape(*part.index.shape, -1)
    front[part.index] = turned.reshape(rows.shape)
    return np.moveaxis(front.reshape(moved.shape), ahead, part.axes)


def _in_front(array: Floats, part: Part) -> Floats:
    """Return a constant with its channels along the first axis; it may share its memory."""
    moved = np.moveaxis(array, part.axes, range(len(part.axes)))
    return moved.reshape(-1, *moved.shape[len(part.axes) :])


def rows_of(part: Part, facts: Facts) -> Floats:
    """Return the (groups, copies, width, ...) numbers of a constant's channels."""
    return np.asarray(_in_front(held(part.value, facts).astype(np.float64), part)[part.index])


def products_of(part: Part, facts: Facts) -> Floats:
    """Return the (groups, width, width) products of a weight's channels, summed over copies and all other axes."""
    rows = rows_of(part, facts)
    flat = rows.reshape(*part.index.shape, -1)
    return np.asarray(np.einsum("gcdr,gcer->gde", flat, flat, optimize=True))
