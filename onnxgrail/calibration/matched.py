"""Models that take the same inputs: loaded, checked, and made runnable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrail.calibration.branching import look_once
from onnxgrail.calibration.feeds.data import fixed_batch
from onnxgrail.calibration.feeds.signature import Signature, describe, samples_of, signature_of
from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Feed
from onnxgrail.errors import ModelError
from onnxgrail.graph.cost import counting
from onnxgrail.graph.io import model_file
from onnxgrail.graph.io.interop import from_any
from onnxgrail.graph.io.serial import Packed, pack, runs_as_is, to_bytes
from onnxgrail.graph.rewrite.interface import between, fit
from onnxgrail.graph.trace.facts import Facts, bodies, key
from onnxgrail.graph.trace.tracer import trace
from onnxgrail.machine.files.paths import check_input, path_of

# Ops that multiply, but that `cost.macs` does not count: a model with them would seem lighter than it is.
UNCOUNTED = frozenset({
    "QGemm", "Attention", "QAttention", "MultiHeadAttention", "GroupQueryAttention", "Einsum",
})  # fmt: skip


def loaded(models: Sequence[Any]) -> tuple[list[Path | None], list[ir.Model]]:
    """Return the paths of models (None for an object) and the loaded models, which take the same inputs.

    Raises:
        ModelError: a model cannot be read, or its inputs differ from those of the first.
    """
    paths = [path_of(model) for model in models]
    for path in paths:
        if path is not None:
            check_input(path)
    found = [model_file.load(from_any(model)) for model in models]
    for number, (path, model) in enumerate(zip(paths, found, strict=True), 1):
        same_inputs(signature_of(found[0]), signature_of(model), f"model {number}" if path is None else repr(str(path)))
    return paths, found


def common_batch(models: Sequence[ir.Model]) -> int | None:
    """Return the batch size that one of the models prescribes; None if all leave it open."""
    sizes = (fixed_batch(signature_of(model)) for model in models)
    return next((size for size in sizes if size is not None), None)


def runnable(model: ir.Model, path: Path | None) -> Packed | bytes | Path:
    """Return the model's file, or the model in memory if the file cannot be run."""
    if path is None:
        return pack(model)
    return path if runs_as_is(model) else to_bytes(model)


def same_inputs(wanted: Signature, got: Signature, label: str) -> None:
    """Check that two models take the same inputs (fixed dimensions may differ from open ones).

    Raises:
        ModelError: names, dtypes or ranks differ.
    """

    def shape(signature: Signature) -> list[tuple[str, str, int | None]]:
        return sorted((e.name, str(e.dtype), None if e.shape is None else len(e.shape)) for e in signature)

    if shape(wanted) != shape(got):
        raise ModelError(f"{label} takes {describe(got)}, expected {describe(wanted)}")


def facts_of(prepared: Prepared, small: ir.Model, providers: Sequence[str]) -> Facts:
    """Run the small model once, check that its inputs and outputs match the reference, and return its facts.

    Raises:
        ModelError: they do not match.
    """
    same_inputs(signature_of(prepared.model), signature_of(small), "the small model")
    ports = between(prepared.model, small)
    facts, wide = observe(small, fit(prepared.feed, ports), providers=providers), prepared.survey.facts
    ours, theirs = ([v.name or "" for v in m.graph.outputs] for m in (small, prepared.model))
    common = [n for n in theirs if n in ours and wide.has_floats(n)]
    if not common:
        raise ModelError(
            f"the small model has the outputs {', '.join(ours)}, and the reference {', '.join(theirs)}",
            hint="Outputs are matched by name: rename them",
        )
    cut = {(p.name, p.axis): p.after for p in ports}
    for name in common:
        wanted = tuple(cut.get((name, axis), size) for axis, size in enumerate(wide.shapes[name]))
        if facts.shapes[name] != wanted:
            raise ModelError(
                f"output {name!r} of the small model has the shape {list(facts.shapes[name])}, and that of the "
                f"reference {list(wanted)}",
                hint="Only models with the same outputs can be fitted to each other",
            )
    return facts


def counted_macs(model: ir.Model, feed: Feed, providers: Sequence[str]) -> int | None:
    """Return the multiply-accumulates per sample of `feed`; None if they cannot be counted."""
    try:
        flat, facts = look_once(model, feed, providers)
    except ModelError:
        return None
    if any(node.op_type in UNCOUNTED for node in flat.graph):
        return None
    survey = trace(flat, facts)
    if any(bodies(node) and key(node) not in survey.repeated for node in flat.graph):
        return None
    return counting.macs(flat, survey) // samples_of(feed, signature_of(model))
