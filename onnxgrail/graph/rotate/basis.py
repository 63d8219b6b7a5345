"""Change the basis of residual streams without changing the function of the model (SliceGPT, Ashkboos et al. 2024).

The mean that a layer normalization subtracts is removed by what writes into the stream, and its gain and shift move
into the weights that read from it. What is left is a division by the root mean square, which is the same in any
orthogonal basis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Floats, Kind, Refusal
from onnxgrail.graph import slots
from onnxgrail.graph.attributes import given, name_of, number
from onnxgrail.graph.io.model_file import copy
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.products import is_fused, is_product
from onnxgrail.graph.rewrite.assign import set_operands, sweep
from onnxgrail.graph.rewrite.unique import free_name, names_kept
from onnxgrail.graph.rotate.bridges import as_in_file, bridge, follow, refusal, walls_of
from onnxgrail.graph.rotate.factors import bridged, convolutions, divided, tables_of
from onnxgrail.graph.rotate.heads import Inside, Part, products_of, rotate_heads, rows_of
from onnxgrail.graph.rotate.inside import insides_of
from onnxgrail.graph.rotate.layers import Slot, factor_of_bias
from onnxgrail.graph.rotate.marked import BRIDGE, LINEAR, MADE, MARK
from onnxgrail.graph.rotate.norms import norms_of
from onnxgrail.graph.rotate.restore import simplify
from onnxgrail.graph.rotate.scaled import fold_scales
from onnxgrail.graph.rotate.streams import Stream, linear_streams_of, streams_of
from onnxgrail.graph.rotate.unfused import move_axes, separate
from onnxgrail.graph.trace.facts import Facts, captures, constant_of, held

MEAN = 0.999  # cosine from which a vector of a basis is the one of the mean
STREAMS: tuple[Kind, ...] = ("stream", "embedding")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rotatable:
    """A copy of a model whose streams can change their basis.

    Attributes:
        model: the copy; fused sums are separated, and streams and tables have matrices of their own where they need
            them.
        facts: of the copy.
        streams: by name; tables and linear streams have no normalizations.
        heads: channels inside heads, and between the two parts of convolutions, by name.
        refusals: why the basis of other streams and heads stays.
    """

    model: ir.Model
    facts: Facts
    streams: Mapping[str, Stream]
    heads: Mapping[str, Inside] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all bases."""
        return (*self.streams, *self.heads)

    def readings(self, name: str) -> list[Floats]:
        """Return the (width, width) products W Wᵀ of the weights that read each measured tensor of a linear stream."""
        stream = self.streams[name]
        found = {value: np.zeros((stream.width, stream.width)) for value, _ in stream.measured}
        for slot in (slot for slot in stream.slots if slot.reads):
            array, value = held(slot.value, self.facts), given(slot.node, 0)
            rows = np.moveaxis(array, slot.axis, 0).reshape(stream.width, -1).astype(np.float64)
            found[value] += rows @ rows.T
        return list(found.values())

    def products(self, name: str) -> Floats:
        """Return the (groups, width, width) products of the weights that read the channels of heads."""
        heads = self.heads[name]
        return np.asarray(sum(products_of(part, self.facts) for part in heads.measured))

    def added(self, name: str) -> list[Floats | None]:
        """Return for queries and keys of heads the (groups, copies, width) biases that are added later, if any."""
        return [None if part is None else self._vectors(part) for part in self.heads[name].added]

    def _vectors(self, part: Part) -> Floats | None:
        """Return the (groups, copies, width) numbers of a bias; None if they differ from row to row."""
        numbers = rows_of(part, self.facts)
        return numbers.reshape(part.index.shape) if numbers.size == part.index.size else None


def rotatable(
    model: ir.Model,
    facts: Facts,
    kinds: Collection[Kind] = STREAMS,
    only: Collection[str] | None = None,
    *,
    interface: bool = False,
) -> Rotatable:
    """Find the streams of a model whose basis can be changed.

    Args:
        model: the graph; it is not changed.
        facts: shapes and values.
        kinds: with some of `stream`, `embedding` (for tables), `rank` (for convolutions), `qk` and `vo`; with `heads`
            if whole heads can go where only one of the last two has a free basis, which then stays.
        only: names of the bases that are wanted; None for all.
        interface: the caches of heads may be in their bases, too; until the model is narrowed, matrices stand between.
    """

    def wanted(kind: Kind, name: str) -> bool:
        return kind in kinds and (only is None or name in only)

    facts = as_in_file(model, facts)
    found = _found(model, facts, wanted, apart=True)
    if found.refusals:
        found = replace(_found(model, facts, wanted, apart=False), refusals=found.refusals)
    known, insides, refusals = insides_of(found.model, found.facts, kinds, only, interface=interface)
    heads = {inside.name: inside for inside in insides}
    return replace(found, facts=known, heads={**found.heads, **heads}, refusals=(*found.refusals, *refusals))


def _found(
    source: ir.Model,
    known: Facts,
    wanted: Callable[[Kind, str], bool],
    *,
    apart: bool,
    stuck: Mapping[str, Refusal] | None = None,
) -> Rotatable:
    """Find the streams, with fused sums separated or not: of a stream that keeps its basis, they stay fused.

    `stuck` are streams that cannot be changed, though nothing of what is found at first tells it.
    """
    model, facts, stuck = copy(source), known, stuck or {}
    chosen: dict[str, Stream] = {}
    pairs: dict[str, Inside] = {}
    with names_kept(model.graph):
        facts = move_axes(model, separate(model, facts) if apart else facts)
        for name, table in tables_of(model, facts).items():
            if wanted("embedding", name):
                facts, chosen[name] = bridged(model, facts, table)
        for conv in convolutions(model, facts):
            if wanted("rank", name_of(conv, 1)):
                facts, pairs[name_of(conv, 1)] = divided(model, facts, conv)
        every = streams_of(model, facts, norms_of(model, facts))
        folded = fold_scales(model.graph, every, facts) if apart else None
        if folded is not None:
            facts = folded
            every = streams_of(model, facts, norms_of(model, facts))
        whys = {stream.name: stuck.get(stream.name) or refusal(stream, facts) for stream in every}
        streams = [s for s in every if whys[s.name] is None and wanted("stream", s.name)]
        for _ in range(len(every) and len(norms_of(model, facts)) + 1):  # all rounds but the last find another one
            walls = [(wall, stream.name) for stream in streams for wall in walls_of(stream, facts)]
            if not walls:
                break
            for wall, name in walls:
                facts = bridge(model.graph, wall, facts, name, layers=False)
            streams = _again(streams, streams_of(model, facts, norms_of(model, facts)))
            late = {stream.name: why for stream in streams if (why := refusal(stream, facts)) is not None}
            if late:  # a normalization that joined meets a node that no matrix helps
                first = {stream.name: stream.norms[0].source.name or "" for stream in every}
                late = {name: replace(why, value=first[name]) for name, why in late.items()}
                return _found(source, known, wanted, apart=apart, stuck={**stuck, **late})
        facts, linear = _linear(model, facts, pairs.values(), partial(wanted, "stream"))
    streams += linear
    for slot in (slot for stream in streams for slot in stream.slots if not slot.reads):
        if slot.node.op_type in ("Expand", "Mul"):  # of no other tensor with these channels
            slot.node.metadata_props[MADE] = f"{slot.operand} {slot.axis}"
    chosen |= {stream.name: stream for stream in streams}
    refusals = tuple(why for why in whys.values() if why is not None)
    return Rotatable(model=model, facts=facts, streams=chosen, heads=pairs, refusals=refusals)


def _again(streams: Iterable[Stream], found: Iterable[Stream]) -> list[Stream]:
    """Return the streams that are found again, with their names: normalizations that follow a bridge may join them."""
    names = {result: stream.name for stream in streams for result in stream.normalized}
    known = [(stream, next((names[n] for n in stream.normalized if n in names), None)) for stream in found]
    return [replace(stream, name=name) for stream, name in known if name is not None]


def _linear(
    model: ir.Model, facts: Facts, pairs: Iterable[Inside], wanted: Callable[[str], bool]
) -> tuple[Facts, list[Stream]]:
    """Find the linear streams, with batch normalizations folded, and mark the layers that read them."""
    apart = {part.node for pair in pairs for part in pair.parts}
    apart |= {node for node in model.graph if BRIDGE in node.metadata_props}

    def every() -> list[Stream]:
        found = linear_streams_of(model, facts, norms_of(model, facts), apart)
        return [stream for stream in found if wanted(stream.name)]

    facts = fold_scales(model.graph, every(), facts, whole=True) or facts
    found = [stream for stream in every() if not walls_of(stream, facts)]
    for stream in found:
        for slot in (slot for slot in stream.slots if slot.reads):
            slot.node.metadata_props[LINEAR] = stream.name
    return facts, found


def rotate(found: Rotatable, bases: Mapping[str, Floats]) -> ir.Model:
    """Change the basis of all streams and heads, in place, and return the model.

    Args:
        found: the streams and heads.
        bases: stream name -> (width, width) orthogonal matrix; its columns are the new channels. For linear streams and
            channels between the parts of convolutions, a (width, width) invertible matrix; for those inside heads,
            (groups, width, width) such matrices, or (units,) an order of what is picked.
    """
    graph, facts = found.model.graph, found.facts
    sides_of = {name: _sides(stream, bases[name]) for name, stream in found.streams.items()}
    turned = [(slot, sides_of[name]) for name, stream in found.streams.items() for slot in stream.slots]
    with names_kept(graph):
        captured = {name for node in graph for name in captures(node)}
        for slot, sides in turned:
            if slot.norm is None:
                _turn(graph, slot, sides, facts, captured)
        for name, inside in found.heads.items():
            basis = bases[name]
            rotate_heads(graph, inside, basis[None] if inside.kind == "rank" else basis, facts, captured)
        for name, stream in found.streams.items():
            _simplify(graph, stream, bases[name], facts)
        for slot, sides in turned:
            if slot.norm is not None:  # last: shifts become biases, in the basis of what the layers write
                _turn(graph, slot, sides, facts, captured)
    return found.model


@dataclass(frozen=True, slots=True, eq=False)
class _Sides:
    """The (width, width) matrices for constants that write a stream and that read it, and if its mean is lost."""

    writes: Floats
    reads: Floats
    centered: bool


def _sides(stream: Stream, basis: Floats) -> _Sides:
    reads = np.asarray(np.linalg.inv(basis).T, basis.dtype) if stream.linear else basis
    return _Sides(basis, reads, stream.centered and not stream.carries_mean)


def _simplify(graph: ir.Graph, stream: Stream, basis: Floats, facts: Facts) -> None:
    """Replace the normalizations of a stream; they read a mean that it carries, one of its channels, as zero."""
    mean = np.abs(basis.sum(axis=0)) > MEAN * np.sqrt(len(basis))
    masked: dict[ir.Value, ir.Value] = {}
    for norm in stream.norms:
        source = norm.source
        if stream.carries_mean and source not in masked:
            name, dtype = source.name or "", facts.dtypes[source.name or ""]
            mask = constant(graph, (~mean).astype(dtype), f"{name}/centered/mask")
            node = ir.Node("", "Mul", [source, mask], num_outputs=1, name=free_name(graph, f"{name}/centered"))
            follow(graph, node, source, [])
            masked[source] = node.outputs[0]
        plain = replace(norm, gain=None, source=masked.get(source, source))  # layers take the gain
        types = facts.dtypes[source.name or ""], facts.dtypes[norm.result.name or ""]
        simplify(graph, plain, {MARK: stream.name}, types)


def _turn(graph: ir.Graph, slot: Slot, sides: _Sides, facts: Facts, captured: Collection[str]) -> None:
    """Change the basis of one constant."""
    array = held(slot.value, facts)
    values = array.astype(np.result_type(array, np.float32))
    if slot.norm is not None and slot.norm.shift is not None and slot.norm.shift.any():
        added = _along(values, slot.axis, slot.norm.shift[:, None])
        taps = added.reshape(len(added), -1).sum(axis=1) if slot.node.op_type == "Conv" else added.ravel()
        _shift(graph, slot, taps, facts, captured)
    if slot.norm is not None and slot.norm.gain is not None:
        values = values * _stretched(slot.norm.gain, values.ndim, slot.axis).astype(values.dtype)
    if sides.centered and not slot.reads:
        values = values - values.mean(axis=slot.axis, keepdims=True)
    values = _along(values, slot.axis, sides.reads if slot.reads else sides.writes)
    places = [(slot.node, slot.operand), *slot.also]
    sweep(graph, set_operands(graph, places, slots.clamped(values, array.dtype), captured))


def _stretched(vector: Floats, rank: int, axis: int) -> Floats:
    return vector.reshape([-1 if a == axis else 1 for a in range(rank)])


def _along(array: Floats, axis: int, matrix: Floats) -> Floats:
    """Return the array with its vectors along an axis multiplied by the columns of a matrix."""
    moved = np.moveaxis(array, axis, -1)
    return np.ascontiguousarray(np.moveaxis(moved @ matrix.astype(array.dtype), -1, axis))


def _shift(graph: ir.Graph, slot: Slot, vector: Floats, facts: Facts, captured: Collection[str]) -> None:
    """Add a vector to the bias of a layer, or add a bias."""
    node = slot.node
    vector = vector * number(node, "alpha", 1.0) if node.op_type == "Gemm" or is_fused(node) else vector
    place = (node, 2) if len(node.inputs) > 2 and node.inputs[2] is not None else _bias_of(node, facts, vector.size)
    value = None if place is None else place[0].inputs[place[1]]
    old = None if value is None else constant_of(value, value.name or "", facts)
    if place is None or place[0] is node:
        vector = vector / factor_of_bias(node)
    if place is not None and old is not None:
        sweep(graph, set_operands(graph, [place], (old + vector.reshape(old.shape)).astype(old.dtype), captured))
        return
    out = node.outputs[0]
    numbers = constant(graph, vector.astype(facts.dtypes[out.name or ""]), f"{out.name}/shift")
    if not is_product(node):
        node.resize_inputs(3)
        node.replace_input_with(2, numbers)
        return
    readers = [use.node for use in out.uses()]
    add = ir.Node("", "Add", [out, numbers], num_outputs=1, name=free_name(graph, f"{out.name}/shifted"))
    follow(graph, add, out, readers, output=True)


def _bias_of(node: ir.Node, facts: Facts, width: int) -> tuple[ir.Node, int] | None:
    """Return the operand with the bias that is added to a product, if the sum is its only reader."""
    readers = list(node.outputs[0].uses())
    if len(readers) != 1 or node.outputs[0].is_graph_output() or readers[0].node.op_type != "Add":
        return None
    operand = 1 - readers[0].idx
    value = readers[0].node.inputs[operand]
    name = (value.name or "") if value is not None else ""
    shape = facts.shapes.get(name, ())
    fits = name in facts.constants and name not in facts.stored and int(np.prod(shape)) == width == (shape or (0,))[-1]
    return (readers[0].node, operand) if fits else None
