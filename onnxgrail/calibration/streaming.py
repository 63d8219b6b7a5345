"""Start the stream of a run: the calibration data of a prepared model on their way through it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.cache import Beginning
from onnxgrail.calibration.stream.dense import TOGETHER, by_block, grouped
from onnxgrail.calibration.stream.probing import names
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.core import Block, Ints, Probe, Recipe, Stats
from onnxgrail.graph.cuts.segment import index_of
from onnxgrail.graph.rewrite import weights
from onnxgrail.machine.amounts import cache_bytes
from onnxgrail.machine.group.sums import FIRST, SOLO, Group, Tally
from onnxgrail.machine.job import Job
from onnxgrail.machine.progress import ticking
from onnxgrail.machine.steps.codec import Record
from onnxgrail.machine.steps.steps import Steps


def stream_of(
    prepared: Prepared, recipe: Recipe, group: Group = SOLO, *, share: int = 1, beginning: Beginning | None = None
) -> Stream:
    """Return the stream of the calibration data through the model.

    Args:
        prepared: the traced model and its data.
        recipe: the options; providers and cache size are used.
        group: the processes that share the batches.
        share: number of streams that divide the cache budget.
        beginning: where the stream begins; None for the feeds.
    """
    budget = cache_bytes(recipe) // share
    return Stream(prepared, providers=recipe.providers, budget=budget, group=group, beginning=beginning)


def of_blocks(
    prepared: Prepared, job: Job, blocks: Sequence[Block], *, together: int = TOGETHER
) -> Iterator[tuple[Block, tuple[Stats, ...]]]:
    """Yield each block with the statistics of its probes in the original model; other arguments as in `in_original`."""
    found = in_original(prepared, job, [block.probes for block in blocks], "measuring", together=together)
    return ((blocks[number], stats) for number, stats in found)


def in_order(prepared: Prepared, wanted: Sequence[Sequence[Probe]]) -> list[int]:
    """Return the numbers of groups of probes in the order of the network."""
    index = index_of(prepared.model.graph)
    return sorted(range(len(wanted)), key=lambda number: index.span(names(wanted[number])))


def in_original(
    prepared: Prepared, job: Job, wanted: Sequence[Sequence[Probe]], told: str, *, together: int
) -> Iterator[tuple[int, tuple[Stats, ...]]]:
    """Yield the numbers of groups of probes with their statistics in the original model, a part of them at a time.

    A caller that releases the statistics of each part needs no more memory than `together` bytes.  Where there are too
    many weights to read them at once, every group is a part, and runs only nodes that no later part needs again.  If
    several processes share the work, only the first process gets statistics; the others get empty tuples.

    Args:
        prepared: the traced model and its data.
        job: the options and the processes; its progress is told about every batch of a part.
        wanted: groups of probes, best in the order of the network.
        told: the name under which progress is told.
        together: bytes of second moments that are added up at once; a single group may take more.
    """
    untouched = weights.empty(prepared.survey)
    with stream_of(prepared, job.recipe, job.group) as stream:
        limits: Sequence[int | None] = [None] * len(wanted)
        if stream.heavy:
            firsts = [stream.index.span(names(some))[0] for some in wanted]
            limits, together = [*reversed([*itertools.accumulate(reversed(firsts[1:]), min)]), None], 0
        parts = grouped(range(len(wanted)), lambda number: sum(8 * p.numbers for p in wanted[number]), together)
        tick = ticking(job.progress, told, len(parts) * len(stream.masks))
        for part in parts:
            found = stream.measure([p for number in part for p in wanted[number]], untouched, tick, limits[part[-1]])
            yield from zip(part, by_block([wanted[number] for number in part], found), strict=True)


def starts_of(stream: Stream, steps: Steps) -> Ints:
    """Return the number of the first sample of every batch, in all processes."""
    tally = Tally(stream.shard)
    for number, samples in zip(stream.shard.numbers, stream.samples, strict=True):
        row = np.zeros(stream.shard.total)
        row[number] = samples
        tally.add(number, [row])
    found = tally.total([FIRST])
    sizes_of_all = steps.shared(lambda: Record(arrays={"sizes": found[0]})).arrays["sizes"]
    return np.cumsum(sizes_of_all).astype(np.int64) - sizes_of_all.astype(np.int64)
