"""Counts the work of a run before it starts, from shapes alone.

Operations are floating-point additions and multiplications; rows are those of all calibration samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from onnxgrail.algebra.decide import needs_data, needs_gram
from onnxgrail.algebra.fit.choice import ALPHAS, SOME
from onnxgrail.algebra.fit.compensate import BEST
from onnxgrail.algebra.select.selectors import AUTO, SELECTORS
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.sizes import rows_of_all
from onnxgrail.core import Block, Probe, Recipe
from onnxgrail.graph.rotate.basis import Rotatable
from onnxgrail.narrowing.choosing import few_rows
from onnxgrail.narrowing.layers import Stage, stages_at
from onnxgrail.narrowing.rotation import probes_of
from onnxgrail.narrowing.two_networks import rows_wanted

ELIMINATION, EIGENVALUES = 8, 20  # operations per cubed width of the elimination of `obs`, and of a basis


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The work of a part of a run.

    Attributes:
        passes: runs of the model over all calibration samples.
        sums: operations of products, which processors do fastest.
        solves: operations of factorizations and substitutions.
        moved: numbers that are read from activations.
        steps: blocks that are decided, and groups of layers that are fitted.
    """

    passes: float = 0.0
    sums: float = 0.0
    solves: float = 0.0
    moved: float = 0.0
    steps: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Return both together."""
        passes, sums, solves, moved, steps = map(sum, zip(astuple(self), astuple(other), strict=True))
        return Work(passes=passes, sums=sums, solves=solves, moved=moved, steps=steps)

    def __mul__(self, times: float) -> Work:
        """Return the same work several times."""
        passes, sums, solves, moved, steps = (times * amount for amount in astuple(self))
        return Work(passes=passes, sums=sums, solves=solves, moved=moved, steps=steps)


def fits_of(prepared: Prepared, recipe: Recipe, widths: Mapping[str, int]) -> list[Stage]:
    """Return the layers that a recipe fits at given widths."""
    return stages_at(prepared, recipe, widths) if recipe.compensate == BEST else []


def of_run(prepared: Prepared, recipe: Recipe, left: Mapping[Block, float], stages: Sequence[Stage]) -> Work:
    """Return the work of deciding and fitting blocks.

    Args:
        prepared: the model and its data.
        recipe: the options.
        left: of each block that loses units, the share that stays.
        stages: layers to fit.
    """
    best = recipe.compensate == BEST
    if not best and not needs_data(recipe):
        return Work()
    parts = [of_statistics(prepared, recipe, block) for block in left]
    parts += [of_grail(prepared, recipe, block, share) for block, share in left.items() if not best]
    parts += [of_fit(prepared, stage) for stage in stages]
    return sum(parts, Work(passes=2.0 if best else 1.0))


def of_turning(prepared: Prepared, found: Rotatable) -> Work:
    """Return the work of giving streams, tables and heads bases of their own."""
    probes = probes_of(prepared, found).values()
    rows = [(_rows(prepared, probe), probe.width) for some in probes for probe in some]
    cubes = sum(max((probe.width for probe in some), default=0) ** 3 for some in probes)
    return Work(
        passes=1.0 if rows else 0.0,
        sums=sum(count * width**2 for count, width in rows) + of_weights(prepared, found),
        solves=EIGENVALUES * cubes,
        moved=sum(count * width for count, width in rows),
        steps=len(probes),
    )


def of_weights(prepared: Prepared, found: Rotatable) -> float:
    """Return the operations of the products of all weights at streams with the bases of these."""
    shapes = prepared.survey.facts.shapes
    slots = ((slot, stream) for stream in found.streams.values() for slot in stream.slots)
    return sum(2.0 * math.prod(shapes.get(slot.value.name or "", ())) * stream.width for slot, stream in slots)


def of_grail(prepared: Prepared, recipe: Recipe, block: Block, left: float, most: float = math.inf) -> Work:
    """Return the work of GRAIL's weights of the consumers of a block of which a share of the units is left.

    `most` are the outputs that are solved for.
    """
    if recipe.compensate == "none":
        return Work()
    shapes, work = prepared.survey.facts.shapes, Work()
    weights = sum(math.prod(shapes[slot.initializer]) for slot in block.slots if slot.role == "consumer")
    for probe in block.probes:
        rows, width, kept = _rows(prepared, probe), probe.width, left * probe.width
        outputs, gone = min(weights / max(width * len(block.probes), 1), most), (1 - left) * probe.width
        if few_rows(recipe, block, prepared):
            sums = 2 * rows * (width + kept) * outputs + rows**2 * kept
            work += Work(sums=sums, solves=rows**3 / 3 + 2 * rows**2 * outputs)
        else:
            sums = (2 * kept * gone + gone**2 + kept**2) * outputs
            work += Work(sums=sums, solves=kept**3 / 3 + 2 * kept**2 * outputs)
    return work


def of_statistics(prepared: Prepared, recipe: Recipe, block: Block) -> Work:
    """Return the work of the statistics of a block, and of an elimination of its units."""
    grail, work = recipe.compensate == "grail" and not few_rows(recipe, block, prepared), Work(steps=1.0)
    for probe in block.probes:
        rows, width = _rows(prepared, probe), probe.width
        enough = recipe.selector != AUTO or SELECTORS[AUTO].enough(rows, width)
        products = needs_gram(recipe, block) and enough
        eliminates = products and recipe.selector in (AUTO, "obs")
        work += Work(
            sums=rows * width**2 if products or grail else 0.0,
            solves=ELIMINATION * width**3 if eliminates else 0.0,
            moved=rows * width,
        )
    return work


def of_fit(prepared: Prepared, stage: Stage) -> Work:
    """Return the work of fitting layers that read the same rows: every ridge for some outputs, one of them for all."""
    shape = prepared.survey.facts.shapes.get(stage.first.output)
    if shape is None:  # a branch that the traced run did not take
        return Work(steps=1.0)
    every = math.prod(shape) / shape[stage.first.made] * prepared.batches.samples / prepared.samples
    rows, features = min(every, rows_wanted(stage)), stage.features
    columns = stage.tasks[0].inputs if stage.through else stage.outputs
    through = 2 * features * stage.tasks[0].inputs * stage.outputs if stage.through else 0
    searched = len(ALPHAS) * min(SOME, stage.outputs) * len(stage.tasks) + stage.outputs
    return Work(
        sums=rows * features * (features + 2 * columns) + through,
        solves=(len(ALPHAS) + 1) * features**3 / 3 + 2 * features**2 * searched,
        moved=rows * (features + columns),
        steps=1.0,
    )


def _rows(prepared: Prepared, probe: Probe) -> float:
    return rows_of_all(probe, prepared) if probe.value in prepared.survey.facts.shapes else 0.0
