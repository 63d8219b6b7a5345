"""Verify the result: run the ONNX checker, and compare with the original model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import onnx
import onnx_ir as ir

from onnxgrail.calibration.both import Pair, run_both
from onnxgrail.calibration.feeds.signature import free_sizes, signature_of
from onnxgrail.calibration.prepared import Prepared, held_out_entry, judged_by
from onnxgrail.calibration.runtime.session import Setup
from onnxgrail.calibration.stream.relay import DEEP
from onnxgrail.core import Recipe
from onnxgrail.errors import ModelError
from onnxgrail.fidelity import Fidelity, entries, headline
from onnxgrail.graph.io.mapped import in_files, weight_files
from onnxgrail.graph.io.serial import pack, runs_as_is, skeleton
from onnxgrail.graph.rewrite.interface import between
from onnxgrail.machine.job import Job
from onnxgrail.report.report import Verification


def verify(prepared: Prepared, slim: ir.Model, job: Job) -> tuple[Verification, tuple[Fidelity, ...]]:
    """Run the ONNX checker and compare original and result, before anything is written.

    They are compared on the held-out samples; if there are none, on a few of the calibration samples.  `passes` judges
    the same results.

    Raises:
        ModelError: ONNX Runtime does not load or run the result.
    """
    given = prepared.original
    inside = in_files(given) and not weight_files(given)  # ONNX Runtime would load the whole file
    before = prepared.path if prepared.path is not None and runs_as_is(given) and not inside else pack(given)
    apart, ports, batches = prepared.held_out, between(prepared.model, slim), prepared.judges
    pair = Pair(before, pack(slim), ports)
    setup = setup_of(prepared, job.recipe)
    run = functools.partial(run_both, pair, batches, texts=True, progress=job.progress)
    deep = len(prepared.model.graph) >= DEEP and not ports
    sizes = free_sizes(signature_of(prepared.model), batches) if deep else {}
    try:
        results = run(replace(setup, sizes=sizes)).results()
    except ModelError:
        if not sizes:
            raise
        results = run(setup).results()  # a file with contradictory shapes may only run with open sizes
    outputs = tuple(entries(results))
    verification = Verification(
        checker=_checks(slim),
        ort_load=True,
        outputs=outputs,
        held_out=None if apart is None else {**held_out_entry(apart), "outputs": outputs},
        judged=judged_by(prepared),
        headline=headline(results),
    )
    return verification, results


def setup_of(prepared: Prepared, recipe: Recipe) -> Setup:
    """Return how results are run: without copies of weights if those of the original stay in files."""
    return Setup.as_is(recipe.providers) if in_files(prepared.original) else Setup(providers=recipe.providers)


def verified(prepared: Prepared, slim: ir.Model, job: Job) -> tuple[Verification | None, tuple[Fidelity, ...]]:
    """Return what `verify` does if the recipe asks for checks, else None and nothing."""
    if not job.recipe.check:
        return None, ()
    with job.clock.stage("verify"):
        return verify(prepared, slim, job)


def _checks(slim: ir.Model) -> bool:
    """Return True if the ONNX checker accepts the result; it rejects files with ops outside the standard."""
    try:
        onnx.checker.check_model(skeleton(slim))
    except (onnx.checker.ValidationError, ValueError):
        return False
    return True


def passes(results: Sequence[Fidelity], recipe: Recipe) -> bool:
    """Return True if `min_cosine` is not set, or the lowest cosine of the outputs reaches it."""
    cosines = [r.cosine for r in results if r.cosine is not None]
    return recipe.min_cosine is None or (bool(cosines) and min(cosines) >= recipe.min_cosine)
