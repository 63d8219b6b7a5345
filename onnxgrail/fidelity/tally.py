"""Judges outputs batch by batch: detects their kind from the first samples, then measures every sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from onnxgrail.core import Array, Bools, Feed, Floats
from onnxgrail.fidelity.clues import Clues
from onnxgrail.fidelity.goals import Goals
from onnxgrail.fidelity.kinds import SLACK, Part, parts_of
from onnxgrail.fidelity.measures import MEASURES, Batch
from onnxgrail.fidelity.result import Fidelity, Verdict, finish
from onnxgrail.fidelity.spread import Spread
from onnxgrail.fidelity.sums import BLOCK, Distances, Sums, distances, pairs
from onnxgrail.fidelity.tables import kind_of
from onnxgrail.fidelity.verdicts import rank, verdict_of

FIRST = 16  # samples from which the content of an output is detected
HELD = 2**26  # most bytes of these samples
DISTANT = frozenset({"tokens", "labels"})  # kinds whose measure needs only distances
PER_SAMPLE = ("cosine", "error", "energy", "max_abs", "broken", "rows", "agree", "kl")  # arrays of `Distances`


class Tally:
    """Distances and verdicts of all outputs, collected batch by batch.

    Attributes:
        sums: distances by output name.
        clues: known facts about the model's inputs; to be set before the first batch.
        judge: True to judge every output by the measure of its kind, too.
    """

    def __init__(self, clues: Clues | None = None, *, judge: bool = True) -> None:
        self.sums: dict[str, Sums] = {}
        self.clues = clues or Clues()
        self.judge = judge
        self._judges: dict[str, _Judge] = {}
        self._holds: dict[str, str] = {}

    def add(self, reference: Feed, outputs: Feed, *, mask: Bools | None = None, goals: Goals | None = None) -> None:
        """Add one more batch; arguments as in `add_batch`.

        Raises:
            ModelError: an output is missing or differs in shape.
        """
        for name, value in reference.items():
            self._holds.setdefault(name, kind_of(value))
        for name, wanted, got in pairs(reference, outputs):
            far = distances(wanted, got, name=name, mask=mask, goals=goals)
            self.sums[name] = self.sums.get(name, Sums()).merge(far.total())
            if not self.judge:
                continue
            judge = self._judges.setdefault(name, _Judge(name=name, clues=self.clues))
            judge.add(_Seen(wanted=np.atleast_1d(wanted), got=np.atleast_1d(got), far=far, mask=mask))

    def tables(self) -> tuple[Table, ...]:
        """Return the sums per sample of all judged outputs, one table per part."""
        return tuple(table for judge in self._judges.values() for table in judge.result())

    def results(self) -> tuple[Fidelity, ...]:
        """Return the results, output by output."""
        verdicts = {name: judge.verdicts() for name, judge in self._judges.items()}
        others = (
            Fidelity(name=name, samples=0, cosine=None, nmse=None, max_abs=None, not_compared=holds)
            for name, holds in self._holds.items()
            if name not in self.sums
        )
        return (*finish(self.sums, verdicts), *others)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Table:
    """The sums per sample of an output, or of a part of it.

    Attributes:
        output: its name.
        part: its content.
        sums: (n, k) from the measure of the part, in the order of the samples.
        broken: (n,) mask of samples with values that are NaN or infinite while the reference is finite.
        details: further measures over all samples.
    """

    output: str
    part: Part
    sums: Floats
    broken: Bools
    details: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Seen:
    """One output in one batch."""

    wanted: Array
    got: Array
    far: Distances
    mask: Bools | None

    def blocks(self, part: Part) -> Iterator[Batch]:
        """Yield the part of the output, a block of samples at a time."""
        count = len(self.wanted)
        mask = self.mask if self.mask is not None and self.wanted.shape[:2] == self.mask.shape else None
        if part.kind in DISTANT:
            nothing = np.zeros((count, 0))
            yield Batch(part=part, a=nothing, b=nothing, shown=mask, distances=self.far)
            return
        step = max(1, BLOCK * count // max(self.wanted.size, 1))
        for start in range(0, count, step):
            cut = slice(start, start + step)
            shown = None if mask is None else mask[cut]
            a, b = (_columns(side[cut], part) for side in (self.wanted, self.got))
            usable = np.isfinite(a) & np.isfinite(b)
            if shown is not None:
                usable &= shown.reshape(*shown.shape, *([1] * (a.ndim - 2)))
            far = replace(self.far, **{name: getattr(self.far, name)[cut] for name in PER_SAMPLE})
            yield Batch(part=part, a=np.where(usable, a, 0.0), b=np.where(usable, b, 0.0), shown=shown, distances=far)


def _columns(values: Array, part: Part) -> Floats:
    """Return the columns of a part, in float64."""
    if part.columns is not None and part.axis is not None:
        values = np.take(values, part.columns, axis=part.axis)
    return values.astype(np.float64)


@dataclass(kw_only=True, slots=True, eq=False)
class _Judge:
    """The state of one output.

    Attributes:
        name: of the output; clues: about the model's inputs.
        waiting: the first batches, until the content is detected.
        parts: the content; tables: their sums per sample; spreads: location of the error of values.
        squares: error and energy per sample, in case later batches contradict the detected kind.
        broken: mask of samples with values that are not finite.
    """

    name: str
    clues: Clues
    waiting: list[_Seen] = field(default_factory=list)
    parts: tuple[Part, ...] = ()
    tables: list[list[Floats]] = field(default_factory=list)
    spreads: list[Spread] = field(default_factory=list)
    squares: list[Floats] = field(default_factory=list)
    broken: list[Bools] = field(default_factory=list)

    def add(self, seen: _Seen) -> None:
        """Add one more batch."""
        self.squares.append(np.stack([seen.far.error, seen.far.energy], axis=1))
        self.broken.append(seen.far.broken > 0)
        if self.parts:
            self._measure(seen)
            return
        self.waiting.append(seen)
        size = sum(one.wanted.nbytes + one.got.nbytes for one in self.waiting)
        if size > HELD or sum(len(one.wanted) for one in self.waiting) >= FIRST:
            self._read()

    def _read(self) -> None:
        """Detect the content of the output, and measure the waiting batches."""
        self.parts = parts_of(self.name, list(self._first()), self.clues)
        self.tables = [[] for _ in self.parts]
        self.spreads = [Spread() for _ in self.parts]
        for seen in self.waiting:
            self._measure(seen)
        self.waiting = []

    def _first(self) -> Iterator[Array]:
        """Yield the values of the first samples, always the same number for any batch size."""
        left = FIRST
        for seen in self.waiting:
            if left > 0:
                yield seen.wanted[:left]
            left -= len(seen.wanted)

    def _measure(self, seen: _Seen) -> None:
        if not self._fits(seen):
            self.parts = (Part(kind="values", why="other values or shapes in later samples"),)
            self.tables, self.spreads = [self.squares], [Spread(whole=False)]
            return
        if self.tables and self.tables[0] is self.squares:
            return  # `add` has added it already
        for part, table, spread in zip(self.parts, self.tables, self.spreads, strict=True):
            for batch in seen.blocks(part):
                table.append(MEASURES[part.kind].table(batch))
                if part.kind in ("values", "state"):
                    spread.add(batch.a, batch.b)

    def _fits(self, seen: _Seen) -> bool:
        """Return True if a batch is consistent with the content detected from the first batches."""
        for part in self.parts:
            if part.center is not None and part.center.shape != seen.wanted.shape[1:]:
                return False
            if part.form == "probabilities":
                for batch in seen.blocks(part):
                    if batch.a.size and (batch.a.min() < -SLACK or batch.a.max() > 1 + SLACK):
                        return False
        return True

    def result(self) -> tuple[Table, ...]:
        """Return the sums of all samples, one table per part."""
        if not self.parts and self.waiting:
            self._read()
        return tuple(
            Table(
                output=self.name,
                part=part,
                sums=np.concatenate(table),
                broken=np.concatenate(self.broken),
                details=spread.details(),
            )
            for part, table, spread in zip(self.parts, self.tables, self.spreads, strict=True)
            if table
        )

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the verdicts, the worst part first."""
        found = [
            verdict_of(table.part, table.sums, table.details, broken=bool(table.broken.any()))
            for table in self.result()
        ]
        return tuple(sorted(found, key=rank, reverse=True))
