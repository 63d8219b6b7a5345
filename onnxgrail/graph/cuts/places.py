"""Add node positions to refusals, so that they can be listed in the order of the network."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import onnx_ir as ir

from onnxgrail.core import Refusal


def located(model: ir.Model, refusals: Iterable[Refusal]) -> tuple[Refusal, ...]:
    """Return the refusals with the positions of their nodes, or of their values' producers if no node is named.

    A refusal at an output of the model has the position after the last node; if nothing is found, it is None.
    """
    graph = model.graph
    places: dict[str, int] = {}
    for position, node in enumerate(graph):
        for value in node.outputs:
            if value.name:
                places.setdefault(value.name, position)
    ends = {value.name: len(graph) for value in graph.outputs if value.name}
    places |= {node.name: position for position, node in reversed(list(enumerate(graph))) if node.name}

    def place(refusal: Refusal) -> int | None:
        if refusal.op == "output" and refusal.node in ends:
            return ends[refusal.node]
        return places.get(refusal.node, places.get(refusal.value))

    return tuple(dataclasses.replace(refusal, position=place(refusal)) for refusal in refusals)
