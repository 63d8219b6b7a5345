"""Predicts the memory and the disk space of a run from shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxgrail.algebra.decide import needs_data
from onnxgrail.allocation.measures import measure_of
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.sizes import scale_of
from onnxgrail.core import Block, Recipe
from onnxgrail.graph.io.mapped import in_files
from onnxgrail.graph.io.model_file import weight_bytes
from onnxgrail.machine.amounts import cache_bytes, fit_bytes
from onnxgrail.machine.job import Job
from onnxgrail.machine.memory import peak_rss_bytes
from onnxgrail.narrowing.choosing import room
from onnxgrail.narrowing.layers import Stage

WEIGHTS, LARGEST, LIVE = 2.0, 0.5, 1.3  # of weights, the largest step and a tensor over all samples: fitted to runs


def memory_of(prepared: Prepared, recipe: Recipe, blocks: Sequence[Block], stages: Sequence[Stage]) -> int:
    """Return the bytes of the largest resident memory: the peak so far, and what the rest of the run adds.

    Pages of files that are mapped do not count.

    Args:
        prepared: the model and its data.
        recipe: the options.
        blocks: those that lose units.
        stages: layers to fit.
    """
    weights = 0 if in_files(prepared.model) else weight_bytes(prepared.model)
    most = fit_bytes(recipe)
    fits = [stage.memory for stage in stages if stage.memory <= most]
    largest = max([0, *(room(block, prepared) for block in blocks), *fits])
    more = WEIGHTS * weights + LARGEST * largest + min(_kept(prepared), cache_bytes(recipe))
    return (peak_rss_bytes() or 0) + int(more)


def disk_of(prepared: Prepared, job: Job, widths: Mapping[str, int]) -> int:
    """Return the bytes of the result, of finished steps with `--resume`, and of activations beyond the memory budget.

    Activations are in temporary files.
    """
    size = int(measure_of(prepared, "size", bare=job.recipe.wants_size)(widths))
    beyond = max(_kept(prepared) - cache_bytes(job.recipe), 0.0) if needs_data(job.recipe) else 0.0
    return (size if job.folder is None else 2 * size) + int(beyond)


def _kept(prepared: Prepared) -> float:
    """Return the bytes of the activations that are kept at a place of the network, of all samples."""
    survey = prepared.survey
    made = survey.facts.shapes.keys() - prepared.model.graph.initializers.keys()
    return LIVE * scale_of(prepared.batches, survey) * max(map(survey.facts.bytes_of, made), default=0)
