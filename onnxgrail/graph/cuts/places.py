"""Positions of refusals and nodes of blocks, so that both can be shown in the order of the network."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import onnx_ir as ir

from onnxgrail.core import Block, Refusal


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


def nodes_of(model: ir.Model, blocks: Iterable[Block]) -> list[list[str]]:
    """Return per block the names of the nodes that read its weights, in the order of the graph."""
    readers: dict[str, list[int]] = {}
    names: list[str] = []
    for position, node in enumerate(model.graph):
        names.append(node.name or str(node.outputs[0].name))
        for value in node.inputs:
            if value is not None and value.name:
                readers.setdefault(value.name, []).append(position)
    places = ({place for slot in block.slots for place in readers.get(slot.initializer, ())} for block in blocks)
    return [[names[place] for place in sorted(found)] for found in places]
