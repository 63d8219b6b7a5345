"""Constants that a graph computes from large weights, such as transposed weights: computed on each access.

If they were stored, they would double the memory of all weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.core import Array
from onnxgrail.graph.io.mapped import Mapped
from onnxgrail.graph.io.serial import to_bytes

HEAVY = 2**20  # bytes of an external weight whose computed constants are not stored


class Values(Mapping[str, Array]):
    """Known values by name: stored values, and values computed on each access."""

    def __init__(self, kept: Mapping[str, Array], model: ir.Model, types: Mapping[str, np.dtype]) -> None:
        self._kept, self._model, self._types = kept, model, types

    def __getitem__(self, name: str) -> Array:
        """Return the value."""
        found = self._kept.get(name)
        return compute(self._model, name).astype(self._types[name], copy=False) if found is None else found

    def __contains__(self, name: object) -> bool:
        """Return True if the value is known; compute nothing."""
        return name in self._kept or name in self._types

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names."""
        yield from self._kept
        yield from self._types

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._kept) + len(self._types)


def heavy(model: ir.Model, constants: Collection[str]) -> list[str]:
    """Return the computed constants that depend on a large external weight, in graph order.

    Nodes that also read a model input cannot be computed from weights alone, such as a CastLike that borrows a type.
    """
    found = {
        name
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, Mapped) and value.const_value.nbytes >= HEAVY
    }
    fed = {v.name for v in model.graph.inputs} - set(model.graph.initializers)
    names: list[str] = []
    for node in model.graph if found else ():
        read, made = {v.name for v in node.inputs if v is not None}, [v.name for v in node.outputs if v.name]
        if read & fed:
            fed.update(made)
        elif read & found:
            names += [name for name in made if name in constants]
            found.update(made)
    return names


def compute(model: ir.Model, name: str) -> Array:
    """Return the value of a computed constant."""
    graph = ir.convenience.extract(model.graph, [], [name])
    graph.opset_imports.update(model.opset_imports)
    piece = ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))
    with open_session(to_bytes(piece), Setup.as_is()) as session:
        return session.run({})[name]
