"""Calibration activations on their way through the network, one block at a time.

The stream keeps the live tensors at one cut of the graph, for every batch.  `measure` runs from there to a block's
probes, and moves the cut forward through nodes that are final in the same run.  What it measured is kept, too: behind a
block that only lost units it is the narrowed network's activation with some channels too many, so that each node is run
little more than once (GRAIL section 3.2 asks for statistics from the already compressed prefix).
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.branching import Maker
from onnxgrail.calibration.devices.lanes import Lane, lane_of
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.signature import padding_mask
from onnxgrail.calibration.runtime.threads import Step, ahead, pass_by, share, ways
from onnxgrail.calibration.stream import probing
from onnxgrail.calibration.stream.cache import BUDGET, Cache
from onnxgrail.calibration.stream.totals import Totals
from onnxgrail.calibration.stream.ways import Pieces, Ways
from onnxgrail.core import Array, Bools, Feed, Ints, Probe, Stats
from onnxgrail.graph.cost.counting import effort
from onnxgrail.graph.cuts.live import lives
from onnxgrail.graph.cuts.reach import Cone, cone, holds
from onnxgrail.graph.cuts.segment import index_of
from onnxgrail.graph.flatten.branches import Route
from onnxgrail.graph.trace.survey import Ledger, Survey
from onnxgrail.machine.group.sums import SOLO, Group, Shard, shard_of
from onnxgrail.machine.progress import Tick

ABSENT = np.empty(0)  # in the cache: a tensor of a branch that a batch does not take
KEPT = 2**28  # bytes of activations, of all processes, that are kept until the next step


@dataclass(frozen=True, slots=True)
class _Path:
    """Where a walk ends, what the cut keeps there, what has to be computed, and what of that stays beside it."""

    target: int
    keep: Sequence[str]
    missing: Sequence[str]
    beyond: Sequence[str]


class Stream:
    """Owns the cached activations of a calibration run; a context manager that lets them go.

    Where several processes share the work, each has a part of the batches, and only the first one gets the sums.
    """

    def __init__(
        self,
        model: ir.Model,
        survey: Survey,
        batches: Batches,
        *,
        providers: Sequence[str],
        budget: int = BUDGET,
        group: Group = SOLO,
        lane: Lane | None = None,
        routes: Mapping[Maker, Route] | None = None,
    ) -> None:
        self._model, self._survey = model, survey
        self._lane = lane_of(providers) if lane is None else lane
        self._lives = lives(model, survey.facts, effort(model, survey))
        self._index = index_of(model.graph)
        self.position = 0  # of the first node that is still to come
        self.shard = shard_of(group, len(batches))
        taken = [(routes or {}).get(batches.feeds[n], survey.facts.taken) for n in self.shard.numbers]
        self._network = Ways(model, survey, taken, providers, self._lane)
        self._cache = Cache((batches.feeds[number]() for number in self.shard.numbers), budget, self._lane)
        self._masks = [padding_mask(feed) for feed in self._cache]
        self._budget, self._scale = budget, _scale(batches, survey)
        self._dead: dict[str, Bools] = {}  # per cached tensor, what was gone when it was computed
        self._spare: dict[str, tuple[Cone, Ledger]] = {}  # measured tensors beyond the cut: what made them, and when
        self.forward = 0.0  # seconds inside ONNX Runtime
        self._lock = threading.Lock()  # of the cache and the seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cache.clear()

    def advance(self, ledger: Ledger, limit: int) -> None:
        """Move the cut as far forward as is sensible, at most in front of node `limit`.

        Every node before `limit` must be final: no block that is still to be decided touches it.
        """
        if limit > self.position:
            for _ in self._walk((), ledger, limit):
                pass

    def _walk(self, names: Sequence[str], ledger: Ledger, limit: int = 0) -> Iterator[dict[str, Array]]:
        """As `_walking`, one batch after the other."""
        with self._walking(names, ledger, limit) as step:
            yield from ahead(step, range(len(self._cache)))

    @contextmanager
    def _walking(
        self,
        names: Sequence[str],
        ledger: Ledger,
        limit: int = 0,
        kept: Sequence[str] = (),
        spare: Sequence[str] = (),
        parts: int = 1,
    ) -> Iterator[Step[dict[str, Array]]]:
        """What makes tensors of the network as the ledger has it, for each batch once, in any order, from any thread.

        Behind the last one the cut has moved as `advance` says.  Those of `kept` beyond the cut stay in the cache,
        those of `spare` as far as there is room in memory.
        """
        self._forget(ledger)
        path = self._path(names, ledger, limit, kept, spare)
        here, moving = self._cache.names, path.target > self.position
        made = {n: (cone(self._index.values[n], here), ledger) for n in path.beyond if n not in self._spare}
        fit, stays = self._fitting(ledger, here), {*path.keep, *path.beyond}
        fresh = [n for n in path.missing if n in stays]

        def step(place: int) -> dict[str, Array]:
            cache = fit(self._batch(place))
            found = self._run(pieces, place, cache, parts)
            with self._lock:
                if moving:
                    self._cache.trim(place, stays)
                self._cache.add(place, {n: found.get(n, ABSENT) for n in fresh})
            return cache | found

        with self._network.open(path.missing, ledger, here, parts) as pieces:
            yield step
        self._dead.update((n, ledger.dead) for n in fresh)
        self._spare = {n: how for n, how in (self._spare | made).items() if n in self._cache and n not in path.keep}
        self._cache.keep({*path.keep, *self._spare})
        self.position = path.target

    def _path(
        self, names: Sequence[str], ledger: Ledger, limit: int, kept: Sequence[str], spare: Sequence[str]
    ) -> _Path:
        here = self._cache.names
        moving = limit > self.position
        target = self._lives.best(self.position, limit) if moving else self.position
        keep = self._lives.at(target) if moving else [n for n in here if n not in self._spare]
        missing = [n for n in dict.fromkeys((*keep, *names)) if n not in here]
        left = [n for n in spare if n in missing and n not in keep]
        beyond = [n for n in dict.fromkeys(kept) if n not in keep]
        return _Path(target, keep, missing, [*beyond, *self._affordable(left, {*here, *missing}, ledger)])

    def _affordable(self, names: Sequence[str], held: Collection[str], ledger: Ledger) -> list[str]:
        """Those that are kept: the first ones that would fit into memory beside all that is held meanwhile.

        What is kept decides from where later tensors are computed, and so their last bits.  So it must not depend on
        how many processes share the batches: the sizes are those of all batches together.
        """
        rest = sum(self._bytes(n, ledger) for n in held if n not in names)
        room = min(KEPT, self._budget - rest)
        sizes = itertools.accumulate(self._bytes(n, ledger) for n in names)
        return [n for n, size in zip(names, sizes, strict=True) if size <= room]

    def _bytes(self, name: str, ledger: Ledger) -> int:
        """About how many a tensor takes over all batches of all processes."""
        size = _bytes(self._survey, name) * self._scale
        for mark in self._survey.marks.get(name, ()):
            size *= float((~ledger.dead[mark.labels]).sum()) / max(1, mark.labels.size)
        return int(size)

    def _fresh(self, ledger: Ledger) -> dict[str, tuple[Cone, Ledger]]:
        """Measured tensors that still hold."""
        return {n: how for n, how in self._spare.items() if holds(how[0], self._survey, how[1], ledger)}

    def _forget(self, ledger: Ledger) -> None:
        """Drop measured tensors that are stale."""
        self._keep_beside(self._fresh(ledger))

    def _keep_beside(self, spare: dict[str, tuple[Cone, Ledger]]) -> None:
        self._cache.keep({n for n in self._cache.names if n not in self._spare or n in spare})
        self._spare = spare

    @property
    def masks(self) -> Sequence[Bools | None]:
        """Per batch, which (sample, token) positions are real; None where all are."""
        return self._masks

    def record(self, names: Sequence[str], ledger: Ledger) -> Iterator[dict[str, Array]]:
        """Tensors of the network as the ledger has it, batch by batch; those of branches not taken are missing."""
        for found in self._walk(names, ledger):
            yield {n: self._lane.host(found[n]) for n in names if n in found}

    @contextmanager
    def following(
        self, names: Sequence[str], ledger: Ledger, limit: int, parts: int
    ) -> Iterator[Step[dict[str, Array]]]:
        """Both in one run: what makes these tensors of a batch, each once, and `advance` to the limit on the way."""
        with self._walking(names, ledger, limit, parts=parts) as step:

            def on_host(place: int) -> dict[str, Array]:
                found = step(place)
                return {n: self._lane.host(found[n]) for n in names if n in found}

            yield on_host

    def measure(
        self,
        probes: Sequence[Probe],
        ledger: Ledger,
        tick: Tick,
        limit: int | None = None,
        goals: Sequence[str] | None = None,
    ) -> tuple[Stats, ...]:
        """Sums over all calibration rows of each probe, in the network as the ledger has it.

        With a `limit` the cut moves as `advance` says in the same run, and what was measured is kept for the next.
        With `goals` these tensors are kept instead, until they are let go; where they are large, the cut stays instead.
        """
        distinct = {probing.same(p): p for p in probes}
        readers = [probing.reader(p, self._model, self._survey, ledger, self._lane) for p in distinct.values()]

        def added(part: Shard, walked: Iterator[dict[str, Array]]) -> Totals:
            totals = Totals(part, tuple(distinct.values()), self._lane)
            for number, found in zip(part.numbers, walked, strict=True):
                mask = self._masks[number - self.shard.numbers.start]
                totals.add(number, (read(found, mask) for read in readers))
                tick()
            return totals

        parts = self._ways(probes)
        with self._past(probes, ledger, limit, goals, parts) as step:
            totals, *others = share(self.shard, parts, step, added)
        totals.join(others)
        known = dict(zip(distinct, totals.stats(), strict=False))
        return tuple(known[probing.same(p)] for p in probes) if known else ()

    def walk_past(
        self, probes: Sequence[Probe], ledger: Ledger, limit: int | None, goals: Sequence[str] | None = None
    ) -> None:
        """What `measure` does with the same arguments, but for the sums."""
        parts = self._ways(probes)
        with self._past(probes, ledger, limit, goals, parts) as step:
            pass_by(self.shard, parts, step)

    def _past(
        self, probes: Sequence[Probe], ledger: Ledger, limit: int | None, goals: Sequence[str] | None, parts: int
    ) -> AbstractContextManager[Step[dict[str, Array]]]:
        names = probing.names(probes)
        if goals is None:
            return self._walking(names, ledger, limit or 0, spare=names if limit is not None else (), parts=parts)
        if sum(self._bytes(name, ledger) for name in goals) > KEPT:
            return self._walking(names, ledger, parts=parts)
        return self._walking([*names, *goals], ledger, limit or 0, kept=goals, parts=parts)

    def ways(self, room: int) -> int:
        """In how many parts the batches are gone through, where the sums of each take `room` bytes on the host."""
        return 1 if self._lane.whole else ways(self.shard, room)

    def _ways(self, probes: Sequence[Probe]) -> int:
        return self.ways(12 * sum(p.numbers for p in {probing.same(p): p for p in probes}.values()))

    def holds(self, names: Sequence[str]) -> bool:
        """Whether all these tensors are at hand."""
        return all(name in self._cache for name in names)

    def let_go(self) -> None:
        """Drop what is kept beside the cut."""
        self._keep_beside({})

    def measure_fold(self, probes: Sequence[Probe], kept: Ints, before: Ledger, after: Ledger) -> tuple[Stats, ...]:
        """Joint sums of each probe's features before and after a fold: u units, then the k that stay."""
        names = probing.names(probes)
        pairs = [probing.paired(p, kept) for p in probes]
        totals = Totals(self.shard, pairs, self._lane)
        fresh = self._fresh(after)
        inputs = [n for n in self._cache.names if n not in self._spare or n in fresh]
        fit_before, fit_after = self._fitting(before, inputs), self._fitting(after, inputs)
        source = self._model, self._survey
        readers = [probing.joint(p, kept, *source, before, after, self._lane) for p in probes]
        with self._network.open(names, before, inputs) as wide, self._network.open(names, after, inputs) as narrow:
            for place, (batch, mask) in enumerate(zip(self.shard.numbers, self._masks, strict=True)):
                cache = self._batch(place)
                old, new = self._run(wide, place, fit_before(cache)), self._run(narrow, place, fit_after(cache))
                totals.add(batch, (read(old, new, mask) for read in readers))
        return totals.stats()

    def _fitting(self, ledger: Ledger, names: Sequence[str]) -> Callable[[Feed], dict[str, Array]]:
        """What makes cached tensors as the ledger has them: they may be older than some decisions."""
        cuts: list[tuple[str, int, Bools]] = []
        for name in names:
            for mark in self._survey.marks.get(name, ()):
                gone = ledger.dead[mark.labels]
                there = ~self._dead[name][mark.labels] if name in self._dead else np.ones_like(gone)
                if gone[there].any():
                    cuts.append((name, mark.axes[0], ~gone[there]))

        def fit(cache: Feed) -> dict[str, Array]:
            found = dict(cache)
            for name, axis, stays in (one for one in cuts if one[0] in found):
                found[name] = self._lane.compress(stays, found[name], axis=axis)
            return found

        return fit

    def _batch(self, place: int) -> dict[str, Array]:
        """The cached tensors that a batch comes to."""
        return {name: array for name, array in self._cache.batch(place).items() if self._network.made(place, name)}

    def _run(self, pieces: Pieces, place: int, cache: Feed, parts: int = 1) -> dict[str, Array]:
        started = time.perf_counter()
        found = pieces.run(place, cache)
        seconds = time.perf_counter() - started
        with self._lock:
            self.forward += seconds / parts
        return found


def _scale(batches: Batches, survey: Survey) -> float:
    """How many times more than in the traced run goes through the network over all batches."""
    first = batches.feeds[0]()
    return len(batches) * sum(a.nbytes for a in first.values()) / max(1, sum(_bytes(survey, name) for name in first))


def _bytes(survey: Survey, name: str) -> int:
    """What a tensor took in the traced run."""
    facts = survey.facts
    return math.prod(facts.shapes[name]) * facts.dtypes[name].itemsize if name in facts.shapes else 0
