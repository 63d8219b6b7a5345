"""Place nodes in 8 bits or in float, where the measured kernels and the conversions between both take least time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.algebra.sides import Net, on_the_first
from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.core import Feed, Floats
from onnxgrail.graph.attributes import maker_of
from onnxgrail.graph.bits.exempt import BACK, THERE
from onnxgrail.graph.io.serial import pack

BORDER = 3.0  # times the conversion that a border costs: kernels on its sides want other layouts of channels, too
OUTSIDE = 0  # the item of all nodes that stay in float, and of the inputs and outputs of the model

Durations = Mapping[str, float]
"""Name of a node -> milliseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """The costs of nodes and conversions.

    Attributes:
        eight, full: of nodes in 8 bits and in float, by name; others cost nothing.
        border: of the conversion of a tensor, by its name.
    """

    eight: Durations
    full: Durations
    border: Callable[[str], float]


@dataclass(frozen=True, slots=True, eq=False)
class Placing:
    """The nodes of a model, some of which can compute in 8 bits.

    Attributes:
        items: number of each node by its name, `OUTSIDE` if it cannot; nodes with the same are on the same side.
        eight, full: (n,) cost of each item in 8 bits and in float.
        nets: conversions of the tensors between them.
    """

    items: Mapping[str, int]
    eight: Floats
    full: Floats
    nets: Sequence[Net]

    def conversions(self) -> int:
        """Return the number of tensors that are converted."""
        left = {self.items[name] for name in self.in_float()}
        return sum(any((n in left) != (net.maker in left) for n in net.readers) for net in self.nets)

    def saved(self, name: str) -> int:
        """Return the nanoseconds that a node and those with the same item save in 8 bits, if costs are milliseconds."""
        item = self.items.get(name, OUTSIDE)
        return round(1e6 * max(0.0, self.full[item] - self.eight[item])) if item else 0

    def in_float(self, names: Collection[str] = ()) -> set[str]:
        """Return the nodes that compute in float if some, by name, have to."""
        eight = self.eight.copy()
        eight[[self.items[name] for name in names if name in self.items]] = math.inf
        inside = on_the_first(eight, self.full, self.nets)
        return {name for name, item in self.items.items() if not inside[item]}


def placing_of(model: ir.Model, able: Collection[str], after: Collection[str], costs: Costs) -> Placing:
    """Return the placing of the nodes of a model.

    Args:
        model: the float graph.
        able: names of the nodes that can compute in 8 bits.
        after: operators that are on the side of the node they read.
        costs: of nodes and conversions.
    """
    items: dict[str, int] = {}
    for node in model.graph:
        maker = maker_of(node, 0)
        if node.op_type in after:
            items[node.name or ""] = OUTSIDE if maker is None else items.get(maker.name or "", OUTSIDE)
        else:
            items[node.name or ""] = max(items.values(), default=OUTSIDE) + 1 if node.name in able else OUTSIDE
    eight, full = np.zeros((2, 1 + max(items.values(), default=OUTSIDE)))
    for name, item in items.items():
        eight[item] += costs.eight.get(name, 0.0)
        full[item] += costs.full.get(name, 0.0)
    eight[OUTSIDE] = math.inf
    makers = {value: node for node in model.graph for value in node.outputs} | dict.fromkeys(model.graph.inputs)
    nets = []
    for value, maker in makers.items():
        if value.dtype != ir.DataType.FLOAT or value.is_initializer():
            continue
        readers = {items.get(use.node.name or "", OUTSIDE) for use in value.uses()}
        readers |= {OUTSIDE} if value.is_graph_output() else set()
        item = OUTSIDE if maker is None else items.get(maker.name or "", OUTSIDE)
        if readers - {item}:
            nets.append(Net(item, tuple(sorted(readers - {item})), costs.border(value.name or "")))
    return Placing(items, eight, full, nets)


def unmeasured(model: ir.Model, layers: Collection[str]) -> Costs:
    """Return the costs where no kernels are measured: layers compute in 8 bits, with as few conversions as possible."""
    return Costs({}, dict.fromkeys(layers, 1.0 + 2 * sum(len(node.outputs) for node in model.graph)), lambda _: 1.0)


def timed(model: ir.Model, rounded: ir.Model, times: Sequence[Durations], feed: Feed) -> Costs:
    """Return the costs in milliseconds; conversions cost what they are measured to by the sizes of their tensors.

    Args:
        model: the float graph.
        rounded: the graph with 8 bits wherever they are possible.
        times: of the nodes of both graphs.
        feed: a sample, to learn the sizes of tensors.
    """
    from scipy.optimize import nnls  # slow to import

    sizes = _sizes(model, feed)
    rows = [(0.0, 0.0, 1.0)]
    for node in rounded.graph:
        tensor = _converted(node)
        if tensor in sizes and (ms := times[1].get(node.name or "", 0.0)) > 0:
            rows.append((1 / ms, sizes[tensor] / ms, 1.0))
    table = np.array(rows)
    scale = np.maximum(np.linalg.norm(table[:, :2], axis=0), np.finfo(np.float64).tiny)
    fixed, each = nnls(table[:, :2] / scale, table[:, 2])[0] / scale
    return Costs(times[1], times[0], lambda name: BORDER * (fixed + each * sizes.get(name, 0)))


def _converted(node: ir.Node) -> str:
    """Return the name of the float tensor that a node rounds, or converts back; empty for other nodes."""
    before = maker_of(node, 0) if node.op_type == BACK else node
    value = before.inputs[0] if before is not None and before.op_type == THERE else None
    return "" if value is None else value.name or ""


def _sizes(model: ir.Model, feed: Feed) -> dict[str, int]:
    """Return the number of elements of the computed float tensors and of the inputs."""
    names = [v.name or "" for node in model.graph for v in node.outputs if v.dtype == ir.DataType.FLOAT]
    with open_session(pack(model, outputs=sorted(names)), Setup(extended=False, once=True)) as session:
        return {name: np.size(array) for name, array in {**feed, **session.run(feed)}.items()}
