"""Op rules of LSTM, GRU and RNN: the input width, and the hidden width that the layer feeds back to itself."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Ints
from onnxgrail.graph.ops.layers.contraction import BIAS, contracted
from onnxgrail.graph.ops.rule import narrow, rule
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

INPUT, WEIGHT, RECURRENCE, BIASES, HIDDEN, CELL, PEEPHOLES = 0, 1, 2, 3, 5, 6, 7  # operands
TIME = "a recurrent layer handles the steps and samples of a sequence as they are"
UNSEEN = "none of its outputs holds the hidden state, which its own recurrent weight reads"


@rule("LSTM", "GRU", "RNN")
def recurrent(site: Site) -> None:
    """Consume the last axis; tie a hidden unit to its gates, states and recurrent column."""
    if not all(site.is_constant(k) for k in (WEIGHT, RECURRENCE)):
        site.refuse("its weights are computed at run time")
        return
    _consume(site)
    hidden = _hidden(site)
    for operand in (BIASES, PEEPHOLES):  # (directions, n * hidden)
        times = site.shape(operand)[1] // len(hidden) if site.name(operand) else 0
        site.passenger(operand, np.tile(hidden, times), BIAS, axis=1, whole=True)
    for operand in (HIDDEN, CELL):
        _state(site, operand, hidden)
    for output in range(len(site.node.outputs)):
        if site.out_name(output):
            site.emit([Mark((len(site.out_shape(output)) - 1,), hidden)], output)


def _consume(site: Site) -> None:
    """Consume the input's features by the last axis of W (directions, gates * hidden, input)."""
    last, marks = len(site.shape(INPUT)) - 1, site.marks(INPUT)
    contracted(site, WEIGHT, 2, last, (site.collapse(mark, last) for mark in marks if last in mark.axes))
    site.freeze([mark for mark in marks if last not in mark.axes], TIME)


def _hidden(site: Site) -> Ints:
    """Return one label per hidden unit, tied to its rows in W and R for every gate and both directions.

    R reads the state of the previous step, so its columns contract the layer's own output: the sequence of states if
    present, else the last state.
    """
    hidden = site.weight(RECURRENCE, 2)
    for operand in (WEIGHT, RECURRENCE):
        rows = site.weight(operand, 1)
        site.union(np.tile(hidden, len(rows) // len(hidden)), rows)
        site.carry(operand, Mark((1,), rows), "producer")
    seen = next((k for k in (0, 1) if site.out_name(k)), None)
    if seen is None:
        site.freeze([Mark((2,), hidden)], UNSEEN)
    else:
        source = (site.out_name(seen), len(site.out_shape(seen)) - 1)
        site.carry(RECURRENCE, Mark((2,), hidden), "consumer", source)
    return hidden


def _state(site: Site, operand: int, hidden: Ints) -> None:
    """Tie an initial state to the hidden units if it has channels; the rewrite gathers from any other."""
    if not site.name(operand):
        return
    last = len(site.shape(operand)) - 1
    if site.is_constant(operand):
        site.carry(operand, Mark((last,), hidden))
    for mark in site.marks(operand):
        if last in mark.axes:
            site.union(site.collapse(mark, last), hidden)
        else:
            site.freeze([mark], TIME)


@narrow("LSTM", "GRU", "RNN")
def narrow_recurrent(cut: Cut) -> None:
    """Update `hidden_size`; gather the kept units from an initial state of full width (zeros, an input)."""
    outputs = [cut.output_name(k) for k in range(len(cut.node.outputs)) if cut.output_name(k)]
    stays = cut.alive(outputs[0]).get(len(cut.shape(outputs[0])) - 1)
    if stays is None:
        return
    if "hidden_size" in cut.node.attributes:
        cut.set_int("hidden_size", int(stays.sum()))
    for operand, hint in ((HIDDEN, "initial_h"), (CELL, "initial_c")):
        name = cut.input_name(operand)
        if not name or name in cut.facts.constants:
            continue
        axis = len(cut.shape(name)) - 1
        if cut.labels(name, axis) is None:
            along = [ir.AttrInt64("axis", axis)]
            cut.compute_operand(operand, "Gather", [cut.operand(operand), np.flatnonzero(stays)], hint, along)
