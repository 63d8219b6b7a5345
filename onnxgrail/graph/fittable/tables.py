"""Find tables whose rows are looked up (embeddings), also those that the model's head multiplies by."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.core import Array
from onnxgrail.graph.attributes import integer, number, numbers_of
from onnxgrail.graph.fittable.matrices import stored, turned_in
from onnxgrail.graph.stored.looked_up import is_pairs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Table:
    """A weight (rows, columns) and all of its readers.

    Attributes:
        weight: the initializer.
        lookups: the Gather nodes that take rows of it.
        products: the nodes that multiply by its transpose: a tied head.
    """

    weight: str
    lookups: tuple[ir.Node, ...]
    products: tuple[ir.Node, ...]

    def array(self, graph: ir.Graph) -> Array:
        """Return the numbers, (rows, columns)."""
        return numbers_of(graph.initializers[self.weight])


def tables(model: ir.Model) -> list[Table]:
    """Return every table whose readers are lookups of rows and products with its transpose."""
    found = []
    for name, tensor, readers in stored(model):
        taken = [node for node, place, turned in readers if node.op_type == "Gather" and (place, turned) == (0, False)]
        lookups = [node for node in taken if integer(node, "axis") in (0, -2)]
        multiplied = [node for node, place, turned in readers if turned_in(node, place, turned) is True]
        products = [n for n in multiplied if number(n, "alpha", 1.0) == number(n, "beta", 1.0) == 1.0]
        if lookups and len(lookups) + len(products) == len(readers) and not is_pairs(tensor):
            found.append(Table(weight=name, lookups=tuple(lookups), products=tuple(products)))
    return found
