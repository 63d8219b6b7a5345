"""Shape arithmetic: find computed sizes that narrowing changes, and those that must not change.

Exports compute shapes from other shapes: heads times batch, half a width, a dimension of another tensor.  When a tensor
is narrowed, such a size may become wrong.  The arithmetic is evaluated with the sizes of a narrowed graph; if a reader
would get a wrong size, the Shape nodes it was computed from *stay*: they keep reporting the sizes of the full graph,
and each of their readers is corrected separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrail.core import Array, Bools
from onnxgrail.graph.attributes import integer, name_of, names_of
from onnxgrail.graph.trace.facts import Facts, bodies, constant_of, is_choice, key
from onnxgrail.graph.trace.labels import Mark, narrowed_shape
from onnxgrail.graph.trace.survey import Sizes

Values = Mapping[str, Array]
Shapes = Callable[[str], tuple[int, ...]]
Marks = Mapping[str, tuple[Mark, ...]]

SOURCES = ("Shape", "Size")
TARGETS = ("Reshape", "Expand")
SCALARS = 16  # float tensors of at most this many elements count as shape arithmetic


@dataclass(frozen=True, slots=True, eq=False)
class Arithmetic:
    """The part of a graph that computes with sizes.

    Attributes:
        nodes: nodes that compute from constants and sizes alone, in order.
        sources_of: name of a computed value -> outputs of the Shape nodes it was computed from.
        sources: the Shape and Size nodes.
    """

    nodes: tuple[ir.Node, ...]
    sources_of: Mapping[str, frozenset[str]]
    sources: tuple[ir.Node, ...]


def arithmetic(model: ir.Model, facts: Facts) -> Arithmetic:
    """Find the nodes that compute with sizes."""
    nodes: list[ir.Node] = []
    sources_of: dict[str, frozenset[str]] = {}
    sources: list[ir.Node] = []
    for node in model.graph:
        names = [v.name for v in node.inputs if v is not None and v.name]
        if key(node) in facts.constants or is_choice(node) or bodies(node) or not names:
            continue
        if node.op_type in SOURCES and names[0] in facts.shapes:  # unknown in a branch that no sample takes
            sources.append(node)
            sources_of[key(node)] = frozenset({key(node)})
        elif all(n in sources_of or n in facts.constants for n in names) and _small(node, facts):
            nodes.append(node)
            those = frozenset().union(*(sources_of.get(n, frozenset()) for n in names))
            sources_of.update({v.name: those for v in node.outputs if v.name})
    return Arithmetic(tuple(nodes), sources_of, tuple(sources))


def _small(node: ir.Node, facts: Facts) -> bool:
    names = [v.name for v in node.outputs if v.name]
    return all(
        n in facts.shapes and (facts.dtypes[n].kind in "iub" or int(np.prod(facts.shapes[n])) <= SCALARS) for n in names
    )


def sizes_of(model: ir.Model, facts: Facts, marks: Marks, deads: Sequence[Bools]) -> Sizes:
    """Find computed sizes that are right in a narrowed graph, and Shape nodes that must report full sizes.

    Args:
        model: the graph.
        facts: its sizes in full.
        marks: unit numbers on the axes of its tensors.
        deads: (ids,) removed units of each test graph; a size that is right in all test graphs is taken to be right
            in every narrowed graph.
    """
    sums = arithmetic(model, facts)
    narrows = [partial(_narrowed, facts, marks, dead) for dead in deads]
    measured = {key(n): name_of(n, 0) for n in sums.sources}
    moved = {source for source, name in measured.items() if any(n(name) != facts.shapes[name] for n in narrows)}
    if not moved:
        return Sizes()
    staying: frozenset[str] = frozenset()
    try:
        evaluated = _evaluator(model, facts, sums)
        full = evaluated(lambda node: reported(node, facts.shapes[name_of(node, 0)]))
        while True:
            slims = [evaluated(partial(_reported_now, facts, n, staying)) for n in narrows]
            cases = [_Case(narrow, full, slim) for narrow, slim in zip(narrows, slims, strict=True)]
            right = _right(model, sums, cases)
            wrong = frozenset[str]()
            for case in cases:
                wrong |= _misled(model, facts, sums, case, right)
            if wrong & moved <= staying:
                return Sizes(right, staying)
            staying |= wrong & moved
    except Exception:  # noqa: BLE001  the reference evaluator fails: keep all sizes full
        return Sizes({}, frozenset(moved))


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """The computed sizes in one narrowed graph.

    Attributes:
        narrow: returns the shape of a tensor in the narrowed graph.
        full: the sizes in the full graph.
        slim: the sizes in the narrowed graph, without corrections.
    """

    narrow: Shapes
    full: Values
    slim: Values

    def is_target(self, node: ir.Node, position: int, name: str) -> bool:
        """Return True if a size is the target shape of a node, of the same length in both graphs."""
        return node.op_type in TARGETS and position == 1 and self.full[name].shape == self.slim[name].shape

    def is_same(self, name: str) -> bool:
        """Return True if a size is the same in both graphs."""
        full, slim = self.full[name], self.slim[name]
        return full.shape == slim.shape and bool((full == slim).all())


def _narrowed(facts: Facts, marks: Marks, dead: Bools, name: str) -> tuple[int, ...]:
    """Return the shape of a tensor in a narrowed graph."""
    return narrowed_shape(facts.shapes[name], marks.get(name, ()), dead)


def _reported_now(facts: Facts, narrow: Shapes, staying: frozenset[str], node: ir.Node) -> Array:
    """Return the output of a Shape node in the narrowed graph: the full size if the node stays."""
    name = name_of(node, 0)
    return reported(node, facts.shapes[name] if key(node) in staying else narrow(name))


def _readers(model: ir.Model, sums: Arithmetic) -> Iterator[tuple[ir.Node, int, str]]:
    """Yield every (node, operand, name) that reads a computed size outside the shape arithmetic."""
    inner = {key(node) for node in sums.nodes}
    for node in model.graph:
        if key(node) not in inner and node.op_type not in SOURCES:
            for position, name in enumerate(names_of(node.inputs)):
                if name in sums.sources_of:
                    yield node, position, name


def _right(model: ir.Model, sums: Arithmetic, cases: Sequence[_Case]) -> dict[str, Bools]:
    """Return, per node, a mask of target shape elements that are right in all narrowed graphs without a correction."""
    found: dict[str, Bools] = {}
    for node, position, name in _readers(model, sums):
        for case in cases:
            if case.is_target(node, position, name):
                right = case.slim[name] == _wanted(node, case.narrow, case.full[name])
                found[key(node)] = found.get(key(node), np.ones_like(right)) & right
    return found


def _misled(model: ir.Model, facts: Facts, sums: Arithmetic, case: _Case, right: Values) -> frozenset[str]:
    """Return the Shape nodes of computed sizes that are neither right nor full-size, so cannot be corrected."""
    wrong = frozenset[str]()
    for node, position, name in _readers(model, sums):
        if case.is_target(node, position, name):
            holds = bool((right[key(node)] | (case.slim[name] == case.full[name])).all())
        else:
            holds = case.is_same(name) or _rewritten(node, position, name, facts, case)
        wrong |= frozenset() if holds else sums.sources_of[name]
    for output in model.graph.outputs:
        name = output.name or ""
        if name in sums.sources_of and not case.is_same(name):
            wrong |= sums.sources_of[name]
    return wrong


def _wanted(node: ir.Node, narrow: Shapes, target: Array) -> Array:
    """Return the target shape that a narrowed graph needs; -1, copied and broadcast sizes are unchanged."""
    shape = narrow(key(node))[-target.size :] if target.size else ()
    before = node.op_type == "Expand"
    return np.array([t if t < 1 or (before and t == 1) else s for t, s in zip(target.tolist(), shape, strict=True)])


def _evaluator(model: ir.Model, facts: Facts, sums: Arithmetic) -> Callable[[Callable[[ir.Node], Array]], Values]:
    """Return a function that computes all sizes, given the outputs of the Shape nodes."""
    from onnx.reference import ReferenceEvaluator  # slow to import, and many models do not need it

    nodes = [ir.to_proto(node) for node in sums.nodes]
    made = [v.name for node in sums.nodes for v in node.outputs if v.name]
    read = {v.name for node in sums.nodes for v in node.inputs if v is not None and v.name}
    given = {}
    for name in read - {*made} - {key(node) for node in sums.sources}:
        array = constant_of(model.graph.initializers.get(name), name, facts)
        if array is None:
            raise KeyError(name)
        given[name] = array
    sources = [key(node) for node in sums.sources]
    graph = onnx.helper.make_graph(nodes, "sizes", [_named(n) for n in (*sources, *given)], [_named(n) for n in made])
    opsets = [onnx.helper.make_opsetid(d, v) for d, v in model.opset_imports.items()]
    runner = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets)) if nodes else None

    def evaluated(report: Callable[[ir.Node], Array]) -> Values:
        feed = given | {key(node): report(node) for node in sums.sources}
        return feed if runner is None else feed | dict(zip(made, runner.run(None, feed), strict=True))

    return evaluated


def _named(name: str) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name=name)


def reported(node: ir.Node, shape: tuple[int, ...]) -> Array:
    """Return the output of a Shape or Size node for a tensor of this shape."""
    if node.op_type == "Size":
        return np.array(int(np.prod(shape)), dtype=np.int64)
    start, end = slice_of(node, len(shape))
    return np.array(shape[start:end], dtype=np.int64)


def slice_of(node: ir.Node, rank: int) -> tuple[int, int]:
    """Return the first axis and the end of the axes that a Shape node reports."""
    return slice(integer(node, "start"), integer(node, "end", rank)).indices(rank)[:2]


def _rewritten(node: ir.Node, position: int, name: str, facts: Facts, case: _Case) -> bool:
    """Return True if the node's rewrite recomputes every size that changed."""
    full, slim, narrow = case.full[name], case.slim[name], case.narrow
    if full.shape != slim.shape:
        return False
    changed = np.flatnonzero(full.ravel() != slim.ravel()).tolist()
    if node.op_type == "Slice" and position in (1, 2):
        return all(_sliced(node, p, facts, narrow) for p in changed)
    output = key(node)
    return (
        node.op_type == "Resize" and position == 3 and changed == [1] and narrow(output)[1] != facts.shapes[output][1]
    )


def _sliced(node: ir.Node, position: int, facts: Facts, narrow: Shapes) -> bool:
    """Return True if the sliced axis is narrowed, so that the rewrite recomputes its bounds."""
    name, axes = name_of(node, 0), facts.values.get(name_of(node, 3))
    axis = position if axes is None else int(axes.ravel()[position])
    return narrow(name)[axis] != facts.shapes[name][axis]
