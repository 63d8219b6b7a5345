"""Finish the narrowed model for deployment: simplify, verify, quantize, check against a runtime's limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxgrail.allocation.measures import latencies
from onnxgrail.calibration.both import Pair, run_both
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.runtime import quantize
from onnxgrail.calibration.runtime.session import LIBRARIES, Setup
from onnxgrail.calibration.runtime.timing import Times
from onnxgrail.core import Recipe
from onnxgrail.errors import UsageError
from onnxgrail.fidelity import Fidelity, entries
from onnxgrail.finishing import simplify, targets
from onnxgrail.finishing.bits.rounding import rounded
from onnxgrail.finishing.shipped import Shipped
from onnxgrail.finishing.verify import verified, verify
from onnxgrail.graph.io.model_file import bytes_on_disk, weight_bytes
from onnxgrail.graph.io.serial import pack
from onnxgrail.graph.io.writing import written_bytes
from onnxgrail.graph.rewrite.interface import between, fit
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.job import Job
from onnxgrail.recipe import storage

LARGEST_GRAPH = 2**24  # upper limit of the bytes of a model's names, nodes and metadata
NAMES, TINY = 2**12, 2**16  # bytes: tolerated growth by a few names, and the file size below which it is tolerated
STEPS = ("original", "narrowed", "quantised")
LITTLE = 0.9  # share of the bytes that is left from which quantization was hardly worth it


def require(recipe: Recipe) -> None:
    """Check that the packages which the recipe needs are installed.

    Raises:
        MissingExtraError: a package is not.
    """
    if recipe.simplify:
        simplify.require()


def check(model: ir.Model, recipe: Recipe) -> None:
    """Check that the original model can be quantized as requested, before hours of work.

    Raises:
        QuantisedError: quantization was requested, and the model is quantized already.
        UsageError: ONNX Runtime's quantizer would open it without the custom operators it needs.
    """
    if recipe.quantize == "int8" and LIBRARIES.get():
        hint = "Choose --quantize int8-dynamic or fp16"
        raise UsageError("--quantize int8 opens the model without the libraries of --custom-ops", hint=hint)
    if recipe.quantize != "none":
        quantize.refuse(model, recipe.quantize)


def ship(prepared: Prepared, ledger: Ledger, slim: ir.Model, job: Job, *, latency: bool = False) -> Shipped:
    """Turn the narrowed model into the model that is written.

    Simplification comes after the narrowing, because names of nodes and weights in options and report are those of the
    given file, and before the comparison, which judges both.  Quantization comes last, because least squares needs
    float weights.

    Args:
        prepared: the original model and its data.
        ledger: the decisions that narrowed it.
        slim: the narrowed model.
        job: the run.
        latency: measure the latency of the original and the result.

    Raises:
        ModelError: a tool fails, or ONNX Runtime does not run the result.
    """
    recipe, clock, simplified = job.recipe, job.clock, None
    if recipe.simplify:
        with clock.stage("simplify"):
            slim, simplified = simplify.simplify(slim)
    storage.mark(slim, recipe)
    verification, results = verified(prepared, slim, job)
    final, quantization = slim, None
    if recipe.quantize != "none":
        with clock.stage("quantize"):
            final, quantization, last = _quantised(prepared, ledger, slim, job)
            results = last if recipe.check else results
    times: tuple[Times, ...] | None = None
    if latency or (quantization is not None and recipe.check):
        with clock.stage("latency"):
            times = latencies([prepared.given, slim, *([final] if quantization else [])], prepared, recipe)
    named = None if times is None else dict(zip(STEPS, times, strict=False))
    if quantization is not None and named:
        quantization["latency_ms"] = {name: one.median for name, one in named.items()}
    keys = {
        "latency": None if named is None else [{"name": n, **dataclasses.asdict(one)} for n, one in named.items()],
        "simplify": None if simplified is None else dataclasses.asdict(simplified),
        "quantization": quantization,
        "target": None if recipe.target is None else targets.check(final, recipe.target, strict=recipe.strict),
    }
    return Shipped(model=final, narrowed=slim, verification=verification, results=results, keys=keys)


def outgrown(prepared: Prepared, model: ir.Model, recipe: Recipe) -> tuple[str, str] | None:
    """Return the reason why a result may not be written, and a hint: it takes more bytes than the input.

    The metadata on the run are shortened if they would make the file larger.  In a very small file, a few more names
    are tolerated.
    """
    path = prepared.path
    before = written_bytes(prepared.given) if path is None else bytes_on_disk(prepared.model, path)
    if weight_bytes(model) + LARGEST_GRAPH < before:
        return None
    after = written_bytes(model)
    if after > before:
        storage.shorten(model)
        after = written_bytes(model)
    nothing_asked = recipe.keeps_everything and recipe.quantize == "none"
    if nothing_asked or "ic" in recipe.refine or after <= before + (NAMES if before < TINY else 0):
        return None
    text = f"the result would take {after:,} bytes, more than the {before:,} of the input; nothing is written"
    if recipe.simplify:
        return text, "Leave out --simplify, which writes repeated constants out"
    if recipe.quantize != "none":
        return text, "Leave out --quantize: few bytes of this model are weights of layers"
    return text, "Remove more, or choose other blocks; --compensate none writes no new weights"


def _quantised(
    prepared: Prepared, ledger: Ledger, slim: ir.Model, job: Job
) -> tuple[ir.Model, dict[str, Any], tuple[Fidelity, ...]]:
    """Return the quantized model, its report entry, and its fidelity to the original."""
    recipe = job.recipe
    make = _in_few_bits if recipe.quantize in quantize.WEIGHTS else _by_tool
    final, form = make(prepared, ledger, slim, job)
    results: tuple[Fidelity, ...] = ()
    entry: dict[str, Any] = {
        "kind": recipe.quantize,
        "kept_float": [],
        "kept_float_reason": "",
        "left": [],
        "matrices": [],
        **form,
        "outputs": [],
        "held_out": None,
        "judged": None,
        "headline": None,
        "to_narrowed": [],
        "latency_ms": None,
    }
    entry["notes"] = [*form.get("notes", ()), *_little(final, entry)]
    if recipe.check:
        verification, results = verify(prepared, final, job)
        entry |= {"outputs": list(verification.outputs), "held_out": verification.held_out}
        entry |= {"judged": verification.judged, "headline": verification.headline}
        batches = dataclasses.replace(prepared.judges, feeds=tuple(_cut(prepared, slim)))
        tally = run_both(Pair(pack(slim), pack(final)), batches, Setup(providers=recipe.providers))
        entry["to_narrowed"] = entries(tally.results())
    return final, entry, results


def _by_tool(prepared: Prepared, ledger: Ledger, slim: ir.Model, job: Job) -> tuple[ir.Model, dict[str, Any]]:
    """Quantize with the tools of ONNX Runtime; return the model and its part of the report entry."""
    del ledger
    recipe, ports = job.recipe, between(prepared.model, slim)
    feeds = [fit(feed, ports) for feed in prepared.batches] if recipe.quantize == "int8" else []
    symmetric = recipe.target == "tensorrt"
    probe = fit(prepared.feed, ports)
    made = quantize.quantise(slim, feeds, recipe.quantize, symmetric=symmetric, probe=probe, providers=recipe.providers)
    return made.model, {
        "samples": prepared.batches.samples if feeds else 0,
        "symmetric": symmetric,
        "kept_float": list(made.kept),
        "kept_float_reason": made.why if made.kept else "",
        "ops": dict(made.ops),
        "bytes_before": made.bytes_before,
        "bytes_after": made.bytes_after,
    }


def _in_few_bits(prepared: Prepared, ledger: Ledger, slim: ir.Model, job: Job) -> tuple[ir.Model, dict[str, Any]]:
    """Store the weights of matrices in a few bits; return the model and its part of the report entry."""
    made = rounded(prepared, slim, ledger, job.alone())
    return made.model, {
        "samples": 0 if prepared.batches.synthetic else prepared.batches.samples,
        "symmetric": job.recipe.symmetric,
        "kept_float": [one.node for one in made.left],
        "kept_float_reason": "; ".join(dict.fromkeys(one.reason for one in made.left)),
        "left": [dataclasses.asdict(one) for one in made.left],
        "matrices": [dataclasses.asdict(one) for one in made.entries],
        "ops": quantize.added(slim, made.model),
        "bytes_before": written_bytes(slim),
        "bytes_after": written_bytes(made.model),
        "notes": made.notes(),
    }


def _little(model: ir.Model, entry: Mapping[str, Any]) -> list[str]:
    """Return a note if the file is hardly smaller, with the likely reason."""
    share, kind = entry["bytes_after"] / entry["bytes_before"], entry["kind"]
    if share < LITTLE:
        return []
    conv = kind in ("int8-dynamic", *quantize.WEIGHTS) and any(node.op_type == "Conv" for node in model.graph)
    why = "convolutions stay in float, --quantize int8 has them" if conv else "few of its bytes are weights of layers"
    return [f"--quantize {kind} leaves {share:.0%} of the bytes: {why}"]


def _cut(prepared: Prepared, slim: ir.Model) -> list[Any]:
    """Return the feeds that judge, as the narrowed model takes them."""
    ports = between(prepared.model, slim)
    return [lambda make=make: fit(make(), ports) for make in prepared.judges.feeds]
