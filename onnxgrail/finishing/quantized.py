"""Quantize the narrowed model, by the tools of ONNX Runtime or to a few bits per weight, and compare the result."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import onnx_ir as ir

from onnxgrail.allocation.found import Judged
from onnxgrail.calibration import quantize
from onnxgrail.calibration.both import Pair, run_both
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Recipe
from onnxgrail.fidelity import Fidelity, entries
from onnxgrail.finishing.by_tool import quantised_by_tool
from onnxgrail.finishing.more_bits import holding
from onnxgrail.finishing.verify import setup_of, verify
from onnxgrail.graph.io.model_file import weight_bytes
from onnxgrail.graph.io.serial import pack
from onnxgrail.graph.io.writing import written_bytes
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.bits.rounding import Bits, rounded
from onnxgrail.narrowing.bits.sides import Guide
from onnxgrail.narrowing.bits.speed import slow_weights
from onnxgrail.narrowing.decide import Decision
from onnxgrail.options import EIGHT, WEIGHTS, WITHOUT_DATA
from onnxgrail.search.candidates import loss_of

LITTLE = 0.9  # share of the bytes that is left from which quantization was hardly worth it
MUCH = 0.25  # share of the bytes of weights that layers keep, from which the reason is given
MOST, FLOATS = 0.5, (ir.DataType.FLOAT, ir.DataType.DOUBLE)  # share of the bytes of a file that are such weights
MORE = "some weights have more bits than the search has chosen: fitted to all data, the model would lose too much"
RECURRENT = ("LSTM", "GRU", "RNN")
NO_CONV = ("int8-dynamic",)  # kinds that leave convolutions in float


def quantised(
    prepared: Prepared, decision: Decision, slim: ir.Model, job: Job
) -> tuple[ir.Model, dict[str, Any], tuple[Fidelity, ...]]:
    """Return the quantized model, its report entry, and its fidelity to the original."""
    recipe = job.recipe
    loss = functools.cache(lambda model: loss_of(prepared, model, recipe.providers))
    if decision.allocation.bits or recipe.quantize in WEIGHTS:
        final, form = _in_few_bits(prepared, decision, slim, job, loss)
    else:
        final, form = quantised_by_tool(prepared, slim, decision.allocation.found, job)
    results: tuple[Fidelity, ...] = ()
    entry: dict[str, Any] = {
        "kind": _kind(form, recipe),
        "kept_float": [],
        "kept_float_reason": "",
        "left": [],
        "matrices": [],
        **form,
        "bytes_before": written_bytes(slim, job.weights),
        "bytes_after": written_bytes(final, job.weights),
        "outputs": [],
        "held_out": None,
        "judged": None,
        "headline": None,
        "to_narrowed": [],
        "latency_ms": None,
        "loss": None,
    }
    if decision.allocation.found is not None:
        entry["loss"] = dataclasses.asdict(loss(final))
    entry["notes"] = [*form.get("notes", ()), *(_little(final, entry) if recipe.quantize != "none" else [])]
    if recipe.check:
        verification, results = verify(prepared, final, job)
        entry |= {"outputs": list(verification.outputs), "held_out": verification.held_out}
        judged = dict(verification.judged or {})
        fits = recipe.quantize not in WITHOUT_DATA or decision.is_fitted
        judged["seen"] = fits and judged["seen"]
        entry |= {"judged": judged, "headline": verification.headline}
        judges = prepared.fed(slim, prepared.judges)
        tally = run_both(Pair(pack(slim), pack(final)), judges, setup_of(prepared, recipe))
        entry["to_narrowed"] = entries(tally.results())
    return final, entry, results


def _kind(form: Mapping[str, Any], recipe: Recipe) -> str:
    """Return the kind of quantization: that of the recipe, or those of chosen bits."""
    if recipe.quantize != "none":
        return recipe.quantize
    bits = {one["bits"] for one in form["matrices"]}
    return " and ".join(kind for kind, number in WEIGHTS.items() if number in bits) or "half precision"


def _in_few_bits(
    prepared: Prepared, decision: Decision, slim: ir.Model, job: Job, loss: Callable[[ir.Model], Judged]
) -> tuple[ir.Model, dict[str, Any]]:
    """Store the weights of matrices in a few bits; return the model and its part of the report entry."""
    size = decision.allocation.block_size or job.recipe.block_size
    job = dataclasses.replace(job.alone(), recipe=dataclasses.replace(job.recipe, block_size=size))
    slow, unmeasured = slow_weights(prepared, slim, job, "after narrowing")
    found = decision.allocation.found
    spared = {**({} if found is None else found.spared), **slow}
    guide = Guide.of(prepared, decision.ledger, job.recipe)
    chosen = rounded(guide, slim, job, decision.allocation.bits, spared)

    def again(bits: Mapping[str, int]) -> Bits:
        return rounded(guide, slim, Job(recipe=job.recipe), bits, spared)

    def holds(model: ir.Model) -> bool:
        return found is None or loss(model).bound <= found.limit

    made = holding(chosen, slim, again, holds)
    more = "" if made is chosen else MORE
    return made.model, {
        "samples": 0 if prepared.batches.synthetic else prepared.batches.samples,
        "symmetric": job.recipe.symmetric or job.recipe.target == "tensorrt",
        "kept_float": [one.node for one in made.left],
        "kept_float_reason": "; ".join(dict.fromkeys(one.reason for one in made.left)),
        "left": [dataclasses.asdict(one) for one in made.left],
        "matrices": [dataclasses.asdict(one) for one in made.entries],
        "ops": quantize.added(slim, made.model),
        "notes": [*made.notes(), *filter(None, (unmeasured, _slower(spared), more))],
    }


def _slower(spared: Mapping[str, str]) -> str:
    """Return a note on weights that compute in float; empty if there are none."""
    if not spared:
        return ""
    count = "1 weight is" if len(spared) == 1 else f"{len(spared)} weights are"
    return (
        f"{count} slower in few bits on this machine, so layers compute in float; --minimize size has few bits for all"
    )


def _little(model: ir.Model, entry: Mapping[str, Any]) -> list[str]:
    """Return a note if the file is hardly smaller, with the likely reason."""
    share = entry["bytes_after"] / entry["bytes_before"]
    if share < LITTLE:
        return []
    return [f"--quantize {entry['kind']} leaves {share:.0%} of the bytes: {why_little(model, entry)}"]


def _in_float(node: ir.Node) -> bool:
    """Return True if the weights of a recurrent layer are stored in float."""
    return any(value is not None and value.is_initializer() and value.dtype in FLOATS for value in node.inputs[1:3])


def why_little(model: ir.Model, entry: Mapping[str, Any]) -> str:
    """Return the likely reason why quantization hardly makes a model smaller."""
    if entry["kind"] in NO_CONV and any(node.op_type == "Conv" for node in model.graph):
        return "convolutions stay in float, --quantize int8 has them"
    if entry["kind"] in EIGHT and any(node.op_type in RECURRENT and _in_float(node) for node in model.graph):
        other = "--quantize int8" + (" without --qdq or --target" if entry["kind"] == "int8" else "")
        return f"recurrent layers stay in float, {other} has their weights in 8 bits"
    sizes = Counter[str]()
    for one in entry["left"]:
        value = model.graph.initializers.get(one["value"])
        if value is not None and value.const_value is not None:
            sizes[one["reason"]] += value.const_value.nbytes
    why, size = max(sizes.items(), key=itemgetter(1), default=("", 0))
    if why and size >= MUCH * weight_bytes(model):
        return f"layers keep their numbers: {why}"
    stored = [v.const_value for v in model.graph.initializers.values() if v.dtype in FLOATS]
    if sum(tensor.nbytes for tensor in stored if tensor is not None) >= MOST * written_bytes(model):
        return "most of its weights are of a kind or type that keeps its numbers"
    return "few of its bytes are weights of layers"
