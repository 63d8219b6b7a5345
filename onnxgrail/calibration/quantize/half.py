"""Half precision by the tool of ONNX Runtime; nodes that crash ONNX Runtime stay in float32."""

from __future__ import annotations

import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxgrail.calibration.runtime.trial import Trial

ADDED = re.compile(r"_cast_to_fp(16|32)_node$|^graph_(in|out)put_cast_?\d+$")  # names of casts that the tool adds
TRIALS, SECONDS = 64, 60.0  # limits of the search for the nodes to blame
Works = Callable[[Sequence[str]], bool]


def convert(source: Path, target: Path, blocked: Sequence[str] = ()) -> None:
    """Write a float32 model in half precision but for the nodes in `blocked`; inputs and outputs keep their types."""
    from onnxruntime.transformers import float16

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings on small weights that become zero: the later comparison judges them
        plain = named(source)
        outputs = _apart(plain.graph)
        made = float16.convert_float_to_float16(plain, keep_io_types=True, node_block_list=list(blocked))
    _once(made.graph)
    _straight(made.graph)
    converted = {output.name: output for output in made.graph.output if not output.type.HasField("tensor_type")}
    outputs = [converted.get(output.name, output) for output in outputs]  # elements of sequences have no cast
    del made.graph.output[:]
    made.graph.output.extend(outputs)
    onnx.save(made, target)


def named(source: Path) -> onnx.ModelProto:
    """Return a model whose nodes have names, without recorded shapes, which would contradict the new types.

    The tool takes weights of two branches for one if they have the same name: here their names differ.
    """
    proto = _distinct(onnx.load(source))
    del proto.graph.value_info[:]
    taken = {node.name for node in proto.graph.node}
    for number, node in enumerate(proto.graph.node):
        if not node.name and (name := f"{node.op_type}_{number}") not in taken:
            node.name = name
    return proto


def _distinct(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with another name for each weight of a body that has the name of an earlier weight."""
    model = ir.from_proto(proto)
    found = Counter(weight.name for graph in model.graphs() for weight in graph.initializers.values())
    if max(found.values(), default=1) == 1:
        return proto
    values = {value.name for node in model.graph.all_nodes() for value in (*node.inputs, *node.outputs) if value}
    for graph in model.graph.subgraphs():
        for weight in list(graph.initializers.values()):
            name = next(n for k in count() if (n := f"{weight.name}_{k}") not in values)
            values.add(name)
            weight.name = name
    return ir.to_proto(model)


def _apart(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Keep each output that a node makes only once, since the tool adds a cast per output; return all outputs."""
    outputs = [onnx.ValueInfoProto.FromString(output.SerializeToString()) for output in graph.output]
    made = {name for node in graph.node for name in node.output}
    del graph.output[:]
    graph.output.extend({output.name: output for output in outputs if output.name in made}.values())
    return outputs


def _once(graph: onnx.GraphProto) -> None:
    """Remove repeated casts: the tool adds one per node that reads a tensor, all with the same output."""
    made: set[str] = set()
    kept = []
    for node in graph.node:
        if node.op_type != "Cast" or node.output[0] not in made:
            kept.append(node)
        made.update(node.output)
    if len(kept) < len(graph.node):
        del graph.node[:]
        graph.node.extend(kept)


def _straight(graph: onnx.GraphProto) -> None:
    """Let nodes in float32 read what others write in float32: the tool puts half precision between any two of them."""
    there, back = (
        {node.output[0]: node.input[0] for node in graph.node if _casts(node, kind)}
        for kind in (onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT)
    )
    inside = {name for node in graph.node for a in node.attribute for g in (a.g, *a.graphs) for name in _read(g)}
    outputs = {output.name for output in graph.output}
    wide = {name: there[half] for name, half in back.items() if half in there and name not in inside | outputs}
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = wide.get(name, name)
    read = {name for node in graph.node if node.output[0] not in wide for name in node.input} | inside | outputs
    gone = {*wide, *(name for name in there if name not in read)}
    kept = [node for node in graph.node if not (node.op_type == "Cast" and node.output[0] in gone)]
    if len(kept) < len(graph.node):
        del graph.node[:]
        graph.node.extend(kept)


def _casts(node: onnx.NodeProto, kind: int) -> bool:
    """Return True for a cast to this type that the tool has added."""
    return (
        node.op_type == "Cast"
        and bool(ADDED.search(node.name))
        and any(a.name == "to" and a.i == kind for a in node.attribute)
    )


def _read(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names that a graph and those inside it read."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _read(inner)
    yield from (output.name for output in graph.output)


def culprits(source: Path, make: Callable[[Sequence[str]], Trial]) -> tuple[str, ...]:
    """Return names of a few nodes that must stay in float32 so that ONNX Runtime runs the model; empty if none help.

    Args:
        source: the model in float32.
        make: converts the model with the named nodes in float32, and tries the result.
    """
    nodes = [node for node in named(source).graph.node if node.name and node.op_type != "Constant"]
    end = time.monotonic() + SECONDS
    cache: dict[frozenset[str], bool] = {}

    def works(names: Sequence[str]) -> bool:
        key = frozenset(names)
        if key not in cache and (len(cache) >= TRIALS or time.monotonic() > end):
            return False
        if key not in cache:
            cache[key] = not make(names).problem
        return cache[key]

    every = [node.name for node in nodes]
    if not works(every):
        return ()
    kinds = {node.op_type: [n.name for n in nodes if n.op_type == node.op_type] for node in nodes}
    small = sorted(kinds.values(), key=len)
    return tuple(fewest(next((names for names in small if works(names)), every), works))


def fewest(names: Sequence[str], works: Works) -> list[str]:
    """Return a small subset of the names for which `works` still holds.

    References:
        Zeller and Hildebrandt 2002, "Simplifying and isolating failure-inducing input" (ddmin).
    """
    left, parts = list(names), 2
    while len(left) > 1:
        size = -(-len(left) // parts)
        pieces = [left[start : start + size] for start in range(0, len(left), size)]
        rests = [[name for name in left if name not in piece] for piece in pieces] if len(pieces) > 2 else []
        smaller = next((some for some in [*pieces, *rests] if works(some)), None)
        if smaller is None and size == 1:
            break
        parts = 2 * parts if smaller is None else 2 if smaller in pieces else max(len(pieces) - 1, 2)
        left = left if smaller is None else smaller
    return left
