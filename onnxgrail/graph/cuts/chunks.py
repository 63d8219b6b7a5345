"""Cut a graph into chunks that are fitted one by one, at places where only one activation is alive."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.graph.cuts.live import Lives
from onnxgrail.graph.fittable.trainable import Trainable
from onnxgrail.graph.trace.facts import key

MIXING = frozenset({"Softmax", "Attention", "MultiHeadAttention", "GroupQueryAttention"})

LONG = 12  # nodes; in smaller graphs no live range counts as too long


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of nodes.

    Attributes:
        begin, end: node positions.
        last: name of the last node's output.
        heavy: number of products with weight matrices.
    """

    begin: int
    end: int
    last: str
    heavy: int


def chunks(model: ir.Model, found: Trainable, lives: Lives) -> list[Chunk]:
    """Cut a graph after nodes whose output is the only carrier alive, such as residual sums.

    Carriers that are alive through half of a large graph, such as an encoder's output for the decoder, do not count.
    Pieces without a product join the piece before them.  Pieces with attention join the piece after them: both halves
    of a transformer layer are one chunk.
    """
    nodes = list(model.graph)
    cuts = _cuts(nodes, found.carriers, lives)
    readers = [p for name in found.matrices for p in found.readers[name]]
    pieces: list[Chunk] = []
    for begin, end in zip([0, *cuts], [*cuts, len(nodes)], strict=True):
        heavy = sum(begin <= p < end for p in readers)
        if pieces and not (heavy and pieces[-1].heavy):
            pieces.append(_together([pieces.pop(), Chunk(begin, end, key(nodes[end - 1]), heavy)]))
        else:
            pieces.append(Chunk(begin, end, key(nodes[end - 1]), heavy))
    return _layers(pieces, nodes)


def _layers(pieces: list[Chunk], nodes: list[ir.Node]) -> list[Chunk]:
    """Join every piece with attention and the piece after it, unless that has attention too."""
    found: list[Chunk] = []
    before = False
    for piece in pieces:
        mixes = any(node.op_type in MIXING for node in nodes[piece.begin : piece.end])
        if before and not mixes:
            found.append(_together([found.pop(), piece]))
        else:
            found.append(piece)
        before = mixes
    return found


def _together(pieces: list[Chunk]) -> Chunk:
    return Chunk(pieces[0].begin, pieces[-1].end, pieces[-1].last, sum(p.heavy for p in pieces))


def _cuts(nodes: list[ir.Node], carriers: Collection[str], lives: Lives) -> list[int]:
    """Return the positions after nodes whose output is the only carrier alive."""
    half = max(len(nodes) // 2, LONG)
    steps = np.zeros(len(nodes) + 2, dtype=np.int64)
    made: dict[str, int] = {}
    for name, born, last in zip(lives.names, lives.born.tolist(), lives.last.tolist(), strict=True):
        if name in carriers and last - born <= half:
            steps[born] += 1
            steps[last + 1] -= 1
            made[name] = born
    alive = np.cumsum(steps)
    return [
        position
        for position in range(1, len(nodes))
        if alive[position] == 1 and any(made.get(v.name or "") == position for v in nodes[position - 1].outputs)
    ]
