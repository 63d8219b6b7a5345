"""Find layers whose activations lose too much if one range of 8 bits holds all of their values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.core import Array, Feed, Floats
from onnxgrail.graph.io.serial import pack

NOISE = 7e-4  # maximum quantization noise as a share of an activation's energy; else its layer stays in float
DROWNED = 0.05  # maximum noise of a channel of the model's last layers, as a share of the channel's variance
STEPS = 255
CONVOLUTIONS = ("Conv", "ConvTranspose")
SIZES = ("Shape", "Size")  # their outputs do not depend on the values of a tensor
OUTLIERS = "outliers in their inputs"
MIXED = "outputs of very different sizes, such as boxes and scores"


@dataclass(slots=True, eq=False)
class _Sums:
    """Range and moments of a tensor: least and greatest value (including zero, as in quantization), and per channel the
    number of values, their sum and the sum of their squares.
    """

    low: float
    high: float
    count: Floats
    total: Floats
    squares: Floats

    def add(self, array: Array, axis: int | None) -> None:
        """Add the values of one batch, with channels along an axis or all together."""
        values = np.asarray(array, np.float64)
        rows = values.reshape(-1, 1) if axis is None else np.moveaxis(values, axis, -1).reshape(-1, array.shape[axis])
        self.low, self.high = min(self.low, rows.min()), max(self.high, rows.max())
        self.count = self.count + len(rows)
        self.total = self.total + rows.sum(axis=0)
        self.squares = self.squares + np.square(rows).sum(axis=0)

    @property
    def noise(self) -> float:
        """Return the energy of the error per value: a step of size s adds s²/12."""
        return float(((self.high - self.low) / STEPS) ** 2 / 12)

    def loud(self) -> bool:
        """Return True if outliers make the step large although most values are small."""
        return bool(self.noise * self.count.sum() > NOISE * self.squares.sum())

    def mixed(self) -> bool:
        """Return True if the step of the largest channels drowns others."""
        variance = self.squares / self.count - np.square(self.total / self.count)
        return bool((self.noise > DROWNED * variance[variance > 0]).any())


def exceptions(model: ir.Model, feeds: Iterable[Feed], layers: Collection[str]) -> dict[str, str]:
    """Return the layers that stay in float, with the reason."""
    weights = model.graph.initializers
    reads = {
        node: [v.name or "" for v in node.inputs[:2] if v is not None and v.name not in weights]
        for node in model.graph
        if node.op_type in layers
    }
    last = last_values(model, layers)
    writes = {node: node.outputs[0].name or "" for node in reads if node.outputs[0] in last}
    axes: dict[str, int | None] = {name: None for names in reads.values() for name in names}
    axes |= {name: 1 if node.op_type in CONVOLUTIONS else -1 for node, name in writes.items()}
    sums: dict[str, _Sums] = {}
    inputs = {value.name for value in model.graph.inputs}
    with open_session(pack(model, outputs=sorted(axes.keys() - inputs)), Setup(once=True)) as session:
        for feed in feeds:
            for name, array in {**session.run(feed), **feed}.items():
                if name in axes and isinstance(array, np.ndarray) and array.size and array.dtype.kind == "f":
                    if name not in sums:
                        sums[name] = _Sums(0.0, 0.0, np.zeros(1), np.zeros(1), np.zeros(1))
                    sums[name].add(array, axes[name])
    found = {node: OUTLIERS for node, names in reads.items() if any(n in sums and sums[n].loud() for n in names)}
    found |= {n: MIXED for n, name in writes.items() if n not in found and name in sums and sums[name].mixed()}
    return {node.name or "": why for node, why in found.items()}


def last_values(model: ir.Model, layers: Collection[str]) -> set[ir.Value]:
    """Return the values that reach an output of the model on a way without layers, other ways aside.

    In the heads of some detectors, boxes pass a layer after they were joined with scores; the scores do not.
    """
    return upstream(model, model.graph.outputs, lambda node: node.op_type not in (*layers, *SIZES))


def upstream(model: ir.Model, ends: Iterable[ir.Value], passes: Callable[[ir.Node], bool]) -> set[ir.Value]:
    """Return some values and those that they depend on, by ways through nodes that pass only."""
    found = set(ends)
    for node in reversed(list(model.graph)):
        if passes(node) and any(output in found for output in node.outputs):
            found.update(value for value in node.inputs if value is not None)
    return found
