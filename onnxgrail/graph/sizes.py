"""Arithmetic on shapes: what every computed size would be once the graph is narrowed, and which must not follow.

Exports compute shapes from other shapes: heads times batch, half a width, a dimension borrowed from another tensor.
Once a tensor is narrowed such a size may change where it must not.  All of that arithmetic is run here on the sizes of
a narrowed graph; where a reader would get a wrong size, the Shape nodes behind it are told to *stay*: they go on
reporting the sizes of the full graph, and each reader is corrected on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onnxgrail.core import Array, Bools
from onnxgrail.graph.facts import Facts, bodies, key
from onnxgrail.graph.labels import Mark
from onnxgrail.graph.survey import Sizes

Values = Mapping[str, Array]
Shapes = Callable[[str], tuple[int, ...]]
Marks = Mapping[str, tuple[Mark, ...]]

SOURCES = ("Shape", "Size")
SCALARS = 16  # floats of at most this many elements count as arithmetic on sizes


@dataclass(frozen=True, slots=True, eq=False)
class Arithmetic:
    """The part of a graph that computes with sizes.

    Attributes:
        nodes: those that compute from constants and sizes alone, in order.
        behind: name of a computed value -> outputs of the Shape nodes that it was computed from.
        sources: the Shape and Size nodes.
    """

    nodes: tuple[ir.Node, ...]
    behind: Mapping[str, frozenset[str]]
    sources: tuple[ir.Node, ...]


def arithmetic(model: ir.Model, facts: Facts) -> Arithmetic:
    """Find the nodes that compute with sizes."""
    nodes: list[ir.Node] = []
    behind: dict[str, frozenset[str]] = {}
    sources: list[ir.Node] = []
    for node in model.graph:
        names = [v.name for v in node.inputs if v is not None and v.name]
        if key(node) in facts.constants or bodies(node) or not names:
            continue
        if node.op_type in SOURCES:
            sources.append(node)
            behind[key(node)] = frozenset({key(node)})
        elif all(n in behind or n in facts.constants for n in names) and _small(node, facts):
            nodes.append(node)
            those = frozenset().union(*(behind.get(n, frozenset()) for n in names))
            behind.update({v.name: those for v in node.outputs if v.name})
    return Arithmetic(tuple(nodes), behind, tuple(sources))


def _small(node: ir.Node, facts: Facts) -> bool:
    names = [v.name for v in node.outputs if v.name]
    return all(
        n in facts.shapes and (facts.dtypes[n].kind in "iub" or int(np.prod(facts.shapes[n])) <= SCALARS) for n in names
    )


def sizes_of(model: ir.Model, facts: Facts, marks: Marks, dead: Bools) -> Sizes:
    """What is computed from shapes, and which Shape nodes must go on reporting full sizes when units go.

    Args:
        model: the graph.
        facts: its sizes in full.
        marks: unit numbers on the axes of its tensors.
        dead: (ids,) units that go in a narrowed graph that stands for all others.
    """
    sums = arithmetic(model, facts)

    def narrow(name: str) -> tuple[int, ...]:
        dims = list(facts.shapes[name])
        for mark in marks.get(name, ()):
            dims[mark.axes[0]] = int((~dead[mark.labels]).sum())
        return tuple(dims)

    measured = {key(node): measured_by(node) for node in sums.sources}
    if all(narrow(name) == facts.shapes[name] for name in measured.values()):
        return Sizes(sums.behind, measured, frozenset())
    try:
        full, slim = (_evaluated(model, facts, sums, shape) for shape in (facts.shapes.__getitem__, narrow))
    except Exception:  # noqa: BLE001  an op the reference evaluator does not know: nothing is known, so nothing follows
        return Sizes(sums.behind, measured, frozenset(measured))
    return Sizes(sums.behind, measured, _misled(model, facts, sums, narrow, full, slim))


def measured_by(node: ir.Node) -> str:
    """The tensor whose shape a Shape or Size node reports."""
    source = node.inputs[0]
    return (source.name or "") if source is not None else ""


def _misled(
    model: ir.Model, facts: Facts, sums: Arithmetic, narrow: Shapes, full: Values, slim: Values
) -> frozenset[str]:
    """Shape nodes behind any size that a reader would get wrong."""
    wrong: set[str] = set()
    readers = []
    inner = {key(node) for node in sums.nodes}
    for node in model.graph:
        if key(node) in inner or node.op_type in SOURCES:
            continue
        for position, value in enumerate(node.inputs):
            name = value.name or "" if value is not None else ""
            if name in sums.behind:
                readers.append(sums.behind[name])
                if not _follows(node, position, name, facts, narrow, full, slim):
                    wrong |= sums.behind[name]
    for output in model.graph.outputs:
        name = output.name or ""
        if name in sums.behind and not _same(full, slim, name):
            wrong |= sums.behind[name]
    return _spread(wrong, readers)


def _spread(wrong: set[str], readers: list[frozenset[str]]) -> frozenset[str]:
    """A reader of several sizes gets all of them in full or none."""
    while True:
        more = {s for sources in readers if sources & wrong for s in sources} - wrong
        if not more:
            return frozenset(wrong)
        wrong |= more


def _evaluated(model: ir.Model, facts: Facts, sums: Arithmetic, shape: Shapes) -> Values:
    """Every computed size, given the shapes of tensors."""
    feed = {key(node): _reported(node, shape(measured_by(node))) for node in sums.sources}
    nodes = [ir.to_proto(node) for node in sums.nodes]
    made = {v.name for node in sums.nodes for v in node.outputs}
    read = {v.name for node in sums.nodes for v in node.inputs if v is not None and v.name}
    for name in read - made - feed.keys():
        value = model.graph.initializers.get(name)
        stored = value.const_value if value is not None else None
        feed[name] = stored.numpy() if stored is not None else facts.values[name]
    if not nodes:
        return feed
    graph = onnx.helper.make_graph(
        nodes,
        "sizes",
        [onnx.ValueInfoProto(name=n) for n in feed],
        [onnx.ValueInfoProto(name=n) for n in made if n],
    )
    opsets = [onnx.helper.make_opsetid(d, v) for d, v in model.opset_imports.items()]
    found = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets)).run(None, feed)
    return feed | dict(zip([n for n in made if n], found, strict=True))


def _reported(node: ir.Node, shape: tuple[int, ...]) -> Array:
    """What a Shape or Size node says about a tensor of this shape."""
    if node.op_type == "Size":
        return np.array(int(np.prod(shape)), dtype=np.int64)
    start, end = slice_of(node, len(shape))
    return np.array(shape[start:end], dtype=np.int64)


def slice_of(node: ir.Node, rank: int) -> tuple[int, int]:
    """First and last axis that a Shape node reports."""
    bounds = [node.attributes.get(n) for n in ("start", "end")]
    start, end = (b.as_int() if b is not None else d for b, d in zip(bounds, (0, rank), strict=True))
    return slice(start, end).indices(rank)[:2]


def _same(full: Values, slim: Values, name: str) -> bool:
    return full[name].shape == slim[name].shape and bool((full[name] == slim[name]).all())


def _follows(node: ir.Node, position: int, name: str, facts: Facts, narrow: Shapes, full: Values, slim: Values) -> bool:
    """Whether a reader gets what it needs, or is corrected where the size changed."""
    if _same(full, slim, name):
        return True
    if full[name].shape != slim[name].shape:
        return False
    changed = np.flatnonzero(full[name].ravel() != slim[name].ravel()).tolist()
    output = key(node)
    if node.op_type in ("Reshape", "Expand") and position == 1:
        offset = len(facts.shapes[output]) - full[name].size
        varying = facts.varying.get(output, frozenset())
        return all(_corrected(output, p + offset, facts, narrow, varying, int(slim[name][p])) for p in changed)
    if node.op_type == "Slice" and position in (1, 2):
        return all(_sliced(node, p, facts, narrow) for p in changed)
    if node.op_type == "Resize" and position == 3:
        return changed == [1] and narrow(output)[1] != facts.shapes[output][1]
    return False


def _corrected(output: str, axis: int, facts: Facts, narrow: Shapes, varying: frozenset[int], found: int) -> bool:
    """The size of a narrowed axis is written anew unless it varies with the input: then it must come out right."""
    wanted = narrow(output)[axis]
    return found == wanted or (wanted != facts.shapes[output][axis] and axis not in varying)


def _sliced(node: ir.Node, position: int, facts: Facts, narrow: Shapes) -> bool:
    """Whether one of the sliced axes is narrowed, so that its bounds are counted anew."""
    source = node.inputs[0]
    assert source is not None
    name = source.name or ""
    axes = facts.values.get((node.inputs[3].name or "") if len(node.inputs) > 3 and node.inputs[3] is not None else "")
    axis = position if axes is None else int(axes.ravel()[position])
    return narrow(name)[axis] != facts.shapes[name][axis]
