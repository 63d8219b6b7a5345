"""Pieces of the network between cached tensors and computed tensors, one per route through its branches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import onnx_ir as ir

from onnxgrail.calibration.devices.lanes import Lane
from onnxgrail.calibration.runtime.session import Session, Setup, open_piece
from onnxgrail.calibration.runtime.threads import count
from onnxgrail.calibration.stream.relay import DEEP
from onnxgrail.core import Array, Feed
from onnxgrail.graph.cuts.segment import Index, cut, index_of
from onnxgrail.graph.flatten.branches import Route, branched, resolved
from onnxgrail.graph.io.mapped import discard
from onnxgrail.graph.io.serial import pack
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.trace.survey import Ledger, Survey


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """The network with one branch of each If node."""

    model: ir.Model
    index: Index


class Pieces:
    """A context manager that owns the sessions which compute tensors of a batch from cached tensors."""

    def __init__(self, sessions: Sequence[Session | None], lane: Lane) -> None:
        self._sessions, self._lane, self._stack = tuple(sessions), lane, ExitStack()
        for session in {id(session): session for session in sessions if session is not None}.values():
            self._stack.enter_context(session)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def run(self, place: int, cache: Feed) -> dict[str, Array]:
        """Return the tensors computed for the batch at a place, without tensors of branches that it does not take."""
        session = self._sessions[place]
        return {} if session is None else self._lane.run(session, cache)


class Ways:
    """The network along each route of the batches through its If nodes."""

    def __init__(
        self,
        model: ir.Model,
        survey: Survey,
        routes: Sequence[Route],
        providers: Sequence[str],
        lane: Lane,
    ) -> None:
        """Prepare the network of each distinct route; `routes` has one route per batch."""
        self._survey, self._providers, self._lane = survey, tuple(providers), lane
        self._routes = tuple(routes)
        self._ways: Mapping[Route, _Way] = {route: _way(model, route) for route in dict.fromkeys(routes)}

    def made(self, place: int, name: str) -> bool:
        """Return True if the batch at a place computes the tensor."""
        return name in self._ways[self._routes[place]].index.values

    def open(self, outputs: Sequence[str], ledger: Ledger, inputs: Sequence[str], parts: int = 1) -> Pieces:
        """Open sessions from the cached tensors `inputs` to `outputs`, with all decisions applied.

        Args:
            outputs: names of the tensors to compute.
            ledger: the decisions so far.
            inputs: names of the cached tensors.
            parts: number of threads that run the sessions at once.
        """
        sessions = {route: self._session(way, outputs, ledger, inputs, parts) for route, way in self._ways.items()}
        return Pieces([sessions[route] for route in self._routes], self._lane)

    def _session(
        self, way: _Way, outputs: Sequence[str], ledger: Ledger, inputs: Sequence[str], parts: int
    ) -> Session | None:
        ends, starts = ([name for name in names if name in way.index.values] for names in (outputs, inputs))
        if not ends:
            return None
        piece = cut(way.model, starts, ends, self._survey.facts, way.index)
        apply(piece.graph, self._survey, ledger)
        spatial = len(ends) > 8 and any(node.op_type.endswith("Conv") for node in piece.graph)
        data, deep = pack(piece), len(piece.graph) > DEEP
        try:
            threads = None if parts == 1 else count() // parts
            setup = Setup(providers=self._providers, extended=not spatial, threads=threads, deep=deep)
            return open_piece(data, setup, ends)
        finally:
            discard(piece)


def _way(model: ir.Model, route: Route) -> _Way:
    plain = resolved(model, route) if branched(model) else model
    return _Way(plain, index_of(plain.graph))
