"""Runs of a deep network in stretches of nodes; only the tensors that later stretches read stay in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Self

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.runtime.session import CPU, Session, Setup, open_session
from onnxgrail.core import Array, Feed
from onnxgrail.errors import ModelError
from onnxgrail.graph.cuts.live import lives
from onnxgrail.graph.cuts.segment import cut, index_of
from onnxgrail.graph.flatten.branches import branched
from onnxgrail.graph.io.running.widen import wide
from onnxgrail.graph.io.serial import pack
from onnxgrail.graph.trace.facts import Facts, constants

STRETCH = 128  # nodes: a few transformer layers; smaller models run in one piece
SHORT = 16  # nodes, where the tensors of a few layers take much memory
DEEP = 512  # nodes; opening a larger model as a whole takes quadratic time


class Relay:
    """A context manager that runs a model stretch by stretch and owns the sessions, which it opens on the first run.

    Weights are not copied and graph optimization is off, so opening a stretch takes time in proportion to its nodes.
    """

    def __init__(
        self,
        model: ir.Model,
        names: Collection[str],
        constants: Collection[str],
        *,
        stretch: int | None = None,
        providers: Sequence[str] = CPU,
    ) -> None:
        """Split the model into stretches.

        Args:
            model: the model.
            names: names of the tensors that `run` yields.
            constants: names of tensors without dependence on inputs; each stretch computes them again.
            stretch: maximum number of nodes per stretch; `STRETCH` by default.
            providers: execution providers of ONNX Runtime.
        """
        self._model, self._providers = model, tuple(providers)
        self._names, self._constants = frozenset(names), frozenset(constants)
        self._nodes = list(model.graph)
        self._lives = lives(model, _facts({}, self._constants), [0] * len(self._nodes))
        self._stops = self._narrowest(stretch or STRETCH)
        self._index = index_of(model.graph)
        self._stack, self._sessions = ExitStack(), list[Session | None]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, feed: Feed) -> Iterator[Feed]:
        """Yield the named tensors of each stretch; each mapping is emptied when the next one is requested.

        Raises:
            ModelError: ONNX Runtime does not load a stretch, or fails on this feed.
        """
        here = dict(feed)
        for number, (start, stop) in enumerate(pairwise((0, *self._stops))):
            later = self._lives.at(stop) if stop < len(self._nodes) else []
            if number == len(self._sessions):
                made = [v.name for node in self._nodes[start:stop] for v in node.outputs if v.name]
                self._sessions.append(self._open(here, [n for n in made if n in self._names], later))
            session = self._sessions[number]
            found = session.run(here) if session is not None else {}
            here = {**feed, **{n: a for n, a in (here | found).items() if n in later}}
            yield found
            found.clear()

    def _narrowest(self, stretch: int) -> list[int]:
        """Return the end of each stretch: in its second half, the node with the fewest live tensors."""
        stops, count = [0], len(self._nodes)
        while count - stops[-1] > stretch:
            near = range(stops[-1] + stretch // 2 + 1, stops[-1] + stretch + 1)
            stops.append(min(reversed(near), key=lambda cut: len(self._lives.at(cut))))
        return [*stops[1:], count]

    def _open(self, here: Feed, wanted: Sequence[str], later: Sequence[str]) -> Session | None:
        """Open the session of a stretch; None if the stretch computes no tensor that is needed."""
        setup = Setup.as_is(self._providers)
        if len(self._stops) == 1:
            return self._stack.enter_context(open_session(pack(self._model, outputs=wanted), setup))
        outputs = list(dict.fromkeys((*wanted, *(n for n in later if n not in here))))
        if not outputs:
            return None
        try:
            piece = cut(self._model, list(here), outputs, _facts(here, self._constants), self._index)
        except (KeyError, ValueError, RuntimeError) as error:  # onnx-ir raises the last
            raise ModelError(f"there is no stretch up to {outputs[-1]}") from error
        declared = {value.name: value.shape for value in self._model.graph.inputs}
        for value in piece.graph.inputs:  # a stretch must accept only the shapes that the model accepts
            value.shape = declared.get(value.name, value.shape)
        return self._stack.enter_context(open_session(pack(piece), setup, outputs=outputs))


def in_pieces(
    model: ir.Model, feeds: Sequence[Feed], providers: Sequence[str] = CPU, names: Sequence[str] | None = None
) -> list[dict[str, Array]] | None:
    """Return the outputs of a deep model, or the named tensors, one mapping per feed.

    Returns:
        None if the model has fewer than `DEEP` nodes, has branches, or a stretch fails; run it as a whole then.
    """
    outputs = [value.name or "" for value in model.graph.outputs] if names is None else names
    made = {v.name for node in model.graph for v in node.outputs if v.name}
    if len(model.graph) < DEEP or branched(model) or not set(outputs) <= made:
        return None
    try:
        with Relay(model, outputs, constants(model), providers=providers) as relay:
            return [_collected(relay, feed, outputs) for feed in feeds]
    except ModelError:
        return None


def _collected(relay: Relay, feed: Feed, outputs: Sequence[str]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for made in relay.run({name: wide(array) for name, array in feed.items()}):
        found.update(made)
    if missing := set(outputs) - found.keys():
        raise ModelError(f"no stretch makes {', '.join(sorted(missing))}")
    return {name: found[name] for name in outputs}


def _facts(here: Feed, constants: frozenset[str]) -> Facts:
    """Return shapes, dtypes and constants of the tensors that enter a stretch."""
    arrays = {name: array for name, array in here.items() if isinstance(array, np.ndarray)}
    return Facts(
        shapes={name: array.shape for name, array in arrays.items()},
        dtypes={name: array.dtype for name, array in arrays.items()},
        values={},
        constants=constants,
        varying={},
    )
