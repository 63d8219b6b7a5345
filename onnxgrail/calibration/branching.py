"""The branches of If nodes that the data take, and the facts observed along each route."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.signature import WHOLE, samples_of, signature_of
from onnxgrail.calibration.observe import observe, probe_feed
from onnxgrail.calibration.runtime.session import Session, Setup, open_session
from onnxgrail.core import Array, Feed
from onnxgrail.errors import ModelError, StoppedError
from onnxgrail.graph.attributes import NCHWC
from onnxgrail.graph.flatten.branches import Route, resolved, unfolded
from onnxgrail.graph.flatten.known import store_parts
from onnxgrail.graph.flatten.taps import tapped
from onnxgrail.graph.io.model_file import HEAVY, weight_bytes
from onnxgrail.graph.io.serial import pack
from onnxgrail.graph.trace.facts import Facts, constants

Maker = Callable[[], Feed]
BLOCKED = (
    "ONNX Runtime has optimized this file for one processor, and others have blocks of other sizes: give the file as "
    "it was before"
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Seen:
    """A model that has been run on data.

    Attributes:
        model: the graph with the branches of its If nodes inlined.
        feed: a small feed.
        facts: observations on it, and on another feed for every branch that only other samples take.
        routes: the branches that each feed of the data takes; empty for a model without branches.
    """

    model: ir.Model
    feed: Mapping[str, Array]
    facts: Facts
    routes: Mapping[Maker, Route] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Return True if each feed is one sample, see `Input.whole`."""
        return bool(self.model.meta.get(WHOLE))

    @property
    def is_one(self) -> bool:
        """Return True if a feed of which the model takes no part is one sample: no output has an axis of its size."""
        rows = {array.shape[0] for array in self.feed.values() if array.ndim}
        sizes = [size for value in self.model.graph.outputs for size in self.facts.shapes.get(value.name or "", ())]
        counted = any(size % row == 0 for size in sizes for row in rows)
        return len(rows) == 1 and min(rows) > 1 and (not counted or all(a.ndim == 1 for a in self.feed.values()))

    @property
    def bytes_each(self) -> int:
        """Return the bytes of all activations of a sample."""
        names = {value.name or "" for node in self.model.graph for value in node.outputs} - self.facts.constants
        return sum(map(self.facts.bytes_of, names)) // max(1, samples_of(self.feed, signature_of(self.model)))


class Routes:
    """A context manager with a session that determines which branches a feed takes."""

    def __init__(self, model: ir.Model, providers: Sequence[str]) -> None:
        packed, self._names = tapped(model)
        self._session: Session = open_session(packed, Setup.as_is(providers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._session.close()

    def of(self, feed: Feed) -> Route:
        """Return the branches that a feed takes.

        Raises:
            ModelError: the model does not run on it.
        """
        told = {self._names[name]: array for name, array in self._session.run(feed).items()}
        return frozenset((key, "then" if array.item() else "else") for key, array in told.items() if array.size)


def look(model: ir.Model, batches: Batches, providers: Sequence[str]) -> Seen:
    """Run a model on two samples, or on the whole first feed if it accepts no other batch size.

    If other samples take other branches, it is run on some of those samples too.

    Raises:
        ModelError: it does not run on the data, or the runtime does not load it.
    """
    flat = unfolded(model)
    if flat is not model:
        _load(model, providers)
        with _passing_over():
            return _look_along(flat, batches, providers)
    first = batches.first()
    small = probe_feed(first, signature_of(model))
    see = functools.partial(observe, model, providers=providers, others=batches.feeds)
    try:
        facts = see(small)
        return Seen(model=model, feed=small, facts=see(small) if store_parts(model, facts) else facts)
    except ModelError as error:
        if all(np.array_equal(small[name], first[name]) for name in small):
            raise _explained(error, model, batches) from error
    try:
        seen = Seen(model=model, feed=first, facts=see(first))
    except ModelError as error:
        raise _explained(error, model, batches) from error
    model.meta[WHOLE] = seen.whole or seen.is_one
    return seen


def _load(model: ir.Model, providers: Sequence[str]) -> None:
    """Raise the error of the runtime if it does not load a model: branches that no sample takes count there, too."""
    if weight_bytes(model) <= HEAVY:
        open_session(pack(model), Setup.as_is(providers)).close()


def look_once(model: ir.Model, feed: Feed, providers: Sequence[str]) -> tuple[ir.Model, Facts]:
    """Return the graph with branches inlined if possible, and the facts observed on the feed as it is.

    Raises:
        ModelError: the model does not run on it.
    """
    flat = unfolded(model)
    if flat is not model:
        with _passing_over(), Routes(flat, providers) as routes:
            return flat, _facts(flat, feed, routes, providers)
    return model, observe(model, feed, providers=providers)


@contextlib.contextmanager
def _passing_over() -> Iterator[None]:
    """Ignore a model error, so that the caller can run the model in another way, with If nodes as plain operators.

    Raises:
        StoppedError: a run took too long; another run would too.
    """
    try:
        yield
    except StoppedError:
        raise
    except ModelError:
        pass


def _explained(error: ModelError, model: ir.Model, batches: Batches) -> ModelError:
    if error.hint:  # it failed before any input was read
        return error
    blocked = any(node.domain == NCHWC for node in model.graph)
    hint = BLOCKED if blocked else batches.hint or "The model must run before it can be compressed"
    return type(error)(str(error), hint=hint)


def _look_along(flat: ir.Model, batches: Batches, providers: Sequence[str]) -> Seen:
    with Routes(flat, providers) as routes:
        found = {make: routes.of(make()) for make in batches.feeds}
        feed, facts = _probed(flat, batches.first(), routes, frozenset(found.values()), providers)
        for make, route in found.items():
            if not route <= facts.taken:
                facts = _joined(facts, *_probed(flat, make(), routes, frozenset({route}), providers))
    return Seen(model=flat, feed=feed, facts=facts, routes=found)


def _probed(
    flat: ir.Model, feed: Feed, routes: Routes, known: frozenset[Route], providers: Sequence[str]
) -> tuple[Feed, Facts]:
    """Return facts from a small feed if it takes a known route, else from the whole feed."""
    with _passing_over():
        small = probe_feed(feed, signature_of(flat))
        if routes.of(small) in known:
            return small, _facts(flat, small, routes, providers)
    return feed, _facts(flat, feed, routes, providers)


def _facts(flat: ir.Model, feed: Feed, routes: Routes, providers: Sequence[str]) -> Facts:
    """Return facts along the route of a feed; its resized variant counts only if it takes the same route."""
    route = routes.of(feed)
    facts = observe(resolved(flat, route), feed, providers=providers, known=constants(flat))
    return dataclasses.replace(facts, taken=route, other=_same_way(facts.other, route, routes))


def _same_way(feed: Feed | None, route: Route, routes: Routes) -> Feed | None:
    same = False
    with _passing_over():
        same = feed is not None and routes.of(feed) == route
    return feed if same else None


def _joined(facts: Facts, feed: Feed, more: Facts) -> Facts:
    """Return the facts, with additional facts from another feed."""

    def both(name: str) -> Any:
        return ChainMap(*(cast("dict[str, Any]", getattr(one, name)) for one in (facts, more)))

    return Facts(
        shapes=both("shapes"),
        dtypes=both("dtypes"),
        values=both("values"),
        constants=facts.constants | more.constants,
        varying=both("varying"),
        other=facts.other,
        stored=both("stored"),
        grids=both("grids"),
        taken=facts.taken | more.taken,
        more=(*facts.more, feed),
    )
