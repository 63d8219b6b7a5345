"""Find the weights whose kernels are slower in a few bits than in float on this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import onnx_ir as ir

from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.quantize.form import elsewhere
from onnxgrail.calibration.runtime.session import CPU
from onnxgrail.core import Feed, Recipe
from onnxgrail.errors import ModelError
from onnxgrail.graph.bits.plan import Plan, plan_of, with_initializers
from onnxgrail.graph.bits.store import store_blank
from onnxgrail.graph.fittable.matrices import LINEAR
from onnxgrail.graph.flatten.branches import folded
from onnxgrail.graph.io.model_file import HEAVY, copy, weight_bytes
from onnxgrail.graph.rewrite.unique import origin
from onnxgrail.graph.trace.facts import Facts, key
from onnxgrail.machine.job import Job
from onnxgrail.machine.steps.codec import Codec, Record
from onnxgrail.options import WEIGHTS
from onnxgrail.search.kernels import Durations, durations
from onnxgrail.search.latency import SLOWER

FUSED = ("Add", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "Gelu", "Clip")  # a kernel may compute them after its product

Slow = tuple[Mapping[str, str], str]
"""Name of a weight before narrowing -> why it is better in float; and why nothing was measured, if so."""

SLOW: Codec[Slow] = Codec(
    lambda slow: Record(notes={"weights": dict(slow[0]), "note": slow[1]}),
    lambda record: (record.notes["weights"], record.notes["note"]),
)


def slow_weights(prepared: Prepared, model: ir.Model, job: Job, when: str) -> Slow:
    """Measure the kernels of a model in float and in a few bits, if a run minimizes latency on this machine.

    Args:
        prepared: the original model and its data.
        model: the float model, perhaps narrowed.
        job: the run; it keeps what was measured.
        when: names the measurement among those of the run.
    """
    recipe = job.recipe
    if recipe.quantize not in WEIGHTS or not recipe.wants_latency or elsewhere(recipe):
        return {}, ""
    if recipe.providers[0] not in CPU:
        return {}, _unmeasured(f"{recipe.providers[0]} reports no time of a kernel")
    if weight_bytes(model) > HEAVY:
        return {}, _unmeasured(f"its weights take more than {HEAVY >> 30} GiB")
    feed = prepared.one_sample(model)
    return job.steps.alone().once(f"speed in few bits {when}", lambda: _measured(model, feed, recipe), SLOW)


def _measured(model: ir.Model, feed: Feed, recipe: Recipe) -> Slow:
    model = with_initializers(folded(model))  # plans look into no branch
    whole, few = copy(model), copy(model)
    for node in (*whole.graph, *few.graph):
        node.name = key(node)
    facts = observe(model, feed, providers=recipe.providers)
    plan = plan_of(few, facts, recipe)
    layers = _layers(plan, facts)
    store_blank(few, plan, recipe)
    try:
        times = durations([whole, few], feed, recipe.providers, bare=True)
    except ModelError as error:
        return {}, _unmeasured(str(error.args[0]))
    return _slower(layers, (times[0], _with_new(whole, few, times[1])), plan), ""


def _unmeasured(why: str) -> str:
    return f"the speed in few bits is not measured, and does not decide where they are: {why}"


def _layers(plan: Plan, facts: Facts) -> dict[Hashable, dict[str, list[str]]]:
    """Return the nodes that read weights, with what may be fused into them, by weight and by kind of kernel.

    Matrices of the same size, form and rows are of one kind, and have the same time.
    """
    found: dict[Hashable, dict[str, list[str]]] = defaultdict(dict)
    for matrix, grid in plan.matrices:
        nodes = [name for node in matrix.nodes for name in _fused(node)]
        rows = [facts.shapes.get(node.inputs[0].name or "") for node in matrix.nodes if node.inputs[0] is not None]
        found[matrix.inputs, matrix.outputs, grid, *map(str, rows)][matrix.weight] = nodes
    for table, _ in plan.tables:
        nodes = [name for node in (*table.lookups, *table.products) for name in _fused(node)]
        found[table.weight][table.weight] = nodes
    return found


def _fused(node: ir.Node) -> list[str]:
    """Return the names of a node and of those after it that its kernel may compute."""
    names = [node.name or ""]
    while node.op_type in (*LINEAR, *FUSED) and not node.outputs[0].is_graph_output():
        uses = list(node.outputs[0].uses())
        others = [v for use in uses for v in use.node.inputs if v is not None and v is not node.outputs[0]]
        if len(uses) != 1 or uses[0].node.op_type not in FUSED or any(v.const_value is None for v in others):
            break
        node = uses[0].node
        names.append(node.name or "")
    return names


def _with_new(whole: ir.Model, few: ir.Model, times: Durations) -> Durations:
    """Return the times in a few bits, those of new nodes with the nodes that read them."""
    old, found = {node.name for node in whole.graph}, dict(times)
    for node in few.graph:
        makers = {value.producer() for value in node.inputs if value is not None}
        fresh = [maker.name or "" for maker in makers if maker is not None and maker.name not in old]
        found[node.name or ""] = sum(times.get(name, 0.0) for name in (node.name or "", *fresh))
    return found


def _slower(
    layers: Mapping[Hashable, Mapping[str, Sequence[str]]], times: tuple[Durations, Durations], plan: Plan
) -> dict[str, str]:
    """Return the weights that are slower in a few bits beyond noise, with the reason."""
    grids = {weight: form.grid for weight, form in plan.forms().items()}
    slow = {}
    for kind in layers.values():
        before, after = (sum(each.get(name, 0.0) for names in kind.values() for name in names) for each in times)
        if 0 < before < SLOWER * after:  # a product that is fused into another kernel has no time of its own
            for weight in kind:
                text = f"on this machine {grids[weight].bits} bits take {after / before:.2f} times as long as float"
                slow[origin(weight)] = text
    return slow
