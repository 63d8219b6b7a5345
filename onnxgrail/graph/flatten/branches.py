"""Flatten the branches of If into the graph around them, so that channels are followed through them; fold them back.

In the flat graph a *choice* replaces the If: an in-memory operator with the condition and the outputs of both branches
as inputs.  Every node and weight of a branch records its branch.  A value of the outer graph enters a branch through an
`Identity` of that branch (a gate), since its size may differ when that branch is taken.  The flat graph is never run:
`folded` restores the If nodes, `resolved` keeps one branch of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.graph.attributes import given
from onnxgrail.graph.trace.facts import CHOICE, OWN, Branch, bodies, constants, is_choice, key

SIDES = {"then": "then_branch", "else": "else_branch"}
Scope = tuple[Branch, ...]
"""The branches around a node or weight, outermost first."""
Route = frozenset[Branch]
"""The branches that a feed executes."""

_SCOPE = "onnxgrail.scope"  # in the `meta` of nodes and weights: their branches
_GATE = "onnxgrail.gate"  # in the `meta` of nodes: the node is a gate
_NAME = "onnxgrail.name"  # in the `meta` of values: name in the branch, if another value has it too
_SHELL = "onnxgrail.shell"  # in the `meta` of a choice: the other parts of the If


@dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """The name, documentation and metadata of a branch."""

    name: str | None
    doc_string: str | None
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class _Shell:
    """The parts of an If that its choice does not hold; `key` is the key of the choice."""

    key: str
    domain: str
    attributes: tuple[str, ...]
    frames: Mapping[str, _Frame]


def scope_of(node: ir.Node) -> Scope:
    """Return the branches around a node of a flat graph."""
    found: Scope = node.meta.get(_SCOPE, ())
    return found


def stand_beside(node: ir.Node, other: ir.Node) -> None:
    """Put a new node into the branches of another one."""
    if _SCOPE in other.meta:
        node.meta[_SCOPE] = other.meta[_SCOPE]


def in_branch(weight: ir.Value) -> bool:
    """Return True if a weight belongs to a branch."""
    return bool(weight.meta.get(_SCOPE))


def comes_to(scope: Scope, route: Route) -> bool:
    """Return True if a feed with this route executes nodes of this scope."""
    return all(branch in route for branch in scope)


def branched(model: ir.Model) -> bool:
    """Return True if the graph contains choices (flattened branches)."""
    return any(is_choice(node) for node in model.graph)


# ---- flattening
def unfolded(model: ir.Model) -> ir.Model:
    """Return a copy with the branches of If flattened; the model itself if no If can be flattened."""
    if not any(_enters(node) for node in model.graph):
        return model
    try:
        flat = model.clone()
    except RuntimeError:  # a body reads a missing value: the runtime will refuse the model and name it
        return model
    flat.meta.update(model.meta)
    taken = _fixed_names(flat.graph, reached=True)
    for node in [node for node in flat.graph if _enters(node)]:
        _lay_out(flat.graph, node, (), taken)
    _add_gates(flat, taken)
    return flat


def _enters(node: ir.Node) -> bool:
    """Return True for an If whose two branches are present and return tensors."""
    if node.op_type != "If" or node.domain or not key(node) or node.inputs[0] is None:
        return False
    if any(name not in node.attributes or node.attributes[name].is_ref() for name in SIDES.values()):
        return False
    graphs = [node.attributes[name].as_graph() for name in SIDES.values()]
    made = [*node.outputs, *(value for graph in graphs for value in graph.outputs)]
    plain = all(value.type is None or isinstance(value.type, ir.TensorType) for value in made)
    return plain and all(len(graph.outputs) == len(node.outputs) for graph in graphs)


def _fixed_names(graph: ir.Graph, *, reached: bool, own: bool = True) -> set[str]:
    """Return the names that stay: of all values outside the branches that are flattened."""
    values = [*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)]
    names = {value.name or "" for value in values} if own else set()
    for node in graph:
        entered = reached and _enters(node)
        for body in bodies(node):
            names |= _fixed_names(body, reached=entered, own=not entered)
    return names


def _lay_out(graph: ir.Graph, node: ir.Node, scope: Scope, taken: set[str]) -> None:
    """Move the nodes and weights of both branches before an If, and make the If a choice."""
    name, frames, operands = key(node), {}, list[ir.Value]()
    for side, attribute in SIDES.items():
        body, inner = node.attributes[attribute].as_graph(), (*scope, (name, side))
        frames[side] = _Frame(body.name, body.doc_string, dict(body.metadata_props))
        operands += list(body.outputs)
        body.outputs.clear()
        nodes = list(body)
        body.remove(nodes)
        for weight in list(body.initializers.values()):
            del body.initializers[weight.name or ""]
            _rename(weight, f"{name}/{side}/{weight.name}", taken)
            weight.meta[_SCOPE] = inner
            graph.register_initializer(weight)
        for one in nodes:
            one.meta[_SCOPE] = inner
            for value in one.outputs:
                _rename(value, f"{name}/{side}/{value.name}", taken)
        graph.insert_before(node, nodes)
        for one in nodes:
            if _enters(one):
                _lay_out(graph, one, inner, taken)
    node.meta[_SHELL] = _Shell(name, node.domain, tuple(node.attributes), frames)
    for attribute in SIDES.values():
        node.attributes.pop(attribute)
    node.domain, node.op_type = OWN, CHOICE
    node.resize_inputs(1 + len(operands))
    for position, value in enumerate(operands, start=1):
        node.replace_input_with(position, value)


def _rename(value: ir.Value, other: str, taken: set[str]) -> None:
    """Rename a value of a branch if its name is taken: both branches may use the same names."""
    if not value.name:
        return
    if value.name in taken:
        value.meta[_NAME] = value.name
        value.name = _free(other, taken)
    taken.add(value.name)


def _free(name: str, taken: Iterable[str]) -> str:
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    return found


def _add_gates(flat: ir.Model, taken: set[str]) -> None:
    """Insert a gate for every non-constant outer value that a branch reads, before its first reader there."""
    known = constants(flat)
    gates: dict[tuple[ir.Value, Scope], ir.Value] = {}
    for node in list(flat.graph):
        scope = scope_of(node)
        for position, value in enumerate(node.inputs if scope and not is_choice(node) else ()):
            if value is None or value.name in known or _scope(value) == scope:
                continue
            if (value, scope) not in gates:
                gate = ir.Node("", "Identity", [value])
                gate.meta[_SCOPE], gate.meta[_GATE] = scope, True
                gate.outputs[0].name = _free("/".join((*scope[-1], value.name or "")), taken)
                taken.add(gate.outputs[0].name)
                flat.graph.insert_before(node, gate)
                gates[value, scope] = gate.outputs[0]
            node.replace_input_with(position, gates[value, scope])


def _scope(value: ir.Value) -> Scope:
    node = value.producer()
    found: Scope = value.meta.get(_SCOPE, ()) if node is None else scope_of(node)
    return found


# ---- folding
def folded(model: ir.Model, *, own_names: bool = True) -> ir.Model:
    """Return a copy with an If for every choice; the model itself if it has none.

    Nodes that were added to the flat graph go to the branch whose values they read.

    Args:
        model: flat or not; it is not changed.
        own_names: restore the names that values had inside their branches.
    """
    if not branched(model):
        return model
    whole = model.clone()
    whole.meta.update(model.meta)
    graph = whole.graph
    for gate in [node for node in graph if node.meta.get(_GATE)]:
        gate.outputs[0].replace_all_uses_with(given(gate, 0))
        graph.remove(gate, safe=True)
    places = _places(graph)
    inside: dict[Scope, list[ir.Node]] = defaultdict(list)
    for node, scope in places.items():
        inside[scope].append(node)
    weights: dict[Scope, list[ir.Value]] = defaultdict(list)
    for weight in [value for value in graph.initializers.values() if in_branch(value)]:
        weights[_scope(weight)].append(weight)
        del graph.initializers[weight.name or ""]
    if own_names:
        for value in [*(v for n in graph for v in n.outputs), *(v for some in weights.values() for v in some)]:
            value.name = value.meta.get(_NAME, value.name)
    for node in sorted((n for n in places if is_choice(n)), key=lambda n: -len(places[n])):
        _close(graph, node, places[node], inside, weights)
    return whole


def _places(graph: ir.Graph) -> dict[ir.Node, Scope]:
    """Return the scope of every node, in order: the recorded one, or else the deepest scope of its inputs."""
    found: dict[ir.Node, Scope] = {}
    for node in graph:
        read = [value for value in node.inputs if value is not None]
        makers = [(value, value.producer()) for value in read]
        scopes = [_scope(value) if maker is None else found[maker] for value, maker in makers]
        found[node] = scope_of(node) if node.meta.get(_SHELL) else scope_of(node) or max(scopes, key=len, default=())
    return found


def _close(
    graph: ir.Graph,
    node: ir.Node,
    scope: Scope,
    inside: Mapping[Scope, list[ir.Node]],
    weights: Mapping[Scope, list[ir.Value]],
) -> None:
    """Make a choice an If again, with the nodes and weights of both branches."""
    shell: _Shell = node.meta[_SHELL]
    operands, attributes = list(node.inputs[1:]), dict(node.attributes)
    node.resize_inputs(1)
    for side, frame in shell.frames.items():
        inner = (*scope, (shell.key, side))
        nodes, mine = list(inside.get(inner, ())), weights.get(inner, [])
        graph.remove(nodes)
        outputs = list[ir.Value]()
        for _ in node.outputs:
            value = operands.pop(0)
            assert value is not None
            if value not in mine and value.producer() not in nodes:
                nodes.append(ir.Node("", "Identity", [value]))
                nodes[-1].outputs[0].name = f"{shell.key}/{side}/{value.name}"
                value = nodes[-1].outputs[0]
            outputs.append(value)
        body = ir.Graph(
            [],
            outputs,
            nodes=nodes,
            initializers=mine,
            name=frame.name,
            doc_string=frame.doc_string,
            metadata_props=dict(frame.metadata),
        )
        attributes[SIDES[side]] = ir.AttrGraph(SIDES[side], body)
    node.domain, node.op_type = shell.domain, "If"
    node.attributes.clear()
    for name in shell.attributes:
        node.attributes[name] = attributes[name]


# ---- resolving
def resolved(model: ir.Model, route: Route) -> ir.Model:
    """Return a copy with only the branches on the route; every choice becomes an Identity of the taken branch."""
    if not branched(model):
        return model
    plain = model.clone()
    plain.meta.update(model.meta)
    for node in [node for node in plain.graph if is_choice(node) and comes_to(scope_of(node), route)]:
        taken = next(number for number, side in enumerate(SIDES) if (key(node), side) in route)
        for position, old in enumerate(node.outputs):
            copy = ir.Node("", "Identity", [node.inputs[1 + taken * len(node.outputs) + position]])
            new = copy.outputs[0]
            new.name, new.type, new.shape = old.name, old.type, old.shape
            copy.meta.update(node.meta)
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            plain.graph.insert_before(node, copy)
        plain.graph.remove(node, safe=True)
    read = [value for value in plain.graph.initializers.values() if value.uses()]
    plain.graph.remove([node for node in plain.graph if not comes_to(scope_of(node), route)], safe=True)
    for weight in read:
        if not weight.uses() and not weight.is_graph_input() and not weight.is_graph_output():
            del plain.graph.initializers[weight.name or ""]  # else the runtime loses its numbers
    return plain
