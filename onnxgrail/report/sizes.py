"""The results of a run, and sizes of the model before and after, for the report."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onnxgrail.allocation.achieved import Share
from onnxgrail.allocation.result import Budget
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Applied, Recipe
from onnxgrail.graph.cost import counting
from onnxgrail.graph.io.mapped import weight_files
from onnxgrail.graph.io.model_file import bytes_on_disk
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.io.writing import written_bytes
from onnxgrail.machine.files.placing import sha256
from onnxgrail.methods import Worked
from onnxgrail.narrowing.decide import Decision
from onnxgrail.report.comparison import Weight
from onnxgrail.report.report import ModelChange, Verification

if TYPE_CHECKING:
    from onnxgrail.methods.refine.refinement import Refined


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Made:
    """The results of the stages after the decision.

    Attributes:
        slim: the narrowed graph; None if nothing was narrowed.
        final: the graph as it is written, if it differs from `slim`.
        weights: name of the file that takes the weights; empty if they stay in the model file.
        written: checksums of the written files, the model first.
        verification: the checks of the result.
        worked: results of refinements and further methods.
    """

    slim: ir.Model | None = None
    final: ir.Model | None = None
    weights: str = ""
    written: Mapping[Path, str] = field(default_factory=dict)
    verification: Verification | None = None
    worked: Worked = field(default_factory=Worked)


def _grown(refines: Sequence[Refined]) -> list[tuple[int, int]]:
    """Return multiply-accumulates per sample and bytes of weights that refinements added to the model."""
    return [(entry.added["macs"], entry.added["bytes"]) for entry in refines if entry.added]


def _share(recipe: Recipe, decision: Decision, applied: Mapping[str, Applied]) -> Share:
    """Return the requested and the achieved ratio: of the blocks, or of GRASP's layers if nothing is narrowed."""
    if "grail" in recipe.method or "grasp" not in applied:
        return decision.share
    entry = applied["grasp"].entry
    gone = sum(row["params_before"] - row["params_after"] for row in entry["matrices"])
    asked = recipe.ratio if recipe.grasp_layers is None else None
    return Share(of="layers", asked=asked, achieved=gone / max(entry["params"], 1), total=entry["params"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """The files of a model: bytes in all, the checksum of the model, and those of files with weights, by name."""

    bytes: int
    sha256: str
    data: Mapping[str, str]


def files_of(model: ir.Model, path: Path | None) -> Files:
    """Return the files of a model that was read from `path`; of one that was given as an object, what it would be."""
    data = {name: sha256(file) for name, file in weight_files(model).items()}
    if path is not None:
        return Files(bytes=bytes_on_disk(model, path), sha256=sha256(path), data=data)
    content = to_bytes(model, run=False)
    return Files(bytes=len(content), sha256=hashlib.sha256(content).hexdigest(), data=data)


def sizes_of(prepared: Prepared, recipe: Recipe, decision: Decision, made: Made) -> ModelChange:
    """Return the sizes of the model before and after; predicted if nothing is written."""
    slim, written, final = made.slim, made.written, made.final or made.slim
    added = tuple(Applied(entry={}, macs=-m * prepared.samples, bytes=-size) for m, size in _grown(made.worked.refined))
    applied, share = (*made.worked.applied.values(), *added), _share(recipe, decision, made.worked.applied)
    model, survey, ledger = prepared.model, prepared.survey, decision.ledger
    params = counting.parameters(prepared.original)
    gone, gone_bytes = counting.removed(survey, ledger.dead)
    after = counting.parameters(model) - gone if slim is None else counting.parameters(slim)
    path = prepared.path
    given = files_of(prepared.given, None) if path is None else files_of(prepared.original, path)
    if written:
        size = sum(file.stat().st_size for file in written)
    elif final is not None:
        size = written_bytes(final, made.weights)
    else:
        size = given.bytes - gone_bytes - sum(a.bytes for a in applied)
    macs = (counting.macs(model, survey, ledger.dead) - sum(a.macs for a in applied)) // prepared.samples
    was = Weight(str(path or "model"), params, prepared.macs // prepared.samples, given.bytes)
    budget = _budget(decision.allocation.budget, {"params": after, "macs": macs, "size": size})
    return change_of(was, Weight("", after, macs, size), given, written, share=share, budget=budget)


def change_of(
    before: Weight, after: Weight, given: Files, written: Mapping[Path, str], *, share: Share, budget: Any = None
) -> ModelChange:
    """Return what a report says about the model before and after.

    Args:
        before: the size of the model that was read, from `given`.
        after: the size of the result.
        given: the files that were read.
        written: checksums of the files that were written, the model first.
        share: the requested and the achieved ratio.
        budget: the requested target and the achieved value.
    """
    output = next(iter(written), None)
    return ModelChange(
        input=before.path,
        output=None if output is None else str(output),
        sha256_before=given.sha256,
        sha256_after=None if output is None else written[output],
        params_before=before.params,
        params_after=after.params,
        macs_before=before.macs,
        macs_after=after.macs,
        bytes_before=before.bytes,
        bytes_after=after.bytes,
        asked_ratio=share.asked,
        achieved_ratio=share.achieved,
        ratio_of=share.of,
        ratio_total=share.total,
        model_ratio=1 - after.params / before.params if before.params else 0.0,
        sha256_data_before=given.data,
        sha256_data_after={file.name: digest for file, digest in written.items() if file != output},
        budget=budget,
    )


def _budget(budget: Budget | None, achieved: Mapping[str, float]) -> dict[str, Any] | None:
    """Return the requested target and the achieved value; a latency is that of the last measurement."""
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
