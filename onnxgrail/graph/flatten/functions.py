"""Inline local functions where they are called, so that channels can be followed through them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

_nodes = ir.traversal.RecursiveGraphIterator  # all nodes, including those in bodies


def inlined(model: ir.Model) -> ir.Model:
    """Return the model with its local functions inlined if possible; weights keep their names.

    A function stays a call if it needs another opset version than the model's and the difference matters.  If one of
    them takes a graph as an attribute, all functions stay calls.  The trace then refuses the channels that reach a
    call.
    """
    if not model.functions:
        return model
    whole = model.clone()
    whole.meta.update(model.meta)
    for name in whole.functions.keys() - _called(whole):  # the pass would also inline calls inside unused functions
        del whole.functions[name]
    for function in whole.functions.values():
        _align(function, whole)
    try:
        InlinePass(criteria=_Callers(whole))(whole)
    except (ValueError, ir.passes.PassError):
        return model
    left = {node.domain for node in _nodes(whole.graph)} | {domain for domain, _, _ in whole.functions}
    for domain in {domain for domain, _, _ in model.functions} - left:
        whole.opset_imports.pop(domain, None)
    return whole


def _called(model: ir.Model) -> set[ir.OperatorIdentifier]:
    """Return the functions that the graph calls, directly or through other functions."""
    found: set[ir.OperatorIdentifier] = set()
    waiting: list[ir.Graph | ir.Function] = [model.graph]
    while waiting:
        names = {node.op_identifier() for node in _nodes(waiting.pop())}
        new = names & model.functions.keys() - found
        found |= new
        waiting += [model.functions[name] for name in new]
    return found


class _Callers:
    """A callback of the inlining pass: decides if a call is inlined, and gives its nodes unique names.

    By default the pass tries `name_2`, `name_3` ... until a name is free, which takes quadratic time if a function is
    called often or its nodes have no names.
    """

    def __init__(self, model: ir.Model) -> None:
        self.fitting = {id(function) for function in model.functions.values() if _fits(function, model)}
        self.bases: dict[int, list[tuple[ir.Node | ir.Value, str]]] = {}
        self.given: Counter[tuple[bool, str]] = Counter()

    def __call__(self, function: ir.Function) -> bool:
        """Return True if a function may be inlined, after renaming its nodes and values for this call."""
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
    """Yield all nodes and their outputs with their names; unnamed ones with the names that the pass gives them."""
    for node in _nodes(function):
        yield node, node.name or "node"
        for value in node.outputs:
            yield value, value.name or "val"


def _align(function: ir.Function, model: ir.Model) -> None:
    """Bring a function's opsets to the model's where that changes no operator.

    The standard one, if all operators that it uses are the same in both versions; and those that define none of its
    operators: versions of local functions have no meaning, and exporters (jax2onnx) write any.
    """
    for domain in function.opset_imports.keys() - {"", *_defining(function, model)}:
        del function.opset_imports[domain]
    version = model.opset_imports.get("", 0)
    own = function.opset_imports.get("", version)
    names = {node.op_type for node in _nodes(function) if not node.domain}
    if own != version and version and all(_since(name, own) == _since(name, version) for name in names):
        function.opset_imports[""] = version


def _defining(function: ir.Function, model: ir.Model) -> set[str]:
    """Return the domains of a function's operators, without calls of other functions."""
    return {node.domain for node in _nodes(function) if node.op_identifier() not in model.functions}


def _since(op: str, version: int) -> int:
    """Return the opset that introduced an operator's definition at a version; the version itself if unknown."""
    try:
        return int(onnx.defs.get_schema(op, version).since_version)
    except onnx.defs.SchemaError:
        return version


def _fits(function: ir.Function, model: ir.Model) -> bool:
    """Return True if a function means the same under the model's opsets.

    Opsets that the model does not import must be the same in all functions.
    """
    known = dict(model.opset_imports)
    for other in model.functions.values():
        for domain, version in other.opset_imports.items():
            if domain not in model.opset_imports and known.setdefault(domain, version) != version:
                known[domain] = -1
    return all(known[domain] == version for domain, version in function.opset_imports.items())
