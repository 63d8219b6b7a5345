"""What comes after the decisions: write the file, check it, report."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrail.allocation.result import Budget
from onnxgrail.calibration.data import Batches
from onnxgrail.comparison import bytes_on_disk, run_both
from onnxgrail.core import Progress, Recipe
from onnxgrail.decision import Decision
from onnxgrail.fidelity import Fidelity, entries, finish
from onnxgrail.graph import cost
from onnxgrail.graph.interface import between, changed
from onnxgrail.graph.model_io import LIMIT, inline, weight_bytes
from onnxgrail.graph.serial import to_bytes
from onnxgrail.paths import sha256
from onnxgrail.preparation import Prepared
from onnxgrail.refine.job import Refined
from onnxgrail.report import (
    ModelChange,
    Report,
    Verification,
    block_entry,
    calibration_entry,
    environment,
    make_report,
)

CHECKED_FEEDS = 4
INTERFACE = (
    "inputs and outputs of the key-value cache have fewer heads: feed and read them at their new sizes "
    "(genai_config.json of onnxruntime-genai holds one head count for all layers)"
)


def verify(
    prepared: Prepared, slim: ir.Model, recipe: Recipe, progress: Progress
) -> tuple[Verification, tuple[Fidelity, ...]]:
    """Run the ONNX checker and compare original and result on a few feeds, before anything is written.

    Raises:
        ModelError: ONNX Runtime does not load or run the result.
    """
    few = dataclasses.replace(prepared.batches, feeds=prepared.batches.feeds[:CHECKED_FEEDS])
    before = prepared.source if prepared.folder is not None else to_bytes(prepared.model)
    sums = run_both(
        before,
        to_bytes(slim),
        few,
        ports=between(prepared.model, slim),
        providers=recipe.providers,
        folder=prepared.folder,
        progress=progress,
    )
    results = finish(sums)
    return Verification(checker=_checks(slim), ort_load=True, outputs=tuple(entries(results))), results


def _checks(slim: ir.Model) -> bool | None:
    """Whether the ONNX checker accepts the result; None where it is too large to be handed over in memory.

    Files with ops outside the standard fail it before and after.
    """
    if weight_bytes(slim) > LIMIT:
        return None
    inline(slim)
    try:
        onnx.checker.check_model(ir.to_proto(slim))
    except (onnx.checker.ValidationError, ValueError):
        return False
    return True


def passes(results: Sequence[Fidelity], recipe: Recipe) -> bool:
    """Whether the worst output keeps `min_cosine`."""
    cosines = [r.cosine for r in results if r.cosine is not None]
    return recipe.min_cosine is None or (bool(cosines) and min(cosines) >= recipe.min_cosine)


def report_of(
    prepared: Prepared,
    recipe: Recipe,
    decision: Decision,
    *,
    slim: ir.Model | None,
    output: Path | None,
    verification: Verification | None,
    timing: Mapping[str, float],
    refines: Sequence[Refined] = (),
) -> Report:
    """Everything that was done and left alone, as schema 1."""
    decided = {c.block.name: c for c in decision.changes}
    sizes = _model(prepared, recipe, decision, slim, output)
    survey = prepared.survey
    ports = changed(prepared.model, survey, decision.ledger.dead)
    return make_report(
        recipe=recipe,
        environment=environment(providers=recipe.providers, threads=None),
        model=sizes,
        blocks=[block_entry(b, decided.get(b.name), survey.facts.shapes, survey.facts.stored) for b in survey.blocks],
        refusals=[*survey.refusals, *decision.refusals],
        verification=verification,
        calibration=_calibration(prepared.batches, decision),
        timing=timing,
        interface=ports,
        notes=[note for note in (INTERFACE if ports else "", decision.allocation.note, _missed(sizes.budget)) if note],
        allocation=decision.allocation.entry(),
        refits=[dataclasses.asdict(refit) for refit in decision.refits],
        norms=[dataclasses.asdict(norm) for norm in decision.norms],
        refines=[dataclasses.asdict(entry) for entry in refines],
    )


def _missed(budget: Mapping[str, Any] | None) -> str:
    """What to say where the written file needs more than was counted, as weights beside the file may."""
    if budget is None or budget["metric"] == "latency" or budget["achieved"] <= budget["limit"]:
        return ""
    return f"target missed: {budget['metric']} {budget['achieved']:,.0f} where {budget['limit']:,.0f} was the limit"


def _calibration(batches: Batches, decision: Decision) -> dict[str, Any] | None:
    if not decision.norms and not any(c.error.plain is not None for c in decision.changes):
        return None  # nothing was measured: the data were not used
    return calibration_entry(
        source=batches.source, samples=batches.samples, synthetic=batches.synthetic, notes=batches.notes
    )


def _model(
    prepared: Prepared, recipe: Recipe, decision: Decision, slim: ir.Model | None, output: Path | None
) -> ModelChange:
    model, survey, ledger = prepared.model, prepared.survey, decision.ledger
    params = cost.parameters(model)
    gone, gone_bytes = cost.removed(survey, ledger.dead)
    after = params - gone if slim is None else cost.parameters(slim)
    path = Path(prepared.source) if prepared.folder is not None else None
    before = bytes_on_disk(model, path) if path is not None else len(to_bytes(model))
    size = before - gone_bytes if output is None or slim is None else _written(slim, output)
    macs = cost.macs(model, survey, ledger.dead) // prepared.samples
    return ModelChange(
        input=str(path or "model"),
        output=None if output is None else str(output),
        sha256_before=sha256(path) if path is not None else hashlib.sha256(to_bytes(model)).hexdigest(),
        sha256_after=None if output is None else sha256(output),
        params_before=params,
        params_after=after,
        macs_before=cost.macs(model, survey) // prepared.samples,
        macs_after=macs,
        bytes_before=before,
        bytes_after=size,
        asked_ratio=recipe.ratio,
        achieved_ratio=1 - after / params if params else 0.0,
        budget=_budget(decision.allocation.budget, {"params": after, "macs": macs, "size": size}),
    )


def _written(slim: ir.Model, output: Path) -> int:
    """Bytes of the written file, and of its weights where they lie beside it."""
    size = output.stat().st_size
    beside = output.with_name(f"{output.name}.data")
    return size + beside.stat().st_size if size < weight_bytes(slim) and beside.exists() else size


def _budget(budget: Budget | None, achieved: Mapping[str, float]) -> dict[str, Any] | None:
    """A target asked for and what became of it; a latency is that of the last measurement."""
    if budget is None:
        return None
    metric = budget.target.metric
    return {
        "metric": metric,
        "asked": budget.target.text,
        "before": budget.before,
        "limit": budget.limit,
        "achieved": achieved.get(metric, budget.found),
    }
