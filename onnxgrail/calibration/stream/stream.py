"""The calibration activations of all batches at one cut of the network, which advances block by block.

`measure` runs from the cut to a block's probes and, in the same run, moves the cut through nodes that are final.  The
measured tensors are cached too: after a block that only lost channels they are the pruned network's activations with
extra channels, so each node runs little more than once.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Self

import numpy as np

from onnxgrail.calibration.devices.lanes import Lane, lane_of
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.runtime.threads import Step, ahead, pass_by, share, ways
from onnxgrail.calibration.stream import probing
from onnxgrail.calibration.stream.cache import BUDGET, Beginning, Cache, Opened
from onnxgrail.calibration.stream.cutting import Path, narrowing
from onnxgrail.calibration.stream.sizes import affordable, bytes_left, scale_of
from onnxgrail.calibration.stream.totals import Totals
from onnxgrail.calibration.stream.ways import Pieces, Ways
from onnxgrail.core import Array, Bools, Feed, Ints, Probe, Stats
from onnxgrail.graph.cost.counting import effort
from onnxgrail.graph.cuts.live import lives
from onnxgrail.graph.cuts.reach import Cone, Validity, cone
from onnxgrail.graph.cuts.segment import index_of
from onnxgrail.graph.io.model_file import weight_bytes
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.group.sums import FIRST, SOLO, Group, Owners, Shard, shard_of
from onnxgrail.machine.progress import Tick

ABSENT = np.empty(0)  # placeholder in the cache for a tensor of a branch that a batch does not take
MUCH = 2**28  # bytes of weights that one run of the whole network may read: a session can take four times that
KEPT = 2**28  # bytes of measured activations, over all processes, that stay cached


class Stream:
    """A context manager that owns the cached activations of a calibration run.

    If several processes share the work, each has some of the batches, and each statistic goes to those that own it.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        providers: Sequence[str],
        budget: int = BUDGET,
        group: Group = SOLO,
        lane: Lane | None = None,
        beginning: Beginning | None = None,
    ) -> None:
        self._model, self._survey, self._batches = prepared.model, prepared.survey, prepared.batches
        model, survey, feeds = self._model, self._survey, self._batches.feeds
        self._lane = lane_of(providers) if lane is None else lane
        self._probed = probing.Network(model, survey, self._lane)
        self.lives = lives(model, survey.facts, effort(model, survey))
        self.index, self.heavy = index_of(model.graph), weight_bytes(model) > MUCH
        self.position = 0 if beginning is None else beginning.position  # of the first node after the cut
        self.shard = shard_of(group, len(feeds))
        taken = [prepared.routes.get(feeds[n], survey.facts.taken) for n in self.shard.numbers]
        self._network = Ways(model, survey, taken, providers, self._lane)
        self._budget, self._beginning = budget, beginning
        self._skipped: list[Callable[[], None]] = []  # walks whose sums are cached
        self._dead: dict[str, Bools] = {}  # per cached tensor, the channels pruned when it was computed
        self._spare: dict[str, tuple[Cone, Ledger]] = {}  # measured tensors beyond the cut, with their cone and ledger
        self.forward = 0.0  # seconds inside ONNX Runtime
        self._lock = threading.Lock()  # guards the cache and `forward`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if "_opened" in self.__dict__:
            self._cache.clear()

    @functools.cached_property
    def _opened(self) -> Opened:
        begun, self._beginning = self._beginning, None  # the cache drops tensors as the cut moves
        if begun is not None:
            return Opened.at(begun, self._budget, self._lane)
        feeds = (self._batches.feeds[number]() for number in self.shard.numbers)
        return Opened.of(feeds, scale_of(self._batches, self._survey), self._budget, self._lane)

    @property
    def _cache(self) -> Cache:
        return self._opened.cache

    def later(self, walk: Callable[[], None]) -> None:
        """Leave out a walk until the stream is needed, which then takes all of them in order."""
        self._skipped.append(walk)

    def _catch_up(self) -> None:
        walks, self._skipped = self._skipped, []
        for walk in walks:
            walk()

    def advance(self, ledger: Ledger, limit: int) -> None:
        """Move the cut forward, at most to just before node `limit`; no undecided block may touch an earlier node."""

        def walk() -> None:
            if limit > self.position:
                for _ in self._walk((), ledger, limit):
                    pass

        self.later(walk)

    def _walk(self, names: Sequence[str], ledger: Ledger, limit: int = 0) -> Iterator[dict[str, Array]]:
        """Run `_walking` for all batches in order."""
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
        """Yield a function that computes the named tensors of one batch, in the ledger's state.

        Call it once for each batch; order and thread do not matter.  After the last batch the cut has moved as in
        `advance`.

        Args:
            names: the tensors to compute.
            ledger: the decisions so far.
            limit: as in `advance`; 0 leaves the cut where it is.
            kept: tensors beyond the cut that stay in the cache.
            spare: tensors beyond the cut that stay in the cache if memory allows.
            parts: number of threads that call the function.
        """
        self._catch_up()
        self._keep_beside(self._fresh(ledger))
        path = self._path(names, ledger, limit, kept, spare)
        here, moving = self._cache.names, path.target > self.position
        made = {n: (cone(self.index.values[n], here), ledger) for n in path.beyond if n not in self._spare}
        fit, stays = narrowing(self._survey, ledger, self._dead, here, self._lane), {*path.keep, *path.beyond}
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
    ) -> Path:
        here = self._cache.names
        moving = limit > self.position
        target = self.lives.best(self.position, limit) if moving else self.position
        keep = self.lives.at(target) if moving else [n for n in here if n not in self._spare]
        missing = [n for n in dict.fromkeys((*keep, *names)) if n not in here]
        left = [n for n in spare if n in missing and n not in keep]
        beyond = [n for n in dict.fromkeys(kept) if n not in keep]
        size = functools.partial(self._bytes, ledger=ledger)
        some = affordable(left, {*here, *missing}, size, KEPT, self._budget)
        return Path(target, keep, missing, [*beyond, *some])

    def _bytes(self, name: str, ledger: Ledger) -> int:
        return bytes_left(self._survey, name, ledger, self._opened.scale)

    def _fresh(self, ledger: Ledger) -> dict[str, tuple[Cone, Ledger]]:
        """Return the measured tensors that are still valid under the ledger."""
        validity = Validity(self._survey, ledger)
        return {n: how for n, how in self._spare.items() if validity.holds(*how)}

    def _keep_beside(self, spare: dict[str, tuple[Cone, Ledger]]) -> None:
        self._cache.keep({n for n in self._cache.names if n not in self._spare or n in spare})
        self._spare = spare

    @property
    def lane(self) -> Lane:
        """Return the lane, which knows where activations are."""
        return self._lane

    @property
    def masks(self) -> Sequence[Bools | None]:
        """Return, per batch, the mask (sample, token) of real tokens; None if a batch has no padding."""
        return self._opened.masks

    @property
    def samples(self) -> Sequence[int]:
        """Return the number of samples of every batch."""
        return self._opened.samples

    def place(self) -> Beginning:
        """Return the cut with its tensors on the host, where other streams of this process may begin."""
        self._catch_up()
        tensors = tuple({n: self._lane.host(a) for n, a in batch.items()} for batch in self._cache)
        return Beginning(self.position, tensors, self.masks, self.samples, self._opened.scale)

    def record(self, names: Sequence[str], ledger: Ledger) -> Iterator[dict[str, Array]]:
        """Yield the named tensors batch by batch, in the ledger's state; tensors of branches not taken are missing."""
        for found in self._walk(names, ledger):
            yield {n: self._lane.host(found[n]) for n in names if n in found}

    def following(
        self, names: Sequence[str], ledger: Ledger, limit: int, parts: int
    ) -> AbstractContextManager[Step[dict[str, Array]]]:
        """Return a context with a function that computes the named tensors of a batch and leaves them in the lane.

        The same run advances the cut up to `limit`.
        """
        return self._walking(names, ledger, limit, parts=parts)

    def measure(
        self,
        probes: Sequence[Probe],
        ledger: Ledger,
        tick: Tick,
        limit: int | None = None,
        goals: Sequence[str] | None = None,
        owners: Sequence[Owners] | None = None,
    ) -> tuple[Stats | None, ...]:
        """Compute the statistics of each probe over all calibration rows, in the ledger's state.

        Args:
            probes: the probes to measure.
            ledger: the decisions so far.
            tick: called once per batch.
            limit: if given, the same run moves the cut as `advance` does, and the measured tensors stay cached.
            goals: tensors that stay cached in place of the measured ones, until `let_go`. If they are too large, they
                are not cached and the cut stays where it is.
            owners: per probe, the processes that get its statistics, others get None; equal probes have the same. None
                stands for the first process.
        """
        distinct = {probing.same(p): p for p in probes}
        readers = [probing.reader(p, self._probed, ledger) for p in distinct.values()]

        def added(part: Shard, walked: Iterator[dict[str, Array]]) -> Totals:
            totals = Totals(part, tuple(distinct.values()), self._lane)
            for number, found in zip(part.numbers, walked, strict=True):
                mask = self.masks[number - self.shard.numbers.start]
                totals.add(number, (read(found, mask) for read in readers))
                tick()
            return totals

        parts = self._ways(probes)
        with self._past(probes, ledger, limit, goals, parts) as step:
            totals, *others = share(self.shard, parts, step, added)
        totals.join(others)
        places = {probing.same(probe): number for number, probe in enumerate(probes)}
        found = totals.stats(None if owners is None else [owners[places[key]] for key in distinct])
        return tuple(dict(zip(distinct, found, strict=True))[probing.same(p)] for p in probes)

    def skip(
        self,
        probes: Sequence[Probe],
        ledger: Ledger,
        tick: Tick,
        limit: int | None = None,
        goals: Sequence[str] | None = None,
    ) -> None:
        """Leave out what `measure` does with the same arguments, because its sums are known."""

        def walk() -> None:
            parts = self._ways(probes)
            with self._past(probes, ledger, limit, goals, parts) as step:
                pass_by(self.shard, parts, step)

        for _ in self.shard.numbers:
            tick()
        self.later(walk)

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
        """Return the number of parts to process in parallel if the sums of each take `room` bytes on the host."""
        return 1 if self._lane.whole else ways(self.shard, room)

    def _ways(self, probes: Sequence[Probe]) -> int:
        return self.ways(12 * sum(p.numbers for p in {probing.same(p): p for p in probes}.values()))

    def holds(self, names: Sequence[str]) -> bool:
        """Return True if all these tensors are cached."""
        self._catch_up()
        return all(name in self._cache for name in names)

    def after(self, names: Iterable[str]) -> list[str]:
        """Return those of the tensors that are computed after the cut."""
        self._catch_up()
        makers = {name: self.index.values[name].producer() for name in names}
        return [name for name, node in makers.items() if node and self.index.order[node] >= self.position]

    def let_go(self) -> None:
        """Drop the tensors cached beyond the cut."""
        self.later(lambda: self._keep_beside({}))

    def measure_fold(
        self, probes: Sequence[Probe], kept: Ints, before: Ledger, after: Ledger, owners: Owners = FIRST
    ) -> tuple[Stats | None, ...]:
        """Compute joint statistics of each probe before and after a fold: all u channels, then the k `kept`.

        They are None in all processes but the owners.
        """
        self._catch_up()
        names = probing.names(probes)
        pairs = [probing.paired(p, kept) for p in probes]
        totals = Totals(self.shard, pairs, self._lane)
        fresh = self._fresh(after)
        inputs = [n for n in self._cache.names if n not in self._spare or n in fresh]
        fit_before, fit_after = (narrowing(self._survey, n, self._dead, inputs, self._lane) for n in (before, after))
        readers = [probing.joint(p, kept, self._probed, before, after) for p in probes]
        with self._network.open(names, before, inputs) as wide, self._network.open(names, after, inputs) as narrow:
            for place, (batch, mask) in enumerate(zip(self.shard.numbers, self.masks, strict=True)):
                cache = self._batch(place)
                old, new = self._run(wide, place, fit_before(cache)), self._run(narrow, place, fit_after(cache))
                totals.add(batch, (read(old, new, mask) for read in readers))
        return totals.stats([owners] * len(pairs))

    def _batch(self, place: int) -> dict[str, Array]:
        """Return the cached tensors that this batch computes."""
        return {name: array for name, array in self._cache.batch(place).items() if self._network.made(place, name)}

    def _run(self, pieces: Pieces, place: int, cache: Feed, parts: int = 1) -> dict[str, Array]:
        started = time.perf_counter()
        found = pieces.run(place, cache)
        seconds = time.perf_counter() - started
        with self._lock:
            self.forward += seconds / parts
        return found
