"""Decides single blocks and writes the decisions into the ledger."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrail.algebra.decide import decided, needs_gram, reads_producers
from onnxgrail.algebra.fit.compensate import BEST
from onnxgrail.algebra.fit.formats import in_range
from onnxgrail.algebra.fit.judge import judge
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.select.selectors import AUTO, SELECTORS
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.dense import Dense, size_of
from onnxgrail.calibration.stream.sizes import are_kept, rows_of_all
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.core import INNER, Array, Block, Change, Floats, Outcome, Probe, Recipe, Stats, View
from onnxgrail.graph import slots
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.group.sums import Owners
from onnxgrail.machine.job import Job
from onnxgrail.machine.steps.codec import Record, change_of, of_change
from onnxgrail.narrowing.layers import Refit
from onnxgrail.narrowing.norms import Norm
from onnxgrail.narrowing.order import Deal, deal, jointly, waves

COMPACT = "the file holds fewer numbers than its consumers have, and new ones would make it larger"
RICH = 4  # rows per feature from which data are not few


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """The processes that decide blocks, and the network in which these were measured.

    Attributes:
        deal: the processes.
        stream: measured the blocks, and measures folds; None if no method reads activations.
        before: the ledger of the measured network.
    """

    deal: Deal
    stream: Stream | None = None
    before: Ledger | None = None


class Run:
    """The state of the decisions during one call of `decide`.

    Attributes:
        dense: statistics of the original model; targets: per batch, outputs of its layers; both if they are known.
        fitted: names of blocks whose consumers are left to later fits; these blocks are only narrowed until then.
        tick: called once per decided block.
    """

    def __init__(
        self,
        prepared: Prepared,
        job: Job,
        kept: Mapping[str, int],
        dense: Dense | None = None,
        targets: Sequence[Mapping[str, Array]] = (),
    ) -> None:
        self.prepared, self.job, self.kept, self.dense, self.targets = prepared, job, kept, dense, targets
        self.recipe = job.recipe
        self.ledger = weights.empty(prepared.survey)
        self.changes: list[Change] = []
        self.fitted: frozenset[str] = frozenset()
        self.tick: Callable[[], None] = lambda: None
        self.compact = prepared.survey.compact()
        self.refits: tuple[Refit, ...] = ()
        self.norms: tuple[Norm, ...] = ()

    def weights(self, block: Block) -> Sequence[Floats]:
        """Return the current weights of a block."""
        return weights.read(block, self.prepared.model, self.prepared.survey, self.ledger)

    def probes(self, block: Block) -> tuple[Probe, ...]:
        """Return the probes that the decision about a block reads: none, or those of squares, rows or products."""
        if block.name not in self.fitted and few_rows(self.recipe, block, self.prepared):
            return tuple(dataclasses.replace(probe, alone=True, few=True) for probe in block.probes)
        if block.name not in self.fitted or (needs_gram(self.recipe, block) and not self._short(block)):
            return block.probes
        if block.ranked or not SELECTORS[self.recipe.selector].needs_data:
            return ()
        return tuple(dataclasses.replace(probe, alone=True) for probe in block.probes)

    def _short(self, block: Block) -> bool:
        """Return True if rows are too few for `auto` to read products of a block's channels, also if twice as many.

        Rows are estimated: samples may have several lengths.
        """
        scorer = SELECTORS[self.recipe.selector]
        if self.recipe.selector != AUTO or REDUCERS[self.recipe.reducer].needs_data:
            return False
        return any(not scorer.enough(2 * rows, width) for rows, width in _rows(block, self.prepared))

    def needs_gram(self, block: Block) -> bool:
        """Return True if selecting units of a block needs products of its channels."""
        return needs_gram(self.recipe, block)

    def folds(self, blocks: Sequence[Block]) -> bool:
        """Return True if units of some blocks are averaged, which is judged on the activations that it gives."""
        return not REDUCERS[self.recipe.reducer].needs_scores and any(b.name not in self.fitted for b in blocks)

    def known(self, block: Block) -> Change | None:
        """Return the decision about a block that an earlier run cached, None if there is none."""
        found = self.job.steps.known(key(block))
        return None if found is None else change_of(found, block)

    def _decided(self, blocks: Sequence[Block], measured: Sequence[tuple[Stats, ...]], place: Place) -> list[Change]:
        """Decide blocks that do not depend on each other, at the same time.

        Args:
            blocks: the blocks.
            measured: statistics of the probes of each; empty if no method needs them, and for those of other processes.
            place: the processes that decide, and how activations that a fold gives are measured; a decision that
                averages clusters is judged on them.
        """
        steps, owners = self.job.steps, [place.deal.of(block) for block in blocks]

        def first(number: int) -> Record:
            view = self._view(blocks[number], measured[number])
            with jointly(self.job.group, owners[number]):
                change = self._first(view)
                return of_change(change if self._folds(change, place) else self.fitting(view, change))

        found = steps.dealt(owners, first)
        changes = [change_of(*one) for one in zip(found, blocks, strict=True)]
        folds = [number for number, change in enumerate(changes) if self._folds(change, place)]
        joint = [self._joint(changes[number], place, owners[number]) for number in folds]

        def second(number: int) -> Record:  # averaged statistics underestimate the error
            view = self._view(blocks[folds[number]], measured[folds[number]])
            return of_change(self.fitting(view, judge(view, changes[folds[number]], joint[number])))

        for number, record in zip(folds, steps.dealt([owners[n] for n in folds], second), strict=True):
            found[number], changes[number] = record, change_of(record, blocks[number])
        for block, record in zip(blocks, found, strict=True):
            steps.keep(key(block), record)
        return changes

    def _view(self, block: Block, stats: tuple[Stats, ...]) -> View:
        slopes, kept = self.prepared.gradients.get(block.name), self.kept[block.name]
        return View(block=block, weights=self.weights(block), stats=stats, gradient=slopes, kept=kept)

    def _first(self, view: View) -> Change:
        """Decide one block, before a fold is judged."""
        block = view.block
        compact = any(slot.param in self.compact for slot in block.consumers)
        plain = compact or block.name in self.fitted
        change = decided(view, self.kept[block.name], self.recipe, SELECTORS[self.recipe.selector], fitted=plain)
        if compact and change.reducer.kept.size < block.units and self.recipe.compensate != "none":
            return dataclasses.replace(change, outcome=Outcome(status="plain", reason=COMPACT))
        return change

    def _folds(self, change: Change, place: Place) -> bool:
        """Return True if a decision is judged on activations that it gives."""
        return place.stream is not None and change.reducer.cluster is not None and change.block.name not in self.fitted

    def fitting(self, view: View, change: Change) -> Change:
        """Check a decision against the range of the weights' formats, see `in_range`."""
        facts = self.prepared.survey.facts
        names = [slot.initializer for slot in view.block.slots]
        limits = [np.inf if n in facts.stored else slots.largest(facts.dtypes[n]) for n in names]
        return in_range(view, change, limits)

    def deal(self, blocks: Sequence[Block], known: Sequence[Change | None], *, there: bool = False) -> Deal:
        """Return the waves in which blocks are decided, and the processes that decide them.

        Args:
            blocks: the blocks, in the order in which they are decided.
            known: cached decision per block, None if there is none.
            there: True if the first process has the statistics already.
        """
        group = self.job.group
        if group.size == 1 or there:
            return Deal([[block] for block in blocks])
        cached = {block.name for block, change in zip(blocks, known, strict=True) if change}
        return deal(
            waves(blocks, producers=reads_producers(self.recipe)),
            lambda block: 0.0 if block.name in cached else self._effort(block),
            self.probes,
            group,
        )

    def _effort(self, block: Block) -> float:
        """Return the multiply-accumulates of deciding a block, roughly."""
        shapes, probes = self.prepared.survey.facts.shapes, self.probes(block)
        numbers = float(sum(math.prod(shapes[slot.initializer]) for slot in block.consumers))
        wide = max((probe.width for probe in probes if probe.few or not probe.alone), default=1)
        return sum(float(probe.width) ** 3 for probe in probes if probe.few or not probe.alone) + numbers * wide

    def take(
        self,
        blocks: Sequence[Block],
        known: Sequence[Change | None],
        measured: Sequence[tuple[Stats, ...]],
        place: Place,
    ) -> None:
        """Decide blocks: take cached decisions, else use what a stream measured.

        Args:
            blocks: the blocks to decide.
            known: cached decision per block, None if there is none.
            measured: statistics per block; empty if there is a cached decision or no method needs them, and for blocks
                of other processes.
            place: the processes that decide, and the stream, for folds.
        """
        cached = {block.name: change for block, change in zip(blocks, known, strict=True)}
        stats = {block.name: found for block, found in zip(blocks, measured, strict=True)}
        for wave in place.deal.waves:
            todo = [block for block in wave if not cached[block.name]]
            done = iter(self._decided(todo, [stats.pop(block.name) for block in todo], place))
            for block in wave:
                self.settle(cached[block.name] or next(done))
                self.tick()

    def _joint(self, change: Change, place: Place, owners: Owners) -> tuple[Stats, ...]:
        """Measure the activations that a fold gives, jointly with the original ones."""
        assert place.stream is not None
        assert place.before is not None
        after, kept = self.after(change, place.before), change.reducer.kept
        found = place.stream.measure_fold(change.block.probes, kept, place.before, after, owners)
        return tuple(stats for stats in found if stats is not None)

    def settle(self, change: Change) -> None:
        """Write a decision into the ledger. The list of changes keeps no weights, which would fill the memory."""
        self.ledger = self.after(change, self.ledger)
        self.changes.append(dataclasses.replace(change, weights=()))

    def after(self, change: Change, ledger: Ledger) -> Ledger:
        """Return a ledger with one more decision."""
        return weights.record(change, self.prepared.model, self.prepared.survey, ledger)


def scarce(block: Block, prepared: Prepared) -> bool:
    """Return True if the data have few rows per feature of a block, as after a pooling layer: one per sample.

    GRAIL's weights then cannot be compared with others on rows that they were computed from.
    """
    return any(rows < RICH * width for rows, width in _rows(block, prepared))


def _rows(block: Block, prepared: Prepared) -> list[tuple[float, int]]:
    """Return the rows that are expected of each probe of whole activations, and its features."""
    known = (probe for probe in block.probes if not probe.inside and probe.value in prepared.survey.facts.shapes)
    return [(rows_of_all(probe, prepared), probe.width) for probe in known]


def few_rows(recipe: Recipe, block: Block, prepared: Prepared) -> bool:
    """Return True if the rows of a block's probes are kept, because they cost GRAIL's fit less than products would.

    Other compensators, selectors and folds may need products.
    """
    grail = recipe.compensate in ("grail", BEST) and recipe.reducer == "prune" and block.kind not in INNER
    squares = recipe.selector == AUTO or not needs_gram(recipe, block)
    return grail and squares and all(are_kept(probe, prepared, recipe.providers) for probe in block.probes)


def key(block: Block) -> str:
    """Return the cache key of the decision about a block."""
    return f"block {block.name}"


def room(block: Block, prepared: Prepared) -> int:
    """Return the bytes that a block's weights and second moments take."""
    shapes = prepared.survey.facts.shapes
    return 8 * sum(math.prod(shapes[s.initializer]) for s in block.slots) + size_of(block)
