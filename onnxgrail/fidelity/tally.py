"""Judges outputs batch by batch: detects their kind from the first samples, then measures every sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxgrail.core import Array, Bools, Feed, Floats
from onnxgrail.fidelity.clues import Clues
from onnxgrail.fidelity.goals import Goals
from onnxgrail.fidelity.kinds import OTHER, parts_of
from onnxgrail.fidelity.kinds.part import DETECTED, PEAKS, Part
from onnxgrail.fidelity.measures import MEASURES
from onnxgrail.fidelity.measures.seen import SQUARED, Seen
from onnxgrail.fidelity.result import Fidelity, Table, Verdict, finish
from onnxgrail.fidelity.spread import Spread
from onnxgrail.fidelity.sums import Sums, distances, pairs
from onnxgrail.fidelity.tables import kind_of
from onnxgrail.fidelity.verdicts import rank, verdict_of

FIRST = 64  # samples from which the content of an output is detected
HELD = 2**26  # most bytes of these samples
LISTS = ("labels", "sequences", "values")  # kinds of lists, and scores of detections
NUMBERS = Part(kind="values", why=OTHER)


class Tally:
    """Distances and verdicts of all outputs, collected batch by batch.

    Attributes:
        sums: distances by output name.
        clues: known facts about the model's inputs; to be set before the first batch.
        judge: True to judge every output by the measure of its kind, too.
        known: the content by output, if it was detected before; what is detected is added.
        brief: True if only losses are asked for; other values may be NaN.
        first: number of samples from which the content of an output is detected, unless they are large.
    """

    def __init__(
        self,
        clues: Clues | None = None,
        *,
        judge: bool = True,
        known: dict[str, tuple[Part, ...]] | None = None,
        brief: bool = False,
        first: int = FIRST,
    ) -> None:
        self.sums: dict[str, Sums] = {}
        self.clues = clues or Clues()
        self.judge, self.brief, self.first = judge, brief, first
        self.known: dict[str, tuple[Part, ...]] = {} if known is None else known
        self._judges: dict[str, _Judge] = {}
        self._waiting: list[dict[str, Seen]] = []
        self._holds: dict[str, str] = {}

    def add(
        self,
        reference: Feed,
        outputs: Feed,
        *,
        mask: Bools | None = None,
        goals: Goals | None = None,
        single: bool = False,
        bases: Mapping[str, Floats] | None = None,
    ) -> None:
        """Add one more batch; other arguments as in `add_batch`.

        Args:
            reference: arrays by output name.
            outputs: the same of the other model.
            mask: of real tokens.
            goals: known classes.
            single: True if the batch is one sample: an output without a sample axis then is one, too.
            bases: by output, the input that it resembles, as large as the output.

        Raises:
            ModelError: an output is missing or differs in shape.
        """
        for name, value in reference.items():
            self._holds.setdefault(name, kind_of(value))
        batch = {}
        for name, *values in pairs(reference, outputs):
            inside = single and (len(np.atleast_1d(values[0])) != 1 or self._is_list(name, values[0]))
            wanted, got = (v[None] if inside and v.ndim else v for v in values)
            far = distances(wanted, got, name=name, mask=mask, goals=goals, brief=self.brief)
            self.sums[name] = self.sums.get(name, Sums()).merge(far.total())
            wanted, got = np.atleast_1d(wanted), np.atleast_1d(got)
            base = (bases or {}).get(name)
            batch[name] = Seen(wanted=wanted, got=got, far=far, mask=mask, brief=self.brief, base=base)
        if self.judge:
            self._collect(batch)

    def _is_list(self, name: str, value: Array) -> bool:
        """Return True for a list, or for detections, a row each, without an axis of samples."""
        known = self.known.get(name, ())
        rows = np.ndim(value) == 2 and any(part.axis == 2 for part in known)
        scores = np.ndim(value) == 1 and any(part.why == DETECTED for part in known)
        return rows or scores or name in self.clues.lists

    def _collect(self, batch: dict[str, Seen]) -> None:
        """Measure a batch once the content of all outputs is known; it waits until then."""
        self._waiting.append(batch)
        for name, seen in list(batch.items()):  # a large output leaves the batch at once
            judge = self._judges.setdefault(name, _Judge(name=name, clues=self.clues, known=self.known))
            judge.note(seen)
            if judge.alone:
                early = [waiting.pop(name) for waiting in self._waiting if name in waiting]
                judge.read(early, self.first)
                for one in early:
                    judge.measure(one, {})
        if all(judge.alone or judge.count >= self.first for judge in self._judges.values()):
            self._measure()

    def _measure(self) -> None:
        """Measure the waiting batches: scores first, because boxes count only where a score is read."""
        for name, judge in self._judges.items():
            judge.read([batch[name] for batch in self._waiting if name in batch], self.first)
        boxes = any(part.kind == "values" for judge in self._judges.values() for part in judge.parts)
        while self._waiting:
            batch = self._waiting.pop(0)
            positions: dict[tuple[int, ...], Bools] = {}
            for name, seen in batch.items() if boxes else ():
                for mask in self._judges[name].active(seen):
                    positions[mask.shape] = mask & positions.get(mask.shape, np.True_)
            for name, seen in batch.items():
                self._judges[name].measure(seen, positions)

    def tables(self) -> tuple[Table, ...]:
        """Return the sums per sample of all judged outputs, one table per part."""
        self._measure()
        return tuple(table for judge in self._judges.values() for table in judge.result())

    def results(self) -> tuple[Fidelity, ...]:
        """Return the results, output by output."""
        self._measure()
        verdicts = {name: judge.verdicts() for name, judge in self._judges.items()}
        others = (
            Fidelity(name=name, samples=0, cosine=None, nmse=None, max_abs=None, not_compared=holds)
            for name, holds in self._holds.items()
            if name not in self.sums
        )
        return (*finish(self.sums, verdicts), *others)


def _first(batches: Sequence[Seen], count: int) -> Iterator[Array]:
    """Yield the values of the first samples, always the same number for any batch size."""
    left = count
    for seen in batches:
        if left > 0:
            yield seen.wanted[:left]
        left -= len(seen.wanted)


@dataclass(kw_only=True, slots=True, eq=False)
class _Judge:
    """The state of one output.

    Attributes:
        name: of the output; clues: about the model's inputs; known: see `Tally`.
        count, size: number of samples and bytes before the content is detected.
        alone: True if the output is too large to wait for others.
        shape: of a sample.
        parts: the content; tables: their sums per sample; spreads: location of the error of values.
        numbers: the content if later batches contradict the detected one.
        squares: error and energy per sample of that.
        broken: mask of samples with values that are not finite.
    """

    name: str
    clues: Clues
    known: dict[str, tuple[Part, ...]]
    count: int = 0
    size: int = 0
    alone: bool = False
    shape: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    tables: list[list[Floats]] = field(default_factory=list)
    spreads: list[Spread] = field(default_factory=list)
    numbers: Part = NUMBERS
    squares: list[Floats] = field(default_factory=list)
    broken: list[Bools] = field(default_factory=list)

    def note(self, seen: Seen) -> None:
        """Add the numbers of one more batch that need no knowledge of the content."""
        self.broken.append(seen.far.broken > 0)
        if not self.parts:
            self.count += len(seen.wanted)
            self.size += seen.wanted.nbytes + seen.got.nbytes
            self.alone = self.size > HELD

    def read(self, first: Sequence[Seen], count: int) -> None:
        """Detect the content of the output from `count` samples of its first batches, unless it is known."""
        if self.parts or not first:
            return
        if self.name not in self.known:
            self.known[self.name] = parts_of(self.name, list(_first(first, count)), self.clues)
        self.shape, self.parts = first[0].wanted.shape[1:], self.known[self.name]
        self.numbers = next((part.otherwise for part in self.parts if part.otherwise), NUMBERS)
        self.tables = [[] for _ in self.parts]
        self.spreads = [Spread() for _ in self.parts]

    def active(self, seen: Seen) -> Iterator[Bools]:
        """Yield the masks of positions with a score that is read: (n, positions), of heat maps (n, height, width)."""
        lists = seen.wanted.ndim in (2, 3)
        if self._fits(seen):
            parts = (part for part in self.parts if part.kind == "scores" and (lists or part.why == PEAKS))
            yield from (seen.active(part) for part in parts)

    def measure(self, seen: Seen, positions: Mapping[tuple[int, ...], Bools]) -> None:
        """Measure one batch.

        Args:
            seen: the output in both models.
            positions: masks of positions whose scores are read in any output, by their shape.
        """
        self.squares.append(self._square(seen))
        if not self._fits(seen):
            self._give_up()
        if self.tables and self.tables[0] is self.squares:
            return
        own = {mask.shape: mask for mask in self.active(seen)} if len(self.parts) > 1 else {}
        for part, table, spread in zip(self.parts, self.tables, self.spreads, strict=True):
            for batch in seen.blocks(part, seen.read(part, own or positions)):
                table.append(batch.each * MEASURES[part.kind].table(batch))
                if table[-1].shape[1] != table[0].shape[1]:  # scores beside it in some of the batches only
                    self._give_up()
                    return
                if part.kind in SQUARED and not seen.brief:
                    spread.add(*batch.compared())

    def _give_up(self) -> None:
        """Judge the whole output by its numbers."""
        self.parts, self.tables, self.spreads = (self.numbers,), [self.squares], [Spread(whole=False)]

    def _square(self, seen: Seen) -> Floats:
        """Return error and energy per sample, about the mean of the first samples if that is most of the energy."""
        center = self.numbers.center
        if center is None or center.shape != seen.wanted.shape[1:]:
            return np.stack([seen.far.error, seen.far.energy], axis=1)
        return np.concatenate([MEASURES["values"].table(batch) for batch in seen.blocks(self.numbers)])

    def _fits(self, seen: Seen) -> bool:
        """Return True if a batch is consistent with the content detected from the first batches."""
        for part in self.parts:
            if self.name in self.clues.lists and not (part.why == DETECTED or part.kind in LISTS):
                return False
            if part.center is not None and part.center.shape != seen.wanted.shape[1:]:
                return False
            if part.form == "probabilities" and not seen.probable(part):
                return False
        return True

    def result(self) -> tuple[Table, ...]:
        """Return the sums of all samples, one table per part; none of an output that is empty in all samples."""
        return tuple(
            Table(
                output=self.name,
                part=part,
                shape=self.shape,
                sums=np.concatenate(table),
                broken=np.concatenate(self.broken),
                details=spread.details(),
            )
            for part, table, spread in zip(self.parts, self.tables, self.spreads, strict=True)
            if any(map(len, table))
        )

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the verdicts, the worst part first."""
        found = [
            verdict_of(table.part, table.sums, table.details, broken=bool(table.broken.any()))
            for table in self.result()
        ]
        return tuple(sorted(found, key=rank, reverse=True))
