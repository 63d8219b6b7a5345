"""A model's activations on their way through it, chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir

from onnxgrail.calibration.runtime.session import Session, open_piece
from onnxgrail.core import Array, Feed
from onnxgrail.graph.cuts.live import lives
from onnxgrail.graph.cuts.segment import cut
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.trace.facts import Facts


class Walk:
    """Owns the tensors that are alive at one cut of a model, for every batch; its weights may change in front of it.

    Attributes:
        cache: those tensors; forward: seconds inside ONNX Runtime.
    """

    def __init__(self, model: ir.Model, facts: Facts, feeds: Iterable[Feed], *, providers: Sequence[str]) -> None:
        self.model, self._facts = model, facts
        self._providers = tuple(providers)
        self._lives = lives(model, facts, [1] * len(list(model.graph)))
        self.cache: list[dict[str, Array]] = [dict(feed) for feed in feeds]
        self.forward = 0.0

    def piece(self, outputs: Sequence[str]) -> ir.Model:
        """The graph from here to some tensors."""
        return cut(self.model, list(self.cache[0]), list(outputs), self._facts)

    def source(self, outputs: Sequence[str]) -> Callable[[int], dict[str, Array]]:
        """Tensors further on, by number of batch, without going there."""
        session = self._open(outputs)
        return lambda number: self._run(session, self.cache[number])

    def advance(self, position: int, also: Sequence[str] = ()) -> list[dict[str, Array]]:
        """Go on to a cut; returns tensors passed on the way, batch by batch."""
        alive = self._lives.at(position)
        fresh = [n for n in dict.fromkeys([*alive, *also]) if n not in self.cache[0]]
        session = self._open(fresh) if fresh else None
        passed = []
        for number, old in enumerate(self.cache):
            found = {**old, **(self._run(session, old) if session is not None else {})}
            passed.append({n: found[n] for n in also})
            self.cache[number] = {n: found[n] for n in alive}
        return passed

    def alive(self, position: int) -> list[str]:
        """Names of the tensors that a cut keeps."""
        return self._lives.at(position)

    def _run(self, session: Session, cache: dict[str, Array]) -> dict[str, Array]:
        started = time.perf_counter()
        found = session.run(cache)
        self.forward += time.perf_counter() - started
        return found

    def _open(self, outputs: Sequence[str]) -> Session:
        return open_piece(to_bytes(self.piece(outputs)), providers=self._providers, outputs=outputs)
