"""Start the stream of a run: the calibration data of a prepared model on their way through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.dense import in_parts
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.core import Probe, Recipe, Stats
from onnxgrail.graph.rewrite import weights
from onnxgrail.machine.amounts import cache_bytes
from onnxgrail.machine.group.sums import SOLO, Group
from onnxgrail.machine.job import Job


def stream_of(prepared: Prepared, recipe: Recipe, group: Group = SOLO, *, share: int = 1) -> Stream:
    """Return the stream of the calibration data through the model.

    Args:
        prepared: the traced model and its data.
        recipe: the options; providers and cache size are used.
        group: the processes that share the batches.
        share: number of streams that divide the cache budget.
    """
    return Stream(prepared, providers=recipe.providers, budget=cache_bytes(recipe) // share, group=group)


def in_original(
    prepared: Prepared, job: Job, wanted: Sequence[Sequence[Probe]], told: str, *, together: int
) -> Iterator[tuple[int, tuple[Stats, ...]]]:
    """Yield the numbers of groups of probes with their statistics in the original model, as `in_parts` does."""
    untouched = weights.empty(prepared.survey)
    with stream_of(prepared, job.recipe, job.group) as stream:
        yield from in_parts(stream, untouched, wanted, job.progress, told, together=together)
