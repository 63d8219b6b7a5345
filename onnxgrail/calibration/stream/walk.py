"""Activations of a model at one cut, which advances chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir

from onnxgrail.calibration.runtime.session import Session, Setup, open_piece
from onnxgrail.core import Array, Feed
from onnxgrail.graph.cuts.live import lives
from onnxgrail.graph.cuts.segment import cut
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.trace.facts import Facts


class Walk:
    """The live tensors of every batch at one cut of a model; weights after the cut may change at any time.

    Attributes:
        model: the model.
        cache: the live tensors, one mapping per batch.
        forward: seconds spent in ONNX Runtime.
    """

    def __init__(self, model: ir.Model, facts: Facts, feeds: Iterable[Feed], *, providers: Sequence[str]) -> None:
        self.model, self._facts = model, facts
        self._providers = tuple(providers)
        self._lives = lives(model, facts, [1] * len(list(model.graph)))
        self.cache: list[dict[str, Array]] = [dict(feed) for feed in feeds]
        self.forward = 0.0

    def piece(self, outputs: Sequence[str]) -> ir.Model:
        """Return the subgraph from the cut to the given tensors."""
        return cut(self.model, list(self.cache[0]), list(outputs), self._facts)

    def source(self, outputs: Sequence[str]) -> Callable[[int], dict[str, Array]]:
        """Return a function from batch number to the given tensors; the cut does not move."""
        session = self._open(outputs)
        return lambda number: self._run(session, self.cache[number])

    def advance(self, position: int, also: Sequence[str] = ()) -> list[dict[str, Array]]:
        """Move the cut to node `position`; return the tensors `also` of each batch."""
        alive = self._lives.at(position)
        fresh = [n for n in dict.fromkeys([*alive, *also]) if n not in self.cache[0]]
        session = self._open(fresh) if fresh else None
        passed = []
        for number, old in enumerate(self.cache):
            found = {**old, **(self._run(session, old) if session is not None else {})}
            passed.append({n: found[n] for n in also})
            self.cache[number] = {n: found[n] for n in alive}
        return passed

    def _run(self, session: Session, cache: dict[str, Array]) -> dict[str, Array]:
        started = time.perf_counter()
        found = session.run(cache)
        self.forward += time.perf_counter() - started
        return found

    def _open(self, outputs: Sequence[str]) -> Session:
        return open_piece(to_bytes(self.piece(outputs)), Setup(providers=self._providers), outputs)
