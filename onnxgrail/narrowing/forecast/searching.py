"""Predicts the work and the memory of a search for widths before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxgrail.algebra.fit.normal import SOME
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.dense import size_of
from onnxgrail.core import Block, Recipe
from onnxgrail.graph.cost import counting
from onnxgrail.graph.io.model_file import weight_bytes
from onnxgrail.graph.rotate.basis import Rotatable
from onnxgrail.narrowing.forecast.work import Work, of_grail, of_weights
from onnxgrail.search import trials
from onnxgrail.search.harms import SHARES, Near
from onnxgrail.search.within import PATIENCE

HALF = 0.5  # of the network is run for a trial of a single block, which has half of its units on average
USUAL = 0.3  # share of the units that go where it is not known
READ = 3  # copies of the weights at streams in float64, while a stream is decided at one width
WAYS = 2  # candidates that are compared where an amount is given


def of_search(
    prepared: Prepared, recipe: Recipe, blocks: Sequence[Block], found: Rotatable | None, plain: Work
) -> Work:
    """Return the work of a search for widths.

    Errors of single blocks are computed at several widths and a few of these tried, a few blocks are tried with fits,
    and candidates are decided, fitted and judged. What the original computes is known after the first candidate.

    Args:
        prepared: the model and its data.
        recipe: the options.
        blocks: the blocks that may be narrowed.
        found: what is turned, which adds blocks.
        plain: the work at given widths.
    """
    samples = max(prepared.batches.samples, 1)
    near = Near() if recipe.max_loss is not None else Near(share=recipe.ratio or USUAL)
    turned = 0 if found is None else len(found.names)
    others = [block for block in blocks if block.kind != "heads" or not turned]
    count = near.trials * max(len(others) + turned, 1)
    macs = max(counting.macs(prepared.model, prepared.survey) / prepared.samples, 1.0)
    judged = trials.judged_macs(prepared)
    each = HALF + (judged - macs) / macs
    alone = Work(passes=count * each * trials.wanted(prepared.batches.samples, judged, count) / samples, steps=count)
    widths = Work()
    for block in others:
        widths += of_grail(prepared, recipe, block, HALF, SOME) * len(SHARES)
        widths += of_grail(prepared, recipe, block, HALF) * near.trials
    streams = Work(solves=0.0 if found is None else of_weights(prepared, found) * len(SHARES))
    tries = WAYS if recipe.max_loss is None else PATIENCE[recipe.effort].tries
    again = replace(plain, passes=1.0 + prepared.judges.samples / samples)
    return alone + widths + streams + plain * trials.RUNS + again * tries


def searched_bytes(prepared: Prepared, blocks: Sequence[Block], found: Rotatable | None) -> int:
    """Return the bytes that a search holds besides: statistics, and weights at streams in float64."""
    streams = found is not None and found.streams
    return sum(map(size_of, blocks)) + (2 * READ * weight_bytes(prepared.model) if streams else 0)
