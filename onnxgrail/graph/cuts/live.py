"""Live ranges of tensors: the places where a run of the network can be stopped and resumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Ints
from onnxgrail.graph.trace.facts import Facts, captures

SEQUENCES = frozenset({"SplitToSequence", "SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SequenceErase"})
PASSING = frozenset({"Identity", "If", "Loop", "SequenceMap"})  # what they make of sequences may be sequences


@dataclass(frozen=True, slots=True, eq=False)
class Lives:
    """The live ranges of all activations, in node positions.  A cut at c is before node c.

    Attributes:
        names: activations; born: first cut at which each exists; last: last node that reads it.
        load: (nodes + 1,) bytes alive at every cut, without model inputs, which are kept anyway.
        work: (nodes + 1,) effort of all nodes before every cut.
    """

    names: tuple[str, ...]
    born: Ints
    last: Ints
    load: Ints
    work: Ints

    def at(self, position: int) -> list[str]:
        """Return the names of the tensors that a cut must keep."""
        return [self.names[k] for k in np.flatnonzero((self.born <= position) & (self.last >= position)).tolist()]

    def best(self, low: int, high: int, again: float = 0.2, slack: float = 1.5) -> int:
        """Return a cut in [low, high] that keeps few bytes, close to `high`.

        Work between the cut and `high` is repeated in the next run, so only cuts that leave at most a share `again` of
        the work in [low, high] are considered.  A run through the network then costs at most 1 / (1 - again) of its
        nodes.

        Args:
            low: first node position.
            high: last node position.
            again: the largest share of the work to repeat.
            slack: the latest cut within this factor of the smallest load is chosen.
        """
        left = self.work[high] - self.work[low : high + 1]
        near = left <= again * left[0]
        load = np.where(near, self.load[low : high + 1], np.iinfo(np.int64).max)
        return low + int(np.flatnonzero(load <= slack * load.min())[-1])


def lives(model: ir.Model, facts: Facts, effort: Sequence[int]) -> Lives:
    """Compute live ranges over the nodes of a graph; constants and values computed from them have none.

    Sequences have none either: no cut keeps them, so the tensors of which they are made live as long.

    Args:
        model: the graph.
        facts: shapes and constants.
        effort: cost of each node, in any unit.
    """
    born: dict[str, int] = {v.name: 0 for v in model.graph.inputs if v.name and v.name not in facts.constants}
    inputs = set(born)
    last: dict[str, int] = {}
    parts: dict[str, set[str]] = {}  # of sequences
    count = 0
    for position, node in enumerate(model.graph):
        count = position + 1
        names = {v.name for v in node.inputs if v is not None and v.name} | captures(node)
        read = names.union(*(parts.get(name, ()) for name in names)) & born.keys()
        last.update(dict.fromkeys(read, position))
        handles = node.op_type in SEQUENCES or (node.op_type in PASSING and not names.isdisjoint(parts))
        for name in (value.name for value in node.outputs if value.name):
            if handles and name not in facts.shapes:
                parts[name] = read
            elif name not in facts.constants:
                born[name] = position + 1
    alive = [n for n in born if n in last]
    load = np.zeros(count + 2, dtype=np.int64)
    for name in alive:
        if name not in inputs and name in facts.shapes:
            size = facts.bytes_of(name)
            load[born[name]] += size
            load[last[name] + 1] -= size
    starts = np.array([born[n] for n in alive], dtype=np.int64)
    stops = np.array([last[n] for n in alive], dtype=np.int64)
    work = np.concatenate([[0], np.cumsum(np.asarray(effort, dtype=np.int64))])
    return Lives(tuple(alive), starts, stops, np.cumsum(load)[: count + 1], work)
