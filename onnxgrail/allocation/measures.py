"""What a prepared model costs at given widths: counted exactly, built to see, or timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from onnxgrail.calibration.feeds.signature import signature_of
from onnxgrail.calibration.prepare import Prepared, narrowed
from onnxgrail.calibration.runtime.latency import in_turn, single
from onnxgrail.core import Block, Recipe
from onnxgrail.graph.cost import counting
from onnxgrail.graph.cost.meter import Meter, dead_of
from onnxgrail.graph.io.model_file import LIMIT, bytes_on_disk, weight_bytes
from onnxgrail.graph.io.serial import to_bytes, to_file
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.rewrite.interface import changed, fit
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.amounts import Metric
from onnxgrail.recipe.storage import mark


@dataclass(frozen=True, slots=True, eq=False)
class Measure:
    """A cost of the whole model.

    Attributes:
        before: of the original.
        meter: where it is counted.
        per: what the meter's numbers are divided by.
    """

    before: float
    meter: Meter
    per: int = 1

    def __call__(self, widths: Mapping[str, int]) -> float:
        """With blocks of these widths."""
        return self.before - self.meter.saved(widths) / self.per

    def share(self, blocks: Sequence[Block], ratio: float) -> float:
        """What stays when a share of all that lies in some blocks goes."""
        return self.before - ratio * self.meter.saved({b.name: 0 for b in blocks}) / self.per


def measure_of(prepared: Prepared, metric: Metric) -> Measure:
    """Parameters, multiply-accumulates per sample or bytes; latency follows multiply-accumulates."""
    model, survey = prepared.model, prepared.survey
    if metric == "params":
        return Measure(counting.parameters(model), Meter(model, survey, "params"))
    if metric == "size":
        path = prepared.path
        before = bytes_on_disk(model, path) if path is not None else len(to_bytes(prepared.given, run=False))
        return Measure(before, Meter(model, survey, "bytes"))
    total = counting.macs(model, survey) / prepared.samples
    return Measure(total, Meter(model, survey, "macs"), prepared.samples)


def built(prepared: Prepared, recipe: Recipe, metric: Metric, widths: Mapping[str, int]) -> float | None:
    """The same, looked up in a model that is really narrowed (shared weights split, shapes are written down, and
    the recipe).

    None where counting is all there is: multiply-accumulates, and files whose weights lie beside them.
    """
    if metric not in ("params", "size"):
        return None
    slim = narrowed(prepared, _ledger(prepared, widths))
    if metric == "params":
        return counting.parameters(slim)
    mark(slim, recipe)
    return None if weight_bytes(prepared.model) > LIMIT else len(to_file(slim).SerializeToString())


def stopwatch(prepared: Prepared, recipe: Recipe) -> Callable[[Mapping[str, int]], tuple[float, float]]:
    """Milliseconds of one run of the original and of the model at given widths, measured in turn."""
    feed = single(next(iter(prepared.batches)), signature_of(prepared.model))
    before = to_bytes(prepared.given)

    def timed(widths: Mapping[str, int]) -> tuple[float, float]:
        ledger = _ledger(prepared, widths)
        ports = changed(prepared.model, prepared.survey, ledger.dead)
        after = to_bytes(narrowed(prepared, ledger))
        feeds = feed, fit(feed, ports)
        return in_turn(before, after, feeds, providers=recipe.providers)

    return timed


def _ledger(prepared: Prepared, widths: Mapping[str, int]) -> Ledger:
    empty = weights.empty(prepared.survey)
    return Ledger(dead=dead_of(prepared.survey, widths), arrays=empty.arrays)
