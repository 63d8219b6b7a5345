"""Start the stream of a run: the calibration data of a prepared model on their way through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.dense import in_parts
from onnxgrail.calibration.stream.probing import names
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
    """Yield the numbers of groups of probes with their statistics in the original model, in the order of the network.

    Arguments as in `in_parts`.
    """
    untouched = weights.empty(prepared.survey)
    with stream_of(prepared, job.recipe, job.group) as stream:
        order = sorted(range(len(wanted)), key=lambda number: stream.index.span(names(wanted[number])))
        found = in_parts(stream, untouched, [wanted[n] for n in order], job.progress, told, together=together)
        yield from ((order[place], stats) for place, stats in found)
