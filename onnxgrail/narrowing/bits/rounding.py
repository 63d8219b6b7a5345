"""Round the weights of a model to a few bits, layer by layer, and store them in that form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.quantize.form import as_judged
from onnxgrail.calibration.quantize.light import converted, inside, light_of, smallest
from onnxgrail.core import Recipe, Refusal
from onnxgrail.graph.bits.folded import HALF, Weight
from onnxgrail.graph.bits.plan import (
    FLOAT,
    NONE,
    NOWHERE,
    SPARED,
    TABLE,
    beside,
    by_channel,
    plan_of,
    with_initializers,
)
from onnxgrail.graph.bits.store import declare
from onnxgrail.graph.io.mapped import keep
from onnxgrail.graph.io.model_file import copy, weight_bytes
from onnxgrail.graph.io.opset import opset_of
from onnxgrail.graph.rewrite.unique import names_kept, origin
from onnxgrail.graph.trace.facts import key
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.bits.sides import Guide, own
from onnxgrail.narrowing.bits.store import Entry
from onnxgrail.narrowing.bits.walk import ALONE, Walk
from onnxgrail.narrowing.two_networks import Targets

RANDOM = "there are no calibration data"
UNMEASURED = "inputs are not measured"
BRANCH = "layers inside branches and loops keep more bits"
CODED = "a runtime converts it to float when it loads the model"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bits:
    """A model with weights in a few bits.

    Attributes:
        model: the graph.
        entries: one per matrix; left: nodes that stay in float.
        form: a message on a form that is not the one of the recipe.
    """

    model: ir.Model
    entries: tuple[Entry, ...]
    left: tuple[Refusal, ...]
    form: str = ""

    def notes(self) -> list[str]:
        """Return notes on the form, and on matrices that were rounded in a lesser way, with the reasons."""
        told = [self.form] if self.form else []
        nearest = "rounded to nearest: "
        for begins, what in ((RANDOM, nearest + RANDOM), (UNMEASURED, nearest + UNMEASURED), (ALONE, ALONE)):
            whys = [e.reason.removeprefix(begins) for e in self.entries if e.reason.startswith(begins)]
            if whys:
                told.append(f"{len(whys)} of {len(self.entries)} weights are {what}{';'.join(dict.fromkeys(whys))}")
        return told


def in_few_bits(
    recipe: Recipe, spared: Mapping[str, str], targets: Targets
) -> Callable[[Prepared, ir.Model, Ledger, Mapping[str, int]], ir.Model]:
    """Return what gives the candidates of a search their bits.

    Args:
        recipe: the options.
        spared: weights that have more bits, see `Found`.
        targets: keeps what layers of the dense model compute for all candidates.

    Returns:
        A function of the dense model with the data to which a candidate was fitted, the candidate in float, the
        decisions that narrowed it, and bits by weight (see `plan_of`).
    """

    def made(part: Prepared, slim: ir.Model, ledger: Ledger, bits: Mapping[str, int]) -> ir.Model:
        if recipe.uses_tool:
            return as_judged(part, slim, recipe, spared)
        if not bits and recipe.quantize == "none":
            return slim
        return rounded(Guide.of(part, ledger, recipe, targets), slim, Job(recipe=recipe), bits, spared).model

    return made


def rounded(
    guide: Guide,
    slim: ir.Model,
    job: Job,
    bits: Mapping[str, int] = NONE,
    spared: Mapping[str, str] = NOWHERE,
) -> Bits:
    """Return a copy of the narrowed model with its matrices in a few bits.

    Args:
        guide: the dense model with its data, and the decisions that narrowed it.
        slim: the narrowed model in float.
        job: the run; it caches rounded stages.
        bits: by weight, see `plan_of`.
        spared: weights that compute in float, with the reason; a runtime converts their 4 or 8 bits, if it can.

    Raises:
        ModelError: a weight holds NaN or infinity, or ONNX Runtime cannot run the narrowed model.
    """
    prepared = guide.prepared
    slim, sizes = with_initializers(slim), bool(bits)  # a size counts on the bits that it says
    bits = beside(slim, bits)
    facts = observe(slim, prepared.fed_small(slim), providers=job.recipe.providers)
    made = copy(slim)
    plan = plan_of(made, facts, job.recipe, bits, spared)
    walk = Walk(made, plan, job)
    with names_kept(made.graph):
        if not prepared.batches.synthetic:
            walk.carry(guide, own(prepared, keep(slim), facts))
        walk.rest(RANDOM if prepared.batches.synthetic else UNMEASURED)
    declare(made, plan, job.recipe)
    old = by_channel(made, job.recipe)
    form = f"opset {opset_of(made)} has no blocks: matrices have 8 bits and a scale per output" if old else ""
    whys = {
        **plan.coded,
        **spared,
        **(dict.fromkeys(inside(made), BRANCH) if not bits and job.recipe.target != "tensorrt" else {}),
    }
    bits = {**bits, **dict.fromkeys(whys, TABLE)}
    coded = converted(made, bits)  # no matrices in blocks
    bits = bits if sizes else {**bits, **dict.fromkeys(smallest(coded, weight_bytes(made)), HALF)}
    entries = tuple(_slower(one, spared) for one in walk.entries())
    entries += tuple(_entry(one, bits[one.origin], whys.get(one.origin, "")) for one in coded)
    names = {one.weight for one in entries} | {one.name for one in coded}
    left = [replace(one, reason=SPARED) if bits.get(one.value) == FLOAT else one for one in plan.left]
    if coded:
        feeds = [] if prepared.batches.synthetic else [*prepared.fed(slim)]
        made = light_of(made, feeds).with_bits(bits)
    return Bits(model=made, entries=entries, left=tuple(one for one in left if one.value not in names), form=form)


def _slower(entry: Entry, spared: Mapping[str, str]) -> Entry:
    """Return a report entry with the reason why a runtime converts the weight, if it is spared."""
    why = spared.get(origin(entry.weight), "")
    return replace(entry, reason=f"{why}; {CODED}") if why and not entry.reason else entry


def _entry(weight: Weight, bits: int, why: str) -> Entry:
    """Return the report entry of a weight that a runtime converts when it loads the model, with a further reason."""
    together = math.prod(weight.array.shape[axis] for axis in weight.axes) if bits < HALF else 1
    nodes = tuple(node.name or key(node) for node, _ in weight.value.uses())
    told = "; ".join(filter(None, (why, CODED)))
    return Entry(weight=weight.origin, nodes=nodes, bits=bits, block_size=together, rounding="nearest", reason=told)
