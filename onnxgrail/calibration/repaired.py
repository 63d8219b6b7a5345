"""Channels that are narrowed only if fits repair what reads them: streams in other bases, and before means or norms."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.algebra.fit.compensate import BEST
from onnxgrail.core import Recipe, Refusal
from onnxgrail.graph.fittable.mixed import Lacks, traced
from onnxgrail.graph.fittable.scales import widened
from onnxgrail.graph.trace.facts import Facts
from onnxgrail.graph.trace.survey import Survey
from onnxgrail.graph.trace.tracer import trace

OPTIONS = (f"--compensate {BEST}", "--reducer prune", "--method grail")  # those with which layers are fitted
DATA = "--data"
REPAIR = f"--compensate grail or {BEST}"
NEEDS = "it is narrowed with {} only"


def repairs(recipe: Recipe) -> bool:
    """Return True if a recipe narrows, and fits repair all that reads the channels that stay."""
    return not unlike(recipe) and not recipe.keeps_everything and not recipe.only_bits


def lacking(recipe: Recipe, *, synthetic: bool) -> str:
    """Return the option without which no fits repair a layer, where data are random or not; '' if none is missing."""
    return DATA if synthetic else unlike(recipe)


def unlike(recipe: Recipe) -> str:
    """Return the first option without which no fits repair a layer, and which a recipe lacks; '' if it has all."""
    has = (recipe.compensate == BEST, recipe.reducer == "prune", recipe.method == ("grail",))
    return next((option for option, there in zip(OPTIONS, has, strict=True) if not there), "")


def needs_option(refusal: Refusal) -> bool:
    """Return True if channels stay because of an option or for want of data."""
    return refusal.reason in {NEEDS.format(option) for option in (DATA, REPAIR, "--blocks stream", *OPTIONS)}


def surveyed(model: ir.Model, facts: Facts, recipe: Recipe, *, synthetic: bool) -> tuple[ir.Model, Survey]:
    """Trace a model; return it, with its means and normalizations as `traced` changes them, and the trace.

    Args:
        model: the graph; it is not changed.
        facts: concrete shapes and known values of its tensors.
        recipe: what is asked for.
        synthetic: the data are random: nothing is repaired by them.
    """
    if recipe.keeps_everything or recipe.only_bits or "grail" not in recipe.method:
        survey = trace(model, facts, interface=recipe.kv_io)
    else:
        means = DATA if synthetic else REPAIR if recipe.compensate == "none" else ""
        norms = lacking(recipe, synthetic=synthetic)
        lacks = Lacks(*(needs and NEEDS.format(needs) for needs in (means, norms)))
        model, survey = traced(model, facts, lacks, interface=recipe.kv_io)
    return model, survey if recipe.norms == "none" else widened(model, survey)
