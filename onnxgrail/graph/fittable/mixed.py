"""Trace a model whose means and normalizations no longer keep all channels that they read, where fits repair that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Block
from onnxgrail.graph.attributes import name_of
from onnxgrail.graph.fittable.hidden import Hidden, hidden_norms, run_over_those_left
from onnxgrail.graph.fittable.means import Mean, as_products, means_of
from onnxgrail.graph.io.model_file import copy
from onnxgrail.graph.ops.tensors.reduce import GROUP, MIXED
from onnxgrail.graph.rotate.norms import norms_of
from onnxgrail.graph.trace.facts import Facts
from onnxgrail.graph.trace.survey import Survey
from onnxgrail.graph.trace.tracer import trace

FEW = 2  # layers that write the channels of a normalization, as of a gated MLP; more write a residual stream
PLAIN = ("mlp", "conv")  # kinds of blocks that a normalization may be inside of


@dataclass(frozen=True, slots=True)
class Lacks:
    """Why nothing repairs means, or normalizations, so that they stay as they are; '' if something does."""

    means: str = ""
    norms: str = ""


def traced(model: ir.Model, facts: Facts, lacks: Lacks, *, interface: bool = False) -> tuple[ir.Model, Survey]:
    """Trace a model in which means are products, and hidden normalizations run over the channels that stay.

    Only those are changed that would otherwise keep blocks from being narrowed.

    Args:
        model: the graph; it is not changed.
        facts: concrete shapes and known values of its tensors.
        lacks: the reasons for channels before those that nothing repairs.
        interface: as for `trace`.

    Returns:
        The model, or a copy if it has such nodes, and its trace.
    """
    survey = trace(model, facts, interface=interface)
    if not any(refusal.reason in (MIXED, GROUP) for refusal in survey.refusals):
        return model, survey
    normed = norms_of(model, facts)
    means, norms = means_of(model, facts, normed), hidden_norms(model, facts, normed)
    if not means and not norms:
        return model, survey
    changed = _changed(model, facts, means, norms)
    seen = trace(*changed, interface=interface)
    means_in = [(mean, _holding(seen, name_of(mean.node, 0), mean.axis)) for mean in means]
    norms_in = [(norm, _holding(seen, norm.source.name or "", norm.axis)) for norm in norms]
    held_means = [(mean, blocks) for mean, blocks in means_in if blocks]
    held_norms = [(norm, blocks) for norm, blocks in norms_in if blocks and all(map(_is_hidden, blocks))]
    stuck = _writers(held_means, lacks.means) | _writers(held_norms, lacks.norms)
    some_means = [mean for mean, _ in held_means if not lacks.means]
    some_norms = [norm for norm, _ in held_norms if not lacks.norms]
    if (len(some_means), len(some_norms)) == (len(means), len(norms)):
        model, survey = changed[0], seen
    elif some_means or some_norms:
        model, facts = _changed(model, facts, some_means, some_norms)
        survey = trace(model, facts, interface=interface)
    refusals = (replace(why, reason=stuck.get(why.value, why.reason)) for why in survey.refusals)
    return model, replace(survey, refusals=tuple(refusals))


def _changed(source: ir.Model, facts: Facts, means: Sequence[Mean], norms: Sequence[Hidden]) -> tuple[ir.Model, Facts]:
    model = copy(source)
    run_over_those_left(model, norms)
    return model, as_products(model, facts, means)


def _holding(survey: Survey, name: str, axis: int) -> list[Block]:
    """Return the blocks with channels of a tensor on an axis."""
    labels = [mark.labels for mark in survey.marks.get(name, ()) if mark.axes == (axis,)]
    return [block for block in survey.blocks if any(np.isin(block.ids, found).any() for found in labels)]


def _is_hidden(block: Block) -> bool:
    """Return True if few layers write the channels of a block, and none of them are heads."""
    return block.kind in PLAIN and len({slot.param for slot in block.producers}) <= FEW


def _writers(held: Sequence[tuple[Mean | Hidden, list[Block]]], reason: str) -> dict[str, str]:
    """Return the reason by the weights that write the channels, if there is a reason."""
    blocks = [block for _, blocks in held for block in blocks if reason]
    return {slot.initializer: reason for block in blocks for slot in block.producers}
