"""Start the stream of a run: the calibration data of a prepared model on their way through it."""

from __future__ import annotations

from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.core import Recipe
from onnxgrail.machine.amounts import cache_bytes
from onnxgrail.machine.group.sums import SOLO, Group


def stream_of(prepared: Prepared, recipe: Recipe, group: Group = SOLO, *, share: int = 1) -> Stream:
    """Return the stream of the calibration data through the model.

    Args:
        prepared: the traced model and its data.
        recipe: the options; providers and cache size are used.
        group: the processes that share the batches.
        share: number of streams that divide the cache budget.
    """
    return Stream(prepared, providers=recipe.providers, budget=cache_bytes(recipe) // share, group=group)
