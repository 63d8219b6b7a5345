"""Statistics of the original model for a run, and the error by which two sets of widths are compared."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnxgrail.calibration.both import Pair, run_both
from onnxgrail.calibration.prepared import Prepared, narrowed
from onnxgrail.calibration.runtime.session import Setup
from onnxgrail.calibration.stream import dense
from onnxgrail.calibration.stream.dense import Dense
from onnxgrail.calibration.streaming import of_blocks
from onnxgrail.core import Block, Change, Recipe
from onnxgrail.graph.cost import counting
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.rewrite.interface import between
from onnxgrail.machine.job import Job

ALONE = 2  # feeds that measure the impact of one block


@dataclass(frozen=True, kw_only=True, slots=True)
class StatsFiles:
    """The files that statistics of the original model are read from and written to, None for no file."""

    read: Path | None = None
    write: Path | None = None


NO_FILES = StatsFiles()


def known(
    prepared: Prepared,
    blocks: Sequence[Block],
    job: Job,
    files: StatsFiles,
    *,
    shared: bool,
    together: int = sys.maxsize,
) -> Dense | None:
    """Return the statistics of all blocks in the original model; empty tuples in all processes but the first.

    Args:
        prepared: the model.
        blocks: the blocks that may be narrowed.
        job: recipe and processes.
        files: to read them from, or to write them to.
        shared: True if they will be needed more than once in this run.
        together: bytes of second moments to collect in one pass.

    Returns:
        None if there are no files and `shared` is False.

    Raises:
        DataError: the file belongs to another model or other data.
        OutputError: the file cannot be written.
    """
    if files.read is not None and not job.first:
        return {block.name: () for block in blocks}
    if files.read is not None:
        return dense.load(files.read, blocks, prepared.model, prepared.batches)
    if files.write is None and not shared:
        return None
    order = sorted(blocks, key=lambda block: block.span[0])
    found = {block.name: stats for block, stats in of_blocks(prepared, job, order, together=together)}
    if files.write is not None and job.first:
        dense.save(files.write, found, blocks, prepared.model, prepared.batches)
    return found


def impact_macs(prepared: Prepared) -> int:
    """Estimate the multiply-accumulates of one `impact`: the original and the narrowed model on a few feeds."""
    return 2 * len(prepared.batches.feeds[:ALONE]) * counting.macs(prepared.model, prepared.survey)


def impact(prepared: Prepared, recipe: Recipe, change: Change) -> float:
    """Compute the mean NMSE over the outputs if only this change is made, on a few feeds."""
    nothing = weights.empty(prepared.survey)
    ledger = weights.record(change, prepared.model, prepared.survey, nothing)
    few = dataclasses.replace(prepared.batches, feeds=prepared.batches.feeds[:ALONE])
    slim = narrowed(prepared, ledger)
    pair = Pair(to_bytes(prepared.model), to_bytes(slim), between(prepared.model, slim))
    tally = run_both(pair, few, Setup(providers=recipe.providers), judge=False)
    errors = [f.nmse for f in tally.results() if f.nmse is not None]
    return float(np.mean(errors)) if errors and np.isfinite(errors).all() else float("inf")
