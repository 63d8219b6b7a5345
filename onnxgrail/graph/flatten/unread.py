"""Leave out weights that nothing reads, such as those of a head that an exporter cut off."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True, slots=True)
class Unread:
    """The weights that nothing reads.

    Attributes:
        weights: how many there are.
        parameters: how many numbers they have.
        nbytes: their size.
    """

    weights: int = 0
    parameters: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        if not self.weights:
            return ""
        what = "1 weight is" if self.weights == 1 else f"{self.weights} weights are"
        return f"{what} left out, since nothing reads them ({self.parameters:,} parameters)"


ALL_READ = Unread()


def drop_unread(model: ir.Model) -> Unread:
    """Remove the initializers of a model that no node reads, in place; inputs and outputs of the model stay."""
    weights = model.graph.initializers
    found = [v for v in weights.values() if not (v.uses() or v.is_graph_output() or v.is_graph_input())]
    for value in found:
        del weights[value.name or ""]
    tensors = [value.const_value for value in found if value.const_value is not None]
    return Unread(len(found), sum(tensor.size for tensor in tensors), sum(tensor.nbytes for tensor in tensors))
