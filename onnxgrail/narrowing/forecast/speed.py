"""Measures how fast this machine multiplies matrices and runs a model."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import numpy as np

from onnxgrail.algebra.solve.linear import linear
from onnxgrail.calibration.feeds.signature import samples_of, signature_of
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.core import Floats, Recipe
from onnxgrail.errors import ModelError
from onnxgrail.graph.cost import counting
from onnxgrail.graph.io.model_file import HEAVY, weight_bytes
from onnxgrail.graph.io.serial import pack
from onnxgrail.narrowing.forecast.work import Work

SIDE, SMALL = 1024, 256  # of the matrices that are multiplied, for a forecast and for the progress
LARGE = 0.7  # speed of a large model, as a share of that of a product
PASSES, SUMS, SOLVES = 1.6, 1.2, 2.8  # seconds per second of plain passes and products: fitted to measured runs
MOVED, STEP, START = 3e-9, 0.025, 0.5  # seconds per number and step, and of every run
WEIGHTS = 15e-9  # seconds per byte of the model: it is copied, read by sessions, checked and written


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Speeds of a machine.

    Attributes:
        product: operations per second in a product of matrices in float32.
        passing: seconds that one run of the model over all calibration samples takes.
        fixed: seconds that do not depend on the work.
    """

    product: float
    passing: float
    fixed: float

    def seconds(self, work: Work) -> float:
        """Return the seconds that work takes."""
        counted = (SUMS * work.sums + SOLVES * work.solves) / self.product
        return self.fixed + PASSES * work.passes * self.passing + counted + MOVED * work.moved + STEP * work.steps


def measured(prepared: Prepared, recipe: Recipe) -> Speed:
    """Multiply two matrices and run the first feed; models too large for that are assumed to consist of products."""
    product, size = _product(), weight_bytes(prepared.model)
    found = None if size > HEAVY else _first_feed(prepared, recipe)
    if found is None:
        macs = counting.macs(prepared.model, prepared.survey) / prepared.samples * prepared.batches.samples
        found = 2 * macs / (LARGE * product)
    return Speed(product=product, passing=found, fixed=START + WEIGHTS * size)


@functools.cache
def rough() -> Speed:
    """Multiply two small matrices once per process, which takes milliseconds; work may have no passes."""
    return Speed(product=_product(SMALL), passing=0.0, fixed=0.0)


def _product(side: int = SIDE) -> float:
    matrix: Floats = np.ones((side, side), np.float32)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        linear().product(matrix, matrix)
        times.append(time.perf_counter() - started)
    return 2 * side**3 / min(times)


def _first_feed(prepared: Prepared, recipe: Recipe) -> float | None:
    """Return the seconds of a pass that follow from the first feed; None if it cannot be run."""
    feed, times = prepared.batches.first(), []
    try:
        with open_session(pack(prepared.model), Setup(providers=recipe.providers)) as session:
            for _ in range(2):  # the first run also gets memory
                started = time.perf_counter()
                session.run(feed)
                times.append(time.perf_counter() - started)
    except ModelError:
        return None
    return min(times) * prepared.batches.samples / samples_of(feed, signature_of(prepared.model))
