"""Start the stream of a run: the calibration data of a prepared model on their way through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.dense import grouped
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.core import Probe, Recipe, Stats
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.amounts import cache_bytes
from onnxgrail.machine.group.sums import SOLO, Group
from onnxgrail.machine.progress import Progress, ticking

PART = 2**27  # bytes of second moments that are measured together; while they are added up they take a few times that


def stream_of(prepared: Prepared, recipe: Recipe, group: Group = SOLO, *, share: int = 1) -> Stream:
    """Return the stream of the calibration data through the model.

    Args:
        prepared: the traced model and its data.
        recipe: the options; providers and cache size are used.
        group: the processes that share the batches.
        share: number of streams that divide the cache budget.
    """
    return Stream(prepared, providers=recipe.providers, budget=cache_bytes(recipe) // share, group=group)


def in_parts(stream: Stream, probes: Sequence[Probe], ledger: Ledger, progress: Progress, told: str) -> Iterator[Stats]:
    """Yield the statistics of probes in their order; those of a part are measured together, and can then be released.

    In all processes but the first, there are none; all of them must ask for the first one.

    Args:
        stream: at its start.
        probes: what is measured.
        ledger: the decisions so far.
        progress: is told about every batch of a part, under the name `told`.
        told: as above.
    """
    parts = grouped(probes, lambda probe: 8 * probe.width ** (1 if probe.alone else 2), PART)
    tick = ticking(progress, told, len(parts) * len(stream.masks))
    for part in parts:
        yield from stream.measure(part, ledger, tick)
