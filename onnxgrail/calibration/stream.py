"""Calibration activations on their way through the network, one block at a time.

The stream keeps the live tensors at one cut of the graph, for every batch.  `measure` runs from there to a block's
probes; `advance` moves the cut forward through nodes that are final.  Each node is run about twice however deep the
network is (GRAIL section 3.2 asks for statistics from the already compressed prefix).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Self

import numpy as np
import onnx_ir as ir

from onnxgrail.algebra.gram import gram_of
from onnxgrail.calibration.data import Batches
from onnxgrail.calibration.session import Session, open_session
from onnxgrail.calibration.signature import padding_mask
from onnxgrail.calibration.totals import Totals
from onnxgrail.core import Array, Bools, Feed, Ints, Probe, Stats
from onnxgrail.errors import ModelError
from onnxgrail.graph.cost import effort
from onnxgrail.graph.live import lives
from onnxgrail.graph.rewrite import apply
from onnxgrail.graph.segment import cut
from onnxgrail.graph.serial import to_bytes
from onnxgrail.graph.survey import Ledger, Survey
from onnxgrail.parallel import SOLO, Group, shard_of

Tick = Callable[[], None]


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
        folder: Path | None,
        group: Group = SOLO,
    ) -> None:
        self._model, self._survey = model, survey
        self._providers, self._folder = tuple(providers), folder
        self._lives = lives(model, survey.facts, effort(model, survey))
        self.position = 0  # of the first node that is still to come
        self.shard = shard_of(group, len(batches))
        feeds = [batches.feeds[number]() for number in self.shard.numbers]
        self._masks = [padding_mask(feed) for feed in feeds]
        self._cache: list[dict[str, Array]] = [dict(feed) for feed in feeds]
        self._dead: dict[str, Bools] = {}  # per cached tensor, what was gone when it was computed
        self.forward = 0.0  # seconds inside ONNX Runtime

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cache.clear()

    def advance(self, ledger: Ledger, limit: int) -> None:
        """Move the cut as far forward as is sensible, at most in front of node `limit`.

        Every node before `limit` must be final: no block that is still to be decided touches it.
        """
        if limit <= self.position:
            return
        target = self._lives.best(self.position, limit)
        keep = self._lives.at(target)
        fresh = [name for name in keep if name not in self._cache[0]]
        if fresh:
            with self._open(fresh, ledger) as session:
                for cache in self._cache:
                    cache.update(self._run(session, self._fitted(cache, ledger)))
            self._dead.update(dict.fromkeys(fresh, ledger.dead))
        alive = set(keep)
        self._cache = [{n: a for n, a in cache.items() if n in alive} for cache in self._cache]
        self.position = target

    @property
    def masks(self) -> Sequence[Bools | None]:
        """Per batch, which (sample, token) positions are real; None where all are."""
        return self._masks

    def record(self, names: Sequence[str], ledger: Ledger) -> Iterator[dict[str, Array]]:
        """Tensors of the network as the ledger has it, batch by batch."""
        beyond = [n for n in names if n not in self._cache[0]]
        session = self._open(beyond, ledger) if beyond else None
        for whole in self._cache:
            cache = self._fitted(whole, ledger)
            yield {n: cache[n] for n in names if n in cache} | (self._run(session, cache) if session else {})

    def follow(self, names: Sequence[str], ledger: Ledger, limit: int) -> Iterator[dict[str, Array]]:
        """Both in one run: `record` these names, and `advance` to the limit on the way."""
        target = self._lives.best(self.position, limit) if limit > self.position else self.position
        alive = set(self._lives.at(target)) if target > self.position else set(self._cache[0])
        beyond = [n for n in dict.fromkeys([*names, *sorted(alive)]) if n not in self._cache[0]]
        session = self._open(beyond, ledger) if beyond else None
        for number, whole in enumerate(self._cache):
            cache = self._fitted(whole, ledger)
            found = self._run(session, cache) if session else {}
            yield {n: found[n] if n in found else cache[n] for n in names}
            self._cache[number] = {n: whole[n] if n in whole else found[n] for n in alive}
        self._dead.update(dict.fromkeys(alive & set(beyond), ledger.dead))
        self.position = target

    def measure(self, probes: Sequence[Probe], ledger: Ledger, tick: Tick) -> tuple[Stats, ...]:
        """Sums over all calibration rows of each probe, in the network as the ledger has it."""
        names = sorted({n for p in probes for n in (p.value, *p.also)})
        totals = Totals(self.shard, probes)
        here = [n for n in names if n in self._cache[0]]
        beyond = [n for n in names if n not in self._cache[0]]
        session = self._open(beyond, ledger) if beyond else None
        for batch, whole, mask in zip(self.shard.numbers, self._cache, self._masks, strict=True):
            cache = self._fitted(whole, ledger)
            found = {n: cache[n] for n in here} | (self._run(session, cache) if session else {})
            totals.add(batch, (self._sums(found, probe, mask, ledger) for probe in probes))
            tick()
        return totals.stats()

    def measure_fold(self, probes: Sequence[Probe], kept: Ints, before: Ledger, after: Ledger) -> tuple[Stats, ...]:
        """Joint sums of each probe's features before and after a fold: u units, then the k that stay."""
        names = sorted({n for p in probes for n in (p.value, *p.also)})
        pairs = [_paired(p, kept) for p in probes]
        totals = Totals(self.shard, pairs)
        with self._open(names, before) as wide, self._open(names, after) as narrow:
            for batch, cache, mask in zip(self.shard.numbers, self._cache, self._masks, strict=True):
                sums: list[Stats] = []
                old = self._run(wide, self._fitted(cache, before))
                new = self._run(narrow, self._fitted(cache, after))
                for probe, pair in zip(probes, pairs, strict=True):
                    parts = []
                    for name in (probe.value, *probe.also):
                        index = self._placed(probe, name, before).index
                        folded = self._placed(probe, name, after).index[kept] + old[name].shape[probe.axis]
                        both = np.concatenate([old[name], new[name]], axis=probe.axis)
                        placed = replace(pair, index=np.concatenate([index, folded]))
                        parts.append(gram_of(both, placed, _rows(both, probe, mask)))
                    sums.append(reduce(Stats.merge, parts))
                totals.add(batch, sums)
        return totals.stats()

    def _sums(self, found: Feed, probe: Probe, mask: Bools | None, ledger: Ledger) -> Stats:
        """Sums of one probe over one batch."""
        parts = [
            gram_of(found[name], self._placed(probe, name, ledger), _rows(found[name], probe, mask))
            for name in (probe.value, *probe.also)
        ]
        return reduce(Stats.merge, parts)

    def _placed(self, probe: Probe, name: str, ledger: Ledger) -> Probe:
        """The probe with positions counted in the tensor as it is now: other blocks may have left its axis already."""
        for mark in self._survey.marks.get(name, ()):
            if mark.axes == (probe.axis,) and ledger.dead[mark.labels].any():
                place = np.cumsum(~ledger.dead[mark.labels]) - 1
                return replace(probe, index=place[probe.index])
        return probe

    def _fitted(self, cache: Feed, ledger: Ledger) -> dict[str, Array]:
        """Cached tensors as the ledger has them: inputs, and what follows from them alone, are older than decisions."""
        found = dict(cache)
        for name in cache:
            for mark in self._survey.marks.get(name, ()):
                gone = ledger.dead[mark.labels]
                there = ~self._dead[name][mark.labels] if name in self._dead else np.ones_like(gone)
                if gone[there].any():
                    found[name] = np.compress(~gone[there], found[name], axis=mark.axes[0])
        return found

    def _run(self, session: Session, cache: Feed) -> dict[str, Array]:
        started = time.perf_counter()
        found = session.run(cache)
        self.forward += time.perf_counter() - started
        return found

    def _open(self, outputs: Sequence[str], ledger: Ledger) -> Session:
        """A session from the cached tensors to `outputs`, with all decisions written in."""
        piece = cut(self._model, list(self._cache[0]), list(outputs), self._survey.facts)
        apply(piece.graph, self._survey, ledger)
        spatial = any(node.op_type.endswith("Conv") for node in piece.graph)
        data = to_bytes(piece)
        common = {"providers": self._providers, "outputs": outputs, "folder": self._folder}
        try:
            return open_session(data, extended=not spatial, **common)  # type: ignore[arg-type]
        except ModelError:  # the runtime's optimiser stumbles over some graphs that it runs well as they are
            return open_session(data, optimise=False, **common)  # type: ignore[arg-type]


def _paired(probe: Probe, kept: Ints) -> Probe:
    """A probe of u + k units."""
    return replace(probe, index=np.concatenate([probe.index, probe.index[kept]]))


def _rows(x: Array, probe: Probe, mask: Bools | None) -> Bools | None:
    """The padding mask where it fits the tensor's leading axes: (batch, sequence, channels) or flattened."""
    if mask is None or probe.axis != x.ndim - 1:
        return None
    leading = x.shape[:-1]
    return np.asarray(mask).ravel() if leading in (mask.shape, (mask.size,)) else None
