"""`inspect`: list all blocks and refusals and predict sizes after narrowing, in seconds and without data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnxgrail.allocation.choose import by_ratio
from onnxgrail.allocation.measures import gone
from onnxgrail.calibration.prepare import prepare
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.runtime.custom import Libraries
from onnxgrail.calibration.runtime.custom import custom_ops as registered
from onnxgrail.core import INNER, KINDS, Kind, Recipe
from onnxgrail.graph.cost import counting, spare
from onnxgrail.graph.cuts.places import located, nodes_of
from onnxgrail.graph.flatten.direct import shapes_text, unlisted_text, unread_text
from onnxgrail.graph.io.mapped import check_unchanged
from onnxgrail.graph.io.model_file import bytes_on_disk
from onnxgrail.graph.io.opaque import maps_text
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.job.places import places_of, reads
from onnxgrail.machine.files.paths import path_of
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.rotation import as_with_data, kept_whole, unmeasured
from onnxgrail.recipe import selection
from onnxgrail.recipe.keywords import checked
from onnxgrail.report.report import Inspection

RATIOS = (0.25, 0.5)
OUTER = [kind for kind in KINDS if kind not in (*INNER, "rank")]


@checked
def inspect(
    model: Any,
    *,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    data: Any = None,
    tokenizer: str | Path | None = None,
    kv_io: bool = False,
    custom_ops: Libraries = (),
    report: str | Path | Iterable[str | Path] = (),
    force: bool = False,
) -> Inspection:
    """List the parts of a model that can be narrowed, and those that cannot, with reasons.

    Args:
        model: path, bytes, ModelProto, onnx_ir.Model or gs.Graph.
        input_shapes: sizes for open input dimensions.
        data: calibration data, as for `compress`; two samples are read, for models that cannot run on random inputs.
        tokenizer: for data that are text.
        kv_io: as for `compress`: key-value caches may be narrowed though they are inputs and outputs.
        custom_ops: as for `compress`.
        report: files for the result: pages if the suffix is .html, JSON if it is .json.
        force: replace existing files. Input files are never replaced.

    Returns:
        Inspection: blocks, refusals and predicted sizes.

    Raises:
        ModelError: the model cannot be read or run.
        OutputError: a report exists and `force` is not given, is an input file, or cannot be written.
    """
    places = places_of(None, report=report, force=force)
    places = places.reading(reads({"the input": model}, data, files={"the tokenizer": tokenizer}))
    places.check_apart()
    places.check_ready()
    recipe = Recipe(
        samples=2,
        batch_size=2,
        blocks=KINDS,
        input_shapes=input_shapes or {},
        tokenizer=None if tokenizer is None else str(tokenizer),
        kv_io=kv_io,
    )
    with registered(custom_ops):
        prepared = prepare(model, data, Job(recipe=recipe))
        check_unchanged(prepared.model)
        prepared = as_with_data(prepared, recipe)
        every = unmeasured(prepared, recipe)
        others = any(block.kind not in OUTER for block in every.survey.blocks)
        usual = unmeasured(prepared, replace(recipe, blocks=tuple(OUTER))) if others else every
        inner = unmeasured(prepared, replace(recipe, blocks=INNER))  # also where whole heads can go instead
    forms = {"stream": usual, "embedding": usual, "rank": every, "qk": inner, "vo": inner}
    found = _inspected(usual, path_of(model) or Path("model"), recipe, forms)
    places.save_report(found)
    return found


def _inspected(prepared: Prepared, path: Path, recipe: Recipe, forms: Mapping[str, Prepared]) -> Inspection:
    """Inspect a model.

    Args:
        prepared: the model with everything turned that needs no other form.
        path: of its file.
        recipe: the choices.
        forms: the model with blocks of other kinds.
    """
    given, every = prepared.baseline, forms["rank"]
    params, macs = counting.parameters(prepared.original), prepared.macs
    size = bytes_on_disk(given.model, path) if path.exists() else len(to_bytes(prepared.given, run=False))
    shares: dict[str, dict[str, float]] = {}
    for kind in (*KINDS, "all"):
        one = every if kind == "all" else forms.get(kind, given)
        some = {b.name: 0 for b in one.survey.blocks if kind in (b.kind, "all")}
        if some:
            lost = gone(one, some)
            shares[kind] = {"params": lost[0] / max(params, 1), "macs": lost[1] / max(macs, 1)}
    usual = selection.selected(every.survey.blocks, Recipe())  # the default choice of `compress`
    predicted, unlisted = [], prepared.unlisted
    least = size - unlisted.left_out.bytes
    for ratio in RATIOS:
        lost = gone(every, by_ratio(every, usual, ratio, recipe.round_to))
        left = {"params": params - lost[0], "macs": (macs - lost[1]) // prepared.samples}
        # Unknown if the weights are not stored at full size.
        predicted.append({"ratio": ratio, **left, "bytes": least - lost[2] if lost[2] < least else None})
    texts = (unlisted_text(unlisted), shapes_text(unlisted), unread_text(prepared.model), maps_text(prepared.model))
    return Inspection(
        path=str(path),
        params=params,
        macs=macs // prepared.samples,
        bytes=size,
        blocks=(*_entries(prepared, OUTER), *_entries(every, ["rank"]), *_entries(forms["qk"], INNER)),
        refusals=located(prepared.model, tuple(dict.fromkeys([*prepared.survey.refusals, *kept_whole(forms["qk"])]))),
        shares=shares,
        predicted=tuple(predicted),
        notes=tuple(filter(None, texts)),
    )


def _entries(prepared: Prepared, kinds: Collection[Kind]) -> list[dict[str, Any]]:
    """Return the entries of all blocks of some kinds."""
    survey = prepared.shown
    blocks, held = survey.blocks, spare.block_shares(survey, prepared.model)
    found = zip(blocks, held, nodes_of(prepared.model, blocks), strict=True)
    return [
        {
            "name": block.name,
            "kind": block.kind,
            "units": block.units,
            "unit_size": block.unit_size,
            "span": list(block.span),
            "producers": sorted({s.initializer for s in block.producers}),
            "consumers": sorted({s.initializer for s in block.consumers}),
            "nodes": nodes,
            "params": params,
            "macs": macs // prepared.samples,
        }
        for block, (params, macs), nodes in found
        if block.kind in kinds
    ]
