"""Steps: nodes with discontinuous outputs, such as TopK, NonMaxSuppression or rounding.

Two graphs that are equal up to rounding errors may differ after a step by a whole box, class or quantization level.
So they are compared before each step, and after it both continue with the step's output in one of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.graph.attributes import LAYOUTS, moved_from, names_of, text
from onnxgrail.graph.flatten.branches import scope_of
from onnxgrail.graph.trace.facts import RANDOM, Facts, bodies, captures, is_choice, key
from onnxgrail.graph.trace.sizes import arithmetic

ROUNDING = frozenset(
    {"QuantizeLinear", "DynamicQuantizeLinear", "Round", "Floor", "Ceil", "Sign", "DynamicQuantizeMatMul"}
)
RANKING = frozenset({"TopK", "NonMaxSuppression", "ArgMax", "ArgMin", "Hardmax", "Unique"})
PICKING = frozenset({"NonZero", "OneHot", "MaxRoiPool", "Mod", "IsInf"})
COMPARING = frozenset({"Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal"})
SQUASHES = frozenset({"Sigmoid", "HardSigmoid"})
STEPS = ROUNDING | RANKING | PICKING | COMPARING | RANDOM


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A node with discontinuous outputs.

    Attributes:
        node: its name for messages; op: its operator.
        reads: its float inputs.
        makes: its outputs.
    """

    node: str
    op: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.op} {self.node}"


def steps(model: ir.Model, facts: Facts) -> tuple[Step, ...]:
    """Return all steps that depend on float inputs, in order; a node whose body contains a step is a step."""
    found = []
    sizes = arithmetic(model, facts).sources_of
    for node in model.graph:
        if scope_of(node):  # tensors inside a branch are not readable from outside
            continue
        makes = tuple(v.name for v in node.outputs if v.name)
        if not makes or any(name in facts.constants or name not in facts.dtypes for name in makes):
            continue
        if all(name in sizes for name in makes):
            continue
        reads = tuple(n for n in _reads(node) if _is_float(n, facts) and n not in facts.constants)
        if (reads and _decides(node, facts)) or node.op_type in RANDOM:
            found.append(Step(node=node.name or key(node), op=node.op_type, reads=reads, makes=makes))
    return tuple(found)


def _decides(node: ir.Node, facts: Facts) -> bool:
    """Return True if a rounding error in the inputs can make the outputs jump."""
    if node.op_type == "Cast":
        return not _is_float(key(node), facts)
    if node.op_type == "GridSample":
        return text(node, "mode") == "nearest"
    if node.op_type == "MaxPool":
        return len(node.outputs) > 1 and bool(node.outputs[1].name)
    return node.op_type in STEPS or any(_inside(body) for body in bodies(node))


def _inside(body: ir.Graph) -> bool:
    return any(node.op_type in STEPS or any(_inside(inner) for inner in bodies(node)) for node in body)


def _reads(node: ir.Node) -> list[str]:
    return [v.name for v in node.inputs if v is not None and v.name] + sorted(captures(node))


def _is_float(name: str, facts: Facts) -> bool:
    return name in facts.dtypes and facts.dtypes[name].kind == "f"


def compared(model: ir.Model, some: Collection[Step], facts: Facts) -> tuple[str, ...]:
    """Return the tensors by which two runs of a graph are compared.

    These are its outputs, the inputs of the last steps upstream of them, and the sources of outputs that are not
    tensors, such as maps.
    """
    made = {name: step for step in some for name in step.makes}
    values = {v.name: v for node in model.graph for v in node.outputs if v.name}
    names = [v.name for v in model.graph.outputs if v.name]
    found = dict.fromkeys(name for name in names if _is_float(name, facts))
    seen = set[str]()
    while names:
        name = names.pop()
        if name in seen or name not in values or name in facts.constants:
            continue
        seen.add(name)
        node = values[name].producer()
        assert node is not None
        if name in made:
            found |= dict.fromkeys(made[name].reads)
            continue
        names += _reads(node)
        if name not in facts.dtypes and not scope_of(node) and not is_choice(node):
            found |= dict.fromkeys(n for n in _reads(node) if _is_float(n, facts) and n not in facts.constants)
    return tuple(name for name in found if name in values) or tuple(v.name for v in model.graph.outputs if v.name)


def squashed(model: ir.Model, facts: Facts) -> dict[str, str]:
    """Return the outputs that a sigmoid makes, with the tensor before it.

    Far from zero, a sigmoid rounds to the last bit of 1: scores that are all nearly zero differ by more than rounding
    of their own size, and only the tensor before it tells if they agree.
    """
    found = {}
    for value in model.graph.outputs:
        node = moved_from(value, LAYOUTS).producer()
        source = node.inputs[0] if node is not None and node.op_type in SQUASHES else None
        maker = source.producer() if source is not None else None
        if source is not None and maker is not None and not scope_of(maker) and _is_float(source.name or "", facts):
            found[value.name or ""] = source.name or ""
    return found


def led(model: ir.Model, some: Collection[Step]) -> tuple[Step, ...]:
    """Return the steps on which an output of the model depends, in order."""
    values = {v.name: v for node in model.graph for v in node.outputs if v.name}
    queue, seen = [v.name or "" for v in model.graph.outputs], set[str]()
    while queue:
        name = queue.pop()
        node = values[name].producer() if name in values else None
        if name in seen or node is None:
            continue
        seen.add(name)
        queue += _reads(node)
    return tuple(step for step in some if seen & set(step.makes))


def held(model: ir.Model, some: Collection[Step], facts: Facts, tried: Collection[Step] = ()) -> None:
    """Remove steps from a graph, in place: their outputs become graph inputs.

    Args:
        model: the graph.
        some: the steps to remove.
        facts: dtypes and shapes.
        tried: steps that stay beside the graph: they read inputs named by `handed`, their outputs are named by
            `tried_name`.
    """
    gone = {name for step in some for name in step.makes}
    trying = {name for step in tried for name in step.makes}
    reads: dict[str, ir.Value] = {}
    for node in [n for n in model.graph if key(n) in gone]:
        stays = key(node) in trying
        for value in [v for v in node.outputs if v.name]:
            name = value.name or ""
            value.replace_all_uses_with(_input(model, name, name, facts), replace_graph_outputs=True)
            value.name = tried_name(name)
        if not stays:
            model.graph.remove(node, safe=True)
            continue
        for position, name in enumerate(names_of(node.inputs)):
            if any(name in step.reads for step in tried):
                reads[name] = reads.get(name) or _input(model, handed(name), name, facts)
                node.replace_input_with(position, reads[name])
    for position in reversed(range(len(model.graph.outputs))):
        if model.graph.outputs[position].name in gone:  # an output that is now an input compares nothing
            del model.graph.outputs[position]


def handed(name: str) -> str:
    """Return the name of the input that a tried step reads in place of a tensor."""
    return f"{name}/handed"


def tried_name(name: str) -> str:
    """Return the name of a tried step's output."""
    return f"{name}/tried"


def can_try(model: ir.Model, step: Step) -> bool:
    """Return True if a step is deterministic and reads tensors through its inputs only."""
    node = next((n for n in model.graph if key(n) in step.makes), None)
    return node is not None and not bodies(node) and node.op_type not in RANDOM


def _input(model: ir.Model, name: str, like: str, facts: Facts) -> ir.Value:
    """Add a graph input with the type of a tensor."""
    kind = ir.TensorType(ir.DataType.from_numpy(facts.dtypes[like]))
    fresh = ir.Value(name=name, type=kind, shape=ir.Shape([None] * len(facts.shapes[like])))
    model.graph.inputs.append(fresh)
    return fresh
