"""What comes after the decisions: write the file, check it, report."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from onnxgrail.allocation.achieved import Share, of_blocks
from onnxgrail.allocation.result import Budget
from onnxgrail.calibration.batches import Batches
from onnxgrail.calibration.blocking import channel_block
from onnxgrail.calibration.both import run_both
from onnxgrail.calibration.judging import HeldOut
from onnxgrail.calibration.lanes import why_host
from onnxgrail.calibration.relay import DEEP
from onnxgrail.calibration.session import CPU
from onnxgrail.calibration.signature import free_sizes, signature_of
from onnxgrail.comparison import bytes_on_disk
from onnxgrail.core import Applied, Change, Recipe
from onnxgrail.decision import Decision
from onnxgrail.entries import block_entry
from onnxgrail.errors import ModelError
from onnxgrail.fidelity import Fidelity, entries, headline
from onnxgrail.graph import cost
from onnxgrail.graph.interface import between, changed
from onnxgrail.graph.listed import listed_text, unlisted_text
from onnxgrail.graph.mapped import in_files, weight_files
from onnxgrail.graph.places import located
from onnxgrail.graph.serial import pack, skeleton, to_bytes
from onnxgrail.graph.widen import has_bfloat16
from onnxgrail.preparation import Prepared, samples_of
from onnxgrail.progress import Progress
from onnxgrail.report import (
    ModelChange,
    Report,
    Verification,
    calibration_entry,
    environment,
    make_report,
)

if TYPE_CHECKING:
    from onnxgrail.refine.job import Refined

INTERFACE = (
    "inputs and outputs of the key-value cache have fewer heads: feed and read them at their new sizes "
    "(genai_config.json of onnxruntime-genai holds one head count for all layers)"
)
BFLOAT16 = "bfloat16 was measured and checked in float32, since ONNX Runtime has no bfloat16 kernels for the CPU"


def verify(
    prepared: Prepared, slim: ir.Model, recipe: Recipe, progress: Progress
) -> tuple[Verification, tuple[Fidelity, ...]]:
    """Run the ONNX checker and compare original and result, before anything is written.

    They are compared on the samples that were held back from every fit; where there are none, on a few that the fits
    have seen.  Gates judge the same.

    Raises:
        ModelError: ONNX Runtime does not load or run the result.
    """
    narrow = has_bfloat16(prepared.model)
    held = in_files(prepared.model)
    inside = held and not weight_files(prepared.model)  # the runtime would read a file that holds its weights itself
    before = prepared.path if prepared.path is not None and not narrow and not inside else pack(prepared.model)
    apart, ports, batches = prepared.held_out, between(prepared.model, slim), prepared.judges
    common: dict[str, Any] = {"providers": recipe.providers, "once": held, "texts": True, "progress": progress}
    run = functools.partial(run_both, before, pack(slim), batches, ports=ports, **common)
    deep = len(prepared.model.graph) >= DEEP and not ports
    sizes = free_sizes(signature_of(prepared.model), batches) if deep else {}
    try:
        results = run(sizes=sizes).results()
    except ModelError:
        if not sizes:
            raise
        results = run().results()  # a file that contradicts itself may run with open sizes only
    outputs = tuple(entries(results))
    verification = Verification(
        checker=_checks(slim),
        ort_load=True,
        outputs=outputs,
        held_out=None if apart is None else {**_named(apart), "outputs": outputs},
        judged=judged_by(prepared),
        headline=headline(results),
    )
    return verification, results


def judged_by(prepared: Prepared) -> dict[str, Any]:
    """Return what the samples are that judge the result, and how the user asked for them."""
    held = prepared.held_out
    if held is not None:
        return {"on": "held-out", **_named(held)}
    batches = prepared.judges
    on = "random" if batches.synthetic else "calibration"
    return {"on": on, "asked": prepared.asked, "source": batches.source, "samples": sum(map(samples_of, batches))}


def _told(prepared: Prepared, verification: Verification | None, *, fitted: bool) -> Verification:
    """The same, and whether a fit has seen the samples that judge; an unchecked run says only which they would be."""
    told = verification or Verification(judged=judged_by(prepared))
    judged = dict(told.judged or {})
    return dataclasses.replace(told, judged={**judged, "seen": fitted and judged.get("on") == "calibration"})


def _named(held: HeldOut) -> dict[str, Any]:
    return {"asked": held.asked, "source": held.batches.source, "samples": held.batches.samples}


def _checks(slim: ir.Model) -> bool:
    """Whether the ONNX checker accepts the result; files with ops outside the standard fail it before and after."""
    try:
        onnx.checker.check_model(skeleton(slim))
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
    written: Mapping[Path, str],
    verification: Verification | None,
    timing: Mapping[str, float],
    refines: Sequence[Refined] = (),
    applied: Mapping[str, Applied] | None = None,
    final: ir.Model | None = None,
) -> Report:
    """Everything that was done and left alone, as schema 1.

    `final` is what was written, where that is not `slim`, and `written` has the checksums of its files.
    """
    decided = {c.block.name: c for c in decision.changes}
    applied = applied or {}
    grown = tuple(Applied(entry={}, macs=-macs * prepared.samples, bytes=-size) for macs, size in _grown(refines))
    share = _share(prepared, recipe, decision, applied)
    sizes = _model(prepared, share, decision, slim, written, (*applied.values(), *grown), final or slim)
    survey = prepared.survey
    refusals = survey.refusals if "grail" in recipe.method else ()  # why blocks stay, where any were to be narrowed
    ports = changed(prepared.model, survey, decision.ledger.dead)
    calibration = _calibration(prepared.batches, decision, used=bool(applied))
    said = (
        prepared.scarce() if calibration else "",
        INTERFACE if ports else "",
        unlisted_text(prepared.unlisted),
        listed_text(slim) if slim is not None else "",
        decision.allocation.note,
        _missed(sizes.budget),
        BFLOAT16 if has_bfloat16(prepared.model) else "",
        _clamped(decision.changes),
        _unblocked(prepared, recipe, decision),
        _unfitted(decision),
        why_host(recipe.providers),
        *(note for one in applied.values() for note in one.notes),
        *(() if prepared.held_out is None else prepared.held_out.batches.notes),
    )
    return make_report(
        recipe=recipe,
        environment=environment(providers=recipe.providers, threads=None),
        model=sizes,
        blocks=[block_entry(b, decided.get(b.name), survey.facts.shapes, survey.facts.stored) for b in survey.blocks],
        refusals=located(
            prepared.model, [*refusals, *decision.refusals, *(r for one in applied.values() for r in one.refusals)]
        ),
        verification=_told(prepared, verification, fitted=calibration is not None),
        calibration=calibration,
        timing=timing,
        interface=ports,
        notes=[note for note in said if note],
        allocation=decision.allocation.entry(),
        refits=[dataclasses.asdict(refit) for refit in decision.refits],
        norms=[dataclasses.asdict(norm) for norm in decision.norms],
        refines=[dataclasses.asdict(entry) for entry in refines],
        methods={name: one.entry for name, one in applied.items()},
    )


def _grown(refines: Sequence[Refined]) -> list[tuple[int, int]]:
    """What refinements added to the model: multiply-accumulates per sample, and bytes of weights."""
    return [(entry.added["macs"], entry.added["bytes"]) for entry in refines if entry.added]


def _unfitted(decision: Decision) -> str:
    """What the fit to the original network left out."""
    left = [refit for refit in decision.refits if refit.reason]
    if not left:
        return ""
    return f"{len(left)} layers were not fitted to the original network, {left[0].weight} for one: {left[0].reason}"


def _unblocked(prepared: Prepared, recipe: Recipe, decision: Decision) -> str:
    """Return a note where convolutions leave a part of the last block of channels empty."""
    convolved = [c for c in decision.changes if prepared.survey.convolved(c.block)]
    if not convolved or recipe.providers[0] not in CPU:
        return ""
    block = channel_block()
    odd = sum(len(c.reducer.kept) * c.block.unit_size % block > 0 for c in convolved)
    return (
        f"{odd} of {len(convolved)} narrowed blocks of convolutions are not multiples of {block} channels wide: ONNX "
        f"Runtime computes them in blocks of {block} on this machine, so the next multiple may be as fast or faster"
        if odd
        else ""
    )


def _clamped(changes: Sequence[Change]) -> str:
    """How many numbers did not fit into the format that their weight has."""
    count = sum(change.outcome.clamped for change in changes)
    blocks = sum(change.outcome.clamped > 0 for change in changes)
    return f"{count} new weights in {blocks} blocks were clamped to the range of their number format" if count else ""


def _missed(budget: Mapping[str, Any] | None) -> str:
    """What to say where the written file needs more than was counted, as weights beside the file may."""
    if budget is None or budget["metric"] == "latency" or budget["achieved"] <= budget["limit"]:
        return ""
    return f"target missed: {budget['metric']} {budget['achieved']:,.0f} where {budget['limit']:,.0f} was the limit"


def _calibration(batches: Batches, decision: Decision, *, used: bool) -> dict[str, Any] | None:
    if not used and not decision.norms and not any(c.error.plain is not None for c in decision.changes):
        return None  # nothing was measured: the data were not used
    return calibration_entry(batches)


def _share(prepared: Prepared, recipe: Recipe, decision: Decision, applied: Mapping[str, Applied]) -> Share:
    """What was asked for and what became of it; where nothing is narrowed, GRASP's layers lose the share."""
    if "grail" in recipe.method or "grasp" not in applied:
        return of_blocks(prepared, recipe, decision.narrowable, decision.ledger.dead)
    entry = applied["grasp"].entry
    gone = sum(row["params_before"] - row["params_after"] for row in entry["matrices"])
    asked = recipe.ratio if recipe.grasp_layers is None else None
    return Share(of="layers", asked=asked, achieved=gone / max(entry["params"], 1), total=entry["params"])


def _model(
    prepared: Prepared,
    share: Share,
    decision: Decision,
    slim: ir.Model | None,
    written: Mapping[Path, str],
    applied: Sequence[Applied],
    final: ir.Model | None,
) -> ModelChange:
    model, survey, ledger = prepared.model, prepared.survey, decision.ledger
    params = cost.parameters(model)
    gone, gone_bytes = cost.removed(survey, ledger.dead)
    after = params - gone if slim is None else cost.parameters(slim)
    output = next(iter(written), None)
    path = prepared.path
    if path is not None:
        before, given = bytes_on_disk(model, path), prepared.checksums.of(path)
    else:
        content = to_bytes(prepared.given, run=False)
        before, given = len(content), hashlib.sha256(content).hexdigest()
    if written:
        size = sum(file.stat().st_size for file in written)
    elif final is not None and final is not slim:
        size = len(to_bytes(final, run=False))
    else:
        size = before - gone_bytes - sum(a.bytes for a in applied)
    macs = (cost.macs(model, survey, ledger.dead) - sum(a.macs for a in applied)) // prepared.samples
    return ModelChange(
        input=str(path or "model"),
        output=None if output is None else str(output),
        sha256_before=given,
        sha256_after=None if output is None else written[output],
        params_before=params,
        params_after=after,
        macs_before=cost.macs(model, survey) // prepared.samples,
        macs_after=macs,
        bytes_before=before,
        bytes_after=size,
        asked_ratio=share.asked,
        achieved_ratio=share.achieved,
        ratio_of=share.of,
        ratio_total=share.total,
        model_ratio=1 - after / params if params else 0.0,
        sha256_data_before={name: prepared.checksums.of(file) for name, file in weight_files(model).items()},
        sha256_data_after={file.name: digest for file, digest in written.items() if file != output},
        budget=_budget(decision.allocation.budget, {"params": after, "macs": macs, "size": size}),
    )


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
