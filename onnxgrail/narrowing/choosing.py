"""Decides single blocks and writes the decisions into the ledger."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrail.algebra.fit.compensate import BEST, COMPENSATORS, Compensator
from onnxgrail.algebra.fit.compensate.plain import Plain
from onnxgrail.algebra.fit.formats import in_range
from onnxgrail.algebra.fit.judge import judge
from onnxgrail.algebra.method import reduce_and_compensate
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.select import selectors
from onnxgrail.algebra.select.selectors import AUTO, SELECTORS
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.dense import Dense, size_of
from onnxgrail.calibration.stream.sizes import are_kept, rows_of_all
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.core import INNER, Array, Block, Change, Floats, Outcome, Probe, Recipe, Selector, Stats, View
from onnxgrail.graph import slots
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.job import Job
from onnxgrail.machine.steps.codec import Record, change_of, of_change
from onnxgrail.narrowing.layers import Refit
from onnxgrail.narrowing.norms import Norm

COMPACT = "the file holds fewer numbers than its consumers have, and new ones would make it larger"
RICH = 4  # rows per feature from which data are not few
Fold = Callable[[Change], tuple[Stats, ...]]
"""Measures a block's statistics with the activations that a fold produces."""


class Run:
    """The state of the decisions during one call of `decide`.

    Attributes:
        dense: statistics of the original model; targets: per batch, outputs of its layers; both if they are known.
        fitted: names of blocks whose consumers are left to later fits; these blocks are only narrowed until then.
        trial: a candidate of a search, whose quantized weights are rounded to nearest.
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
        self.trial = False
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

    def folds(self, blocks: Sequence[Block]) -> bool:
        """Return True if units of some blocks are averaged, which is judged on the activations that it gives."""
        return not REDUCERS[self.recipe.reducer].needs_scores and any(b.name not in self.fitted for b in blocks)

    def known(self, block: Block) -> Change | None:
        """Return the decision about a block that an earlier run cached, None if there is none."""
        found = self.job.steps.known(key(block))
        return None if found is None else change_of(found, block)

    def choose(self, block: Block, stats: tuple[Stats, ...], fold: Fold | None = None) -> Change:
        """Decide one block.

        Args:
            block: the block.
            stats: statistics of its probes; empty if no method needs them.
            fold: measures the activations that a fold gives; a decision that averages clusters is judged on them.
        """
        steps, scores = self.job.steps, SELECTORS[self.recipe.selector]
        slopes = self.prepared.gradients.get(block.name)
        view = functools.cache(lambda: View(block=block, weights=self.weights(block), stats=stats, gradient=slopes))

        def first() -> Record:
            compact = any(slot.param in self.compact for slot in block.consumers)
            plain = compact or block.name in self.fitted
            change = decided(view(), self.kept[block.name], self.recipe, scores, fitted=plain)
            if compact and change.reducer.kept.size < block.units and self.recipe.compensate != "none":
                change = dataclasses.replace(change, outcome=Outcome(status="plain", reason=COMPACT))
            judged = fold is not None and change.reducer.cluster is not None
            return of_change(change if judged else self.fitting(view(), change))

        found = steps.shared(first)
        change = change_of(found, block)
        if fold is not None and change.reducer.cluster is not None:  # averaged statistics underestimate the error
            joint = fold(change)
            found = steps.shared(lambda: of_change(self.fitting(view(), judge(view(), change, joint))))
        steps.keep(key(block), found)
        return change_of(found, block)

    def fitting(self, view: View, change: Change) -> Change:
        """Check a decision against the range of the weights' formats, see `in_range`."""
        facts = self.prepared.survey.facts
        names = [slot.initializer for slot in view.block.slots]
        limits = [np.inf if n in facts.stored else slots.largest(facts.dtypes[n]) for n in names]
        return in_range(view, change, limits)

    def take(
        self,
        blocks: Sequence[Block],
        known: Sequence[Change | None],
        measured: Sequence[tuple[Stats, ...]],
        stream: Stream,
        before: Ledger,
    ) -> None:
        """Decide blocks: take cached decisions, else use what the stream measured in the network `before`.

        Args:
            blocks: the blocks to decide.
            known: cached decision per block, None if there is none.
            measured: statistics per block; empty if there is a cached decision or no method needs them.
            stream: the stream that measured them, for folds.
            before: the ledger of the measured network.
        """
        for block, change, stats in zip(blocks, known, measured, strict=True):
            fold = None if block.name in self.fitted else functools.partial(self._joint, stream, before)
            self.settle(change or self.choose(block, stats, fold))

    def _joint(self, stream: Stream, before: Ledger, change: Change) -> tuple[Stats, ...]:
        """Measure the activations that a fold gives, jointly with the original ones."""
        return stream.measure_fold(change.block.probes, change.reducer.kept, before, self.after(change, before))

    def settle(self, change: Change) -> None:
        """Write a decision into the ledger. The list of changes keeps no weights, which would fill the memory."""
        self.ledger = self.after(change, self.ledger)
        self.changes.append(dataclasses.replace(change, weights=()))

    def after(self, change: Change, ledger: Ledger) -> Ledger:
        """Return a ledger with one more decision."""
        return weights.record(change, self.prepared.model, self.prepared.survey, ledger)


def decided(view: View, kept: int, recipe: Recipe, selector: Selector, *, fitted: bool = False) -> Change:
    """Decide one block at one width.

    Args:
        view: the block with its weights and statistics.
        kept: the new width.
        recipe: names the reducer and the compensator.
        selector: scores the units.
        fitted: the consumers are fitted later, so that they are not compensated here.
    """
    reducer = REDUCERS[recipe.reducer]
    change = reduce_and_compensate(
        view,
        kept,
        selector=_first if view.block.ranked else selector,
        reducer=reducer,
        compensator=Plain(measured=False) if fitted else _compensator(recipe, view.block),
        rng=np.random.default_rng((recipe.seed, int(view.block.ids[0]))),
    )
    scored = reducer.needs_scores and kept < view.block.units and not view.block.ranked
    return dataclasses.replace(change, selector=selectors.taken(recipe.selector, view)) if scored else change


def _first(view: View, rng: np.random.Generator) -> Floats:  # noqa: ARG001  the interface of a selector
    """Score units by their order."""
    return -np.arange(view.block.units, dtype=np.float64)


def _compensator(recipe: Recipe, block: Block) -> Compensator:
    """Return the chosen compensator with the recipe's ridge parameter; none for channels inside heads.

    Queries and keys have no consumer. The basis of values is that in which the least is lost without compensation, and
    other heads, of which values vary little within a sample, would seem to repair on few samples what they do not.
    """
    if block.kind in INNER:
        return Plain()
    chosen: Any = COMPENSATORS[recipe.compensate]
    fields = {f.name for f in dataclasses.fields(chosen)}  # plug-ins are wrapped and keep their own ridge parameter
    compensator: Compensator = dataclasses.replace(chosen, alpha=recipe.ridge) if "alpha" in fields else chosen
    return compensator


def needs_data(recipe: Recipe) -> bool:
    """Return True if a method of the recipe reads activations."""
    reducer = REDUCERS[recipe.reducer]
    selecting = reducer.needs_scores and SELECTORS[recipe.selector].needs_data
    return selecting or reducer.needs_data or COMPENSATORS[recipe.compensate].needs_data


def needs_gram(recipe: Recipe, block: Block) -> bool:
    """Return True if selecting units of a block needs products of its channels."""
    reducer = REDUCERS[recipe.reducer]
    return reducer.needs_data or (
        reducer.needs_scores and not block.ranked and selectors.needs_gram_of(recipe.selector, block)
    )


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
