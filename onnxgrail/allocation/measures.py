"""Costs of a prepared model at given widths: counted exactly, or read from a built model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxgrail.calibration.prepared import Prepared, narrowed
from onnxgrail.calibration.quantize.form import elsewhere, in_form
from onnxgrail.calibration.quantize.light import Light, blank, converted, light_of
from onnxgrail.core import Block, Recipe
from onnxgrail.graph.bits.plan import NONE, TABLE, beside, plan_of, with_initializers
from onnxgrail.graph.bits.store import store_blank
from onnxgrail.graph.cost import counting
from onnxgrail.graph.cost.meter import Counted, Meter, Size, dead_of, meter_of
from onnxgrail.graph.cost.spare import surplus
from onnxgrail.graph.io.model_file import LIMIT, bytes_on_disk, weight_bytes
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.io.writing import written_bytes
from onnxgrail.graph.notes import note_bytes
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.job import Job
from onnxgrail.options import Metric
from onnxgrail.recipe.storage import mark


@dataclass(frozen=True, slots=True, eq=False)
class Few:
    """The bytes of weights in a few bits.

    Attributes:
        saved: by the weights of the whole model.
        sizes: by weight, its bytes as a function of its shape.
    """

    saved: float
    sizes: Mapping[str, Size]


@dataclass(frozen=True, slots=True, eq=False)
class Measure:
    """A cost of the whole model.

    Attributes:
        given: cost of the model as it was read.
        before: cost of the model that is narrowed; another one if streams or tables were rotated.
        meter: counts savings.
        per: divisor of the meter's numbers.
        few: bytes of weights in a few bits; None if weights keep their bits.
    """

    given: float
    before: float
    meter: Meter
    per: float = 1
    few: Few | None = None

    def __call__(self, widths: Mapping[str, int]) -> float:
        """Compute the cost with blocks of these widths."""
        if self.few is None:
            return self.before - self.meter.saved(widths) / self.per
        return self.before - self.few.saved - self.meter.saved(widths, self.few.sizes)

    def share(self, blocks: Sequence[Block], ratio: float) -> float:
        """Compute the cost left if a share of everything in the given blocks is removed."""
        whole = self.meter.saved({})
        return self.before - (whole + ratio * (self.meter.saved({b.name: 0 for b in blocks}) - whole)) / self.per


def measure_of(prepared: Prepared, metric: Metric, *, bare: bool = False) -> Measure:
    """Return the measure of parameters, multiply-accumulates per sample or bytes; latency uses multiply-accumulates.

    Args:
        prepared: the model.
        metric: which.
        bare: the file is written without notes of exporters.
    """
    if metric == "size":
        path = prepared.path
        read = prepared.original
        size = bytes_on_disk(read, path) if path is not None else len(to_bytes(prepared.given, run=False))
        more = 0 if read is prepared.model else weight_bytes(prepared.model) - weight_bytes(read)
        more -= note_bytes(read) if bare else 0
        return Measure(size, size + more, meter_of(prepared.model, prepared.survey, "bytes"))
    before = _counted(prepared, metric)
    given = counting.parameters(prepared.original) if metric == "params" else prepared.macs / prepared.samples
    meter = meter_of(prepared.model, prepared.survey, "params" if metric == "params" else "macs")
    return Measure(given, before, meter, 1 if metric == "params" else prepared.samples)


def of_result(prepared: Prepared, job: Job, metric: Metric) -> Measure:
    """Return the measure of the result; its bytes are those of the file that a tool quantizes in the end.

    What a width saves there is known from the whole model and one with half of the units.
    """
    measure = measure_of(prepared, metric, bare=job.recipe.wants_size)
    if metric != "size" or not job.recipe.uses_tool:
        return measure
    half = {block.name: -(-block.units // 2) for block in prepared.survey.blocks}
    whole, less = (built(prepared, job, metric, widths) for widths in ({}, half))
    if whole is None or less is None:
        return measure
    return replace(measure, before=whole, per=measure.meter.saved(half) / max(whole - less, 1.0))


def gone(prepared: Prepared, widths: Mapping[str, int]) -> tuple[int, int, int]:
    """Return the parameters, multiply-accumulates per run and bytes of weights that go at some widths."""
    model, first = prepared.model, prepared.baseline
    totals = [
        (counting.parameters(one.model), counting.macs(one.model, one.survey), weight_bytes(one.model))
        for one in (prepared, first)
    ]
    found = []
    counted: tuple[Counted, ...] = ("params", "macs", "bytes")
    for each, before, given in zip(counted, *totals, strict=True):
        saved = meter_of(model, prepared.survey, each).saved
        whole = saved({})
        more = before - whole - given if prepared.survey.rotated(widths) else 0  # constants of normalizations
        found.append(round(saved(widths) - whole - more))
    params, macs, size = found
    return params, macs, size


def _counted(prepared: Prepared, metric: Metric) -> float:
    if metric == "params":
        return counting.parameters(prepared.model)
    return counting.macs(prepared.model, prepared.survey) / prepared.samples


def built(
    prepared: Prepared, job: Job, metric: Metric, widths: Mapping[str, int], bits: Mapping[str, int] = NONE
) -> float | None:
    """Compute the cost in a model that is really narrowed (with split shared weights, stored shapes and the recipe).

    Args:
        prepared: the model.
        job: the run; its recipe is written into the file.
        metric: `params` or `size`; None is returned for others.
        widths: block name to units that stay.
        bits: by weight, see `graph.bits.plan.plan_of`.

    Returns:
        None for multiply-accumulates, and for very large models: there counting is all there is.
    """
    if metric not in ("params", "size"):
        return None
    left = prepared.left([block.name for block in prepared.survey.narrowed(widths)])
    slim = narrowed(left, ledger_of(left, widths))
    unused = 0
    if prepared.again is None:  # else what does not pay is not in this model any more
        counted = "params" if metric == "params" else "bytes"
        unused = surplus(left.model, left.survey, counted, dead_of(left.survey, widths))
    if metric == "params":
        return counting.parameters(slim) - unused
    mark(slim, job.recipe, held_out=job.held_out)
    if job.recipe.uses_tool:
        small = _by_tool(prepared, slim, job.recipe)
        slim, unused = small, unused * weight_bytes(small) // max(weight_bytes(slim), 1)
    if bits:
        slim = with_initializers(slim)
        bits = beside(slim, bits)
        plan = plan_of(slim, prepared.survey.facts, job.recipe, bits)
        store_blank(slim, plan, job.recipe)
        bits = {**bits, **dict.fromkeys(plan.coded, TABLE)}
        if converted(slim, bits):
            slim = _light(prepared, slim).with_bits(bits)
    return None if weight_bytes(prepared.model) > LIMIT else written_bytes(slim, job.weights) - unused


def _light(prepared: Prepared, slim: ir.Model) -> Light:
    """Return a model whose weights may have fewer bits, with zeros for the biases that follow data."""
    return light_of(slim, ()) if prepared.batches.synthetic else blank(slim)


def _by_tool(prepared: Prepared, slim: ir.Model, recipe: Recipe) -> ir.Model:
    """Return a model that is as large as the quantized one."""
    if recipe.quantize == "int8" and not elsewhere(recipe):
        return _light(prepared, slim).stored()
    return in_form(prepared, slim, recipe, tried=False).model


def ledger_of(prepared: Prepared, widths: Mapping[str, int]) -> Ledger:
    """Return decisions that give blocks these widths and change no weight."""
    empty = weights.empty(prepared.survey)
    return Ledger(dead=dead_of(prepared.survey, widths), arrays=empty.arrays)
