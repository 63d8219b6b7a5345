"""A prepared model: read, run once and traced, with the data that fit and judge it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrail.calibration.branching import Maker
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.judging import AUTO, HeldOut, few, ungated
from onnxgrail.calibration.feeds.signature import padding_mask, samples_of, signature_of
from onnxgrail.calibration.metric import Metric
from onnxgrail.calibration.runtime.latency import single
from onnxgrail.core import Array, Bools, Floats
from onnxgrail.graph.cost import counting
from onnxgrail.graph.cost.spare import needed, pairs_of, paying
from onnxgrail.graph.fittable.means import as_means
from onnxgrail.graph.flatten.branches import Route, folded
from onnxgrail.graph.flatten.direct import NOTHING, Unlisted, relisted
from onnxgrail.graph.io.model_file import copy
from onnxgrail.graph.rewrite.caches import shown, without_matrices
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.rewrite.interface import between, changed, fit, note
from onnxgrail.graph.rewrite.rows import Trimmed
from onnxgrail.graph.rotate.marked import MEAN
from onnxgrail.graph.rotate.restore import restore
from onnxgrail.graph.trace.survey import Ledger, Survey, named_as

SOME = 0.01  # share of the held-out samples from which those that fits have seen count


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """A model that has been read, run once and traced.

    Attributes:
        path: of the model file, None if no file was given.
        model: the graph, with the branches of its If nodes inlined; never changed.
        batches: calibration feeds.
        survey: the trace of the graph.
        feed: the small feed of the trace.
        routes: the branches that each calibration feed takes; empty for a model without branches.
        gradients: `View.gradient` by block; empty if no selector needs it.
        held_out: samples that judge the result and that nothing is fitted to; None if there are none.
        asked: the user's request for held-out samples.
        metric: the user's own loss, None for that of the outputs' kinds.
        unlisted: weights that were inputs of the graph and no longer are.
        unrotated: the model before its residual streams, tables and heads were rotated; None if they were not.
        bases: of the rotated streams, tables and heads, by name.
        again: returns the model with only some of these bases.
        whole: the model before its tables lost rows and means became products; None if neither happened.
        trimmed: the tables that lost rows.
    """

    path: Path | None
    model: ir.Model
    batches: Batches
    survey: Survey
    feed: Mapping[str, Array]
    gradients: Mapping[str, Floats] = field(default_factory=dict)
    held_out: HeldOut | None = None
    asked: str = AUTO
    metric: Metric | None = None
    unlisted: Unlisted = NOTHING
    routes: Mapping[Maker, Route] = field(default_factory=dict)
    unrotated: Prepared | None = None
    bases: Mapping[str, Floats] = field(default_factory=dict)
    again: Callable[[frozenset[str]], Prepared] | None = None
    whole: ir.Model | None = None
    trimmed: tuple[Trimmed, ...] = ()

    @property
    def baseline(self) -> Prepared:
        """Return the model before anything was rotated; it gives the numbers of the one that was read."""
        return self.unrotated or self

    @property
    def original(self) -> ir.Model:
        """Return the model as it was read, with which results are compared."""
        return self.whole or self.baseline.model

    @property
    def given(self) -> ir.Model:
        """Return the model with the inputs it was given with, the baseline of speed comparisons."""
        return relisted(self.original, self.unlisted)

    @property
    def shown(self) -> Survey:
        """Return the trace for reports: without what stands between heads and their caches."""
        return shown(self.model, self.survey)

    @property
    def macs(self) -> int:
        """Return the multiply-accumulates of the model as it was read, per run on the probe feed."""
        first, shapes = self.baseline, self.baseline.survey.facts.shapes
        sizes = [
            (table, math.prod(shapes[head]) * shapes[table.table][-1]) for table in self.trimmed for head in table.heads
        ]
        more = sum(macs // table.rows_after * (table.rows_before - table.rows_after) for table, macs in sizes)
        nodes = [node for node in first.model.graph if MEAN not in node.metadata_props]  # means are no products there
        return sum(counting.node_macs(node, first.survey, None) for node in nodes) + more

    @property
    def samples(self) -> int:
        """Return the number of samples in the probe feed: the common first axis, 1 if there is none."""
        return samples_of(self.feed, signature_of(self.model))

    def left(self, names: Collection[str]) -> Prepared:
        """Return the model as it is if only the blocks of these names lose units: with the bases that they need.

        It is the model itself if some of them would be no blocks without the other bases.
        """
        blocks = [block for block in self.survey.blocks if block.name in names]
        used = {block.ranked for block in blocks} - {""} | needed(self.model, blocks)
        inside = {name for name, basis in self.bases.items() if basis.ndim != 2}
        used |= inside if used & inside else set()  # a head that stays for one of them stays for all
        left = self._with_bases(used)
        if left is self:
            return self
        left = replace(left, survey=named_as(left.survey, self.survey), gradients=self.gradients)
        return left if {*names} <= {block.name for block in left.survey.blocks} else self

    def paying(self, widths: Mapping[str, int], cost: Callable[[Mapping[str, int]], float]) -> dict[str, int]:
        """Return widths at which what lies between two convolutions is whole where one costs no more."""
        return paying(self.model, self.survey, widths, cost)

    def undivided(self) -> Prepared:
        """Return the model in its other bases, but with each layer that became two as one."""
        pairs = {pair.basis for pair in pairs_of(self.model, self.survey)}
        return replace(self._with_bases(self.bases.keys() - pairs), batches=self.batches)

    def _with_bases(self, used: AbstractSet[str]) -> Prepared:
        """Return the model in some of its bases only; the model itself if it cannot be made again."""
        if used == self.bases.keys() or (used and self.again is None):
            return self
        return self.again(frozenset(used)) if used and self.again is not None else self.baseline

    def as_written(self) -> Prepared:
        """Return a copy with the graph as in the file, for code that does not follow channels into branches."""
        return replace(self, model=folded(self.model))

    def before_refinement(self) -> Prepared:
        """Return a copy without the batches that choose a refinement's weights, which nothing else may be fitted to."""
        return replace(self, batches=ungated(self.batches))

    @property
    def judges(self) -> Batches:
        """Return the feeds that judge the result: held-out feeds, or else a few calibration feeds."""
        return few(self.batches) if self.held_out is None else self.held_out.batches

    def fed(self, model: ir.Model, batches: Batches | None = None) -> Batches:
        """Return the feeds, calibration feeds unless others are given, as a narrowed model takes them.

        Key-value caches that are inputs may have lost heads.
        """
        ports, some = between(self.model, model), self.batches if batches is None else batches
        feeds = tuple(lambda make=make: fit(make(), ports) for make in some.feeds)
        return replace(some, feeds=feeds)

    def masks(self) -> tuple[Bools | None, ...]:
        """Return per feed the mask (samples, tokens) of real positions; None if there is no padding."""
        return tuple(map(padding_mask, self.batches))

    def fed_small(self, model: ir.Model) -> dict[str, Array]:
        """Return the small feed of the trace as a narrowed model takes it."""
        return fit(self.feed, between(self.model, model))

    def one_sample(self, model: ir.Model) -> dict[str, Array]:
        """Return the first sample of the small feed, as a narrowed model takes it, to be timed."""
        return single(self.fed_small(model), signature_of(self.model))

    def scarce(self) -> str:
        """Return a warning if the data hold too few samples for reliable statistics, '' otherwise."""
        held = self.held_out
        back = 0 if held is None or held.own else held.batches.samples
        return self.batches.scarce(back, judged=held is not None and held.own)


def rounds(prepared: Prepared) -> bool:
    """Return True if activations are quantized within the graph, so that rounding of a sum can change a level."""
    constants = prepared.survey.facts.constants
    return any(
        node.op_type == "QuantizeLinear" and (node.outputs[0].name or "") not in constants
        for node in prepared.model.graph
    )


def narrowed(prepared: Prepared, ledger: Ledger) -> ir.Model:
    """Return a copy of the model with all decisions applied, as it will be written to a file."""
    slim = copy(prepared.model)
    apply(slim.graph, prepared.survey, ledger)
    note(slim, [*changed(prepared.model, prepared.survey, ledger.dead), *without_matrices(slim)])
    as_means(slim)
    restore(slim)
    return folded(slim)


def judged_by(prepared: Prepared) -> dict[str, Any]:
    """Return the report entry on the samples that judge the result and the user's request for them."""
    held = prepared.held_out
    if held is not None:
        return {"on": "held-out", **held_out_entry(held), "seen": held.seen > SOME * held.batches.samples}
    batches = prepared.judges
    on, signature = "random" if batches.synthetic else "calibration", signature_of(prepared.model)
    count = sum(samples_of(feed, signature) for feed in batches)
    seen = not batches.synthetic
    return {"on": on, "asked": prepared.asked, "source": batches.source, "samples": count, "seen": seen}


def held_out_entry(held: HeldOut) -> dict[str, Any]:
    """Return the report entry on the held-out samples and the user's request for them."""
    return {"asked": held.asked, "source": held.batches.source, "samples": held.batches.samples}
