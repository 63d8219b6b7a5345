"""Local functions are written out where they are called, so that channels can be followed through them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from onnxgrail.graph.trace.facts import bodies


def inlined(model: ir.Model) -> ir.Model:
    """The model without the local functions that can be written out; weights keep their names.

    A function for another version of an opset than the model's stays a call if it matters, as do all of them when one
    takes a graph as an attribute: the trace then refuses the channels that reach such a call, by its name.
    """
    if not model.functions:
        return model
    whole = model.clone()
    whole.meta.update(model.meta)
    for name in whole.functions.keys() - _called(whole):  # the pass would write out calls inside them, too
        del whole.functions[name]
    for function in whole.functions.values():
        _align(function, whole.opset_imports.get("", 0))
    try:
        InlinePass(criteria=_Callers(whole))(whole)
    except (ValueError, ir.passes.PassError):
        return model
    left = {node.domain for node in _nodes(whole.graph)} | {domain for domain, _, _ in whole.functions}
    for domain in {domain for domain, _, _ in model.functions} - left:
        whole.opset_imports.pop(domain, None)
    return whole


def _called(model: ir.Model) -> set[ir.OperatorIdentifier]:
    """The functions that the graph calls, itself or by others."""
    found: set[ir.OperatorIdentifier] = set()
    waiting: list[ir.Graph | ir.Function] = [model.graph]
    while waiting:
        names = {node.op_identifier() for node in _nodes(waiting.pop())}
        new = names & model.functions.keys() - found
        found |= new
        waiting += [model.functions[name] for name in new]
    return found


class _Callers:
    """Asked before each call is written out: whether it may be, and under names that no call before it has.

    Left to itself, the pass tries `name_2`, `name_3` ... until one is free, which takes the square of the number of
    nodes where a function is called often or its nodes have no names.
    """

    def __init__(self, model: ir.Model) -> None:
        self.fitting = {id(function) for function in model.functions.values() if _fits(function, model)}
        self.bases: dict[int, list[tuple[ir.Node | ir.Value, str]]] = {}
        self.given: Counter[tuple[bool, str]] = Counter()

    def __call__(self, function: ir.Function) -> bool:
        """Whether a function may be written out; its names are then those for its next call."""
        key = id(function)
        if key not in self.fitting:
            return False
        if key not in self.bases:
            self.bases[key] = list(_named(function))
        for one, base in self.bases[key]:
            kind = isinstance(one, ir.Node), base
            self.given[kind] += 1
            number = self.given[kind]
            one.name = base if number == 1 else f"{base}_{number}"
        return True


def _named(function: ir.Function) -> Iterator[tuple[ir.Node | ir.Value, str]]:
    """All nodes and what they compute, with their names; the pass calls the nameless so."""
    for node in _nodes(function):
        yield node, node.name or "node"
        for value in node.outputs:
            yield value, value.name or "val"


def _align(function: ir.Function, version: int) -> None:
    """Take the model's version of the standard operators where all that the function uses are the same in both."""
    own = function.opset_imports.get("", version)
    names = {node.op_type for node in _nodes(function) if node.domain in ("", "ai.onnx")}
    if own != version and version and all(_since(name, own) == _since(name, version) for name in names):
        function.opset_imports[""] = version


def _since(op: str, version: int) -> int:
    """The opset at which an operator got the meaning it has at a version; the version itself for unknown ones."""
    try:
        return int(onnx.defs.get_schema(op, version).since_version)
    except onnx.defs.SchemaError:
        return version


def _fits(function: ir.Function, model: ir.Model) -> bool:
    """Whether a function means the same under the model's opsets.

    Imports that the model lacks are those of the function alone, so they must not contradict another function's.
    """
    known = dict(model.opset_imports)
    for other in model.functions.values():
        for domain, version in other.opset_imports.items():
            if domain not in model.opset_imports and known.setdefault(domain, version) != version:
                known[domain] = -1
    return all(known[domain] == version for domain, version in function.opset_imports.items())


def _nodes(graph: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    """All nodes, those of bodies included."""
    for node in graph:
        yield node
        for body in bodies(node):
            yield from _nodes(body)
