"""Count parameters and multiply-accumulates of the dense model and of any plan, without running the model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Bools, Ints
from onnxgrail.graph.attributes import MICROSOFT, integer, name_of, names_of, text, written
from onnxgrail.graph.products import FUSED, letters_of
from onnxgrail.graph.rotate.marked import is_cached
from onnxgrail.graph.stored.find import scales_of
from onnxgrail.graph.stored.looked_up import EACH, lookups_of
from onnxgrail.graph.trace.facts import key
from onnxgrail.graph.trace.labels import narrowed_shape
from onnxgrail.graph.trace.mixture import INPUT, MIXTURES, mixture_of
from onnxgrail.graph.trace.survey import Holding, Survey

RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
TRANSPOSING = ("Gemm", *FUSED)
Shapes = Callable[[str], tuple[int, ...]]

PRODUCTS = RECURRENT | {
    "Conv", "ConvTranspose", "DeformConv", "MatMul", "Gemm", "Einsum", *FUSED, "MatMulNBits",
    "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearConv", "QLinearMatMul",
    *MIXTURES,
}  # fmt: skip
PROJECTING = frozenset({"Attention", "QAttention"})  # kernels of ONNX Runtime with the weights of queries, keys, values
BEHIND_SCALES = frozenset({"QLinearConv", "QLinearMatMul"})  # their weight is the fourth input
CONVOLUTIONS = frozenset({"Conv", "DeformConv", "ConvInteger", "QLinearConv"})
READERS = PRODUCTS | {"BatchNormalization"}


def parameters(model: ir.Model) -> int:
    """Count the elements of all floating-point or quantized weights.

    Integers that hold shapes do not count, nor do scales and zero points of quantized numbers.  Weights in bodies
    of If, Loop and Scan count.  A weight may also be the value of a `Constant` node; single numbers in such nodes
    belong to formulas and do not count.  Packed weights and weights that a `ConstantOfShape` fills count with the size
    that the reading node computes with.
    """
    return sum(_parameters(graph) for graph in model.graphs())


def _parameters(graph: ir.Graph) -> int:
    """Count the parameters of one graph, without the bodies of its nodes."""
    scales = scales_of(graph)
    stored = [v.const_value for v in graph.initializers.values() if v.const_value is not None and v not in scales]
    spelled = (written(node) for node in graph if scales.isdisjoint(node.outputs))
    weights = [*stored, *(tensor for tensor in spelled if tensor is not None and tensor.size > 1)]
    return sum(int(tensor.size) for tensor in weights if is_weight(tensor.dtype)) + _filled(graph) + _packed(graph)


def _filled(graph: ir.Graph) -> int:
    """Count the elements of weights that are stored as one number and a shape."""
    total = 0
    for node in graph:
        sizes = node.inputs[0].const_value if node.op_type == "ConstantOfShape" and node.inputs[0] is not None else None
        uses = node.outputs[0].uses() if sizes is not None else ()
        if sizes is not None and any(use.node.op_type in READERS and use.idx > 0 for use in uses):
            total += math.prod(sizes.numpy().tolist())
    return total


def _packed(graph: ir.Graph) -> int:
    """Count the elements of weights with several numbers per byte, minus the bytes."""
    more: dict[str, int] = {}
    for node in graph:
        form = mixture_of(node) if node.op_type == "QMoE" else None
        for matrix, bits in zip((form.up, form.down, form.gate), form.bits, strict=True) if form else ():
            weight = node.inputs[matrix.weight] if name_of(node, matrix.weight) else None
            held = weight.const_value if weight is not None else None
            more[name_of(node, matrix.weight)] = held.size * (8 // bits - 1) if held is not None and bits else 0
    for node in graph:
        weight = node.inputs[1] if node.op_type == "MatMulNBits" else None
        if weight is not None and weight.const_value is not None:
            more[weight.name or ""] = integer(node, "K") * integer(node, "N") - weight.const_value.size
        lookups = lookups_of(node)
        if lookups is not None and lookups.codes.const_value is not None:
            more[lookups.codes.name or ""] = lookups.codes.const_value.size * (EACH - 1)
    return sum(more.values())


def is_weight(dtype: ir.DataType) -> bool:
    """Return True if stored numbers of this dtype count as parameters."""
    return dtype not in (ir.DataType.INT64, ir.DataType.BOOL, ir.DataType.STRING)


def macs(model: ir.Model, survey: Survey, dead: Bools | None = None) -> int:
    """Count the multiply-accumulates of one run on the probe feed.

    Args:
        model: the graph.
        survey: its trace.
        dead: (ids,) mask of removed units; None for the dense model.
    """
    return sum(node_macs(node, survey, dead) for node in model.graph)


def effort(model: ir.Model, survey: Survey) -> list[int]:
    """Return the cost of running each node: its multiply-accumulates plus the number of its output elements."""
    costs = []
    for node in model.graph:
        names = [v.name for v in node.outputs if v.name and v.name in survey.facts.shapes]
        costs.append(node_macs(node, survey, None) + sum(math.prod(survey.facts.shapes[name]) for name in names))
    return costs


def shapes(survey: Survey, dead: Bools | None) -> Shapes:
    """Return a function from tensor name to shape, without the dead units."""

    def shape(name: str) -> tuple[int, ...]:
        full = survey.facts.shapes[name]
        return full if dead is None else narrowed_shape(full, survey.marks.get(name, ()), dead)

    return shape


def node_macs(node: ir.Node, survey: Survey, dead: Bools | None) -> int:
    """Count the multiply-accumulates of one node on the probe feed; 0 between a cache and heads: it is not written."""
    names = names_of(node.inputs)
    output = key(node)
    known = output in survey.facts.shapes and all(not n or n in survey.facts.shapes for n in names[:4])
    if not _multiplies(node) or not known or is_cached(node):
        return survey.repeated.get(output, 0)
    shape, held = shapes(survey, dead), partial(operand_shape, node, survey, dead)
    if node.op_type in MIXTURES:
        form = mixture_of(node)
        places = [m.weight for m in (form.up, form.down, form.gate) if name_of(node, m.weight) in survey.facts.shapes]
        tokens = math.prod(shape(names[INPUT])[:-1])  # each uses the experts chosen for it
        return tokens * form.top * sum(math.prod(held(k)[1:]) for k in places)
    if node.op_type == "Einsum":
        return _einsum(text(node, "equation"), [held(k) for k in range(len(node.inputs))])
    weight = held(3 if node.op_type in BEHIND_SCALES else 1)
    if node.op_type in RECURRENT:  # each step of each sample multiplies by both matrices once
        return math.prod(shape(names[0])[:2]) * (math.prod(weight) + math.prod(held(2)))
    if node.op_type in CONVOLUTIONS or node.op_type == "ConvTranspose":
        return math.prod(shape(output if node.op_type in CONVOLUTIONS else names[0])) * math.prod(weight[1:])
    inner = held(0)
    contracted = inner[-2 if node.op_type in TRANSPOSING and integer(node, "transA") else -1]
    made = math.prod(inner[:-1]) * weight[-1] if node.op_type in PROJECTING else math.prod(shape(output))
    return made * contracted


def _multiplies(node: ir.Node) -> bool:
    return node.op_type in PRODUCTS or (node.op_type in PROJECTING and node.domain == MICROSOFT)


def _einsum(equation: str, shapes: Sequence[tuple[int, ...]]) -> int:
    """Count a product over all letters; an operand alone is only moved or summed."""
    terms, _ = letters_of(equation, [len(shape) for shape in shapes])
    sizes: dict[str, int] = defaultdict(int)
    for term, shape in zip(terms, shapes, strict=True):
        for letter, size in zip(term, shape, strict=True):
            sizes[letter] = max(sizes[letter], size)
    return math.prod(sizes.values()) if len(shapes) > 1 else 0


def operand_shape(node: ir.Node, survey: Survey, dead: Bools | None, position: int) -> tuple[int, ...]:
    """Return the shape of an operand without the dead units."""
    operand, shape = survey.operands.get((key(node), position)), shapes(survey, dead)(name_of(node, position))
    return shape if operand is None or dead is None else operand.left(shape, dead)


def removed(survey: Survey, dead: Bools) -> tuple[int, int]:
    """Count the parameters and the bytes of weights that the file loses without the dead units."""
    return removed_of(survey.holdings, dead)


def removed_of(holdings: Iterable[Holding], dead: Bools) -> tuple[int, int]:
    """Count the parameters and bytes that these holdings lose without the dead units."""
    lost = [holding.removed(dead) for holding in holdings]
    return sum(numbers for numbers, _ in lost), sum(size for _, size in lost)


def block_shares(survey: Survey, model: ir.Model) -> list[tuple[int, int]]:
    """Return, per block, the parameters and MACs that would be removed with all of its units.

    Each block reads only the nodes and constants that it affects, so this is linear in the size of the graph.
    """
    owner = owners(survey)
    holdings: dict[int, list[Holding]] = defaultdict(list)
    for holding in survey.holdings:
        for number in owned(owner, units_in(holding)):
            holdings[number].append(holding)
    nodes: dict[int, list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        for number in owned(owner, units_of(node, survey)):
            nodes[number].append(node)
    found = []
    for number, block in enumerate(survey.blocks, start=1):
        dead = survey.dead([block.ids])
        full, left = (sum(node_macs(node, survey, d) for node in nodes[number]) for d in (None, dead))
        found.append((removed_of(holdings[number], dead)[0], full - left))
    return found


def owners(survey: Survey) -> Ints:
    """Return the number of the block that owns each unit, (ids,), counted from 1; 0 for no block."""
    owner = np.zeros(survey.ids, dtype=np.int64)
    for number, block in enumerate(survey.blocks, start=1):
        owner[block.ids] = number
    return owner


def owned(owner: Ints, units: Iterable[Ints]) -> set[int]:
    """Return the numbers of the blocks that own these units."""
    return {n for labels in units for n in np.unique(owner[labels]).tolist()} - {0}


def units_in(holding: Holding) -> list[Ints]:
    """Return the units on the axes of constants that are made of the same numbers."""
    return [units for form in holding.forms for units in form.operand.units.values()]


def units_of(node: ir.Node, survey: Survey) -> list[Ints]:
    """Return the units on the tensors and operands of a node that computes products."""
    return units_at(node, survey) if _multiplies(node) else []


def units_at(node: ir.Node, survey: Survey) -> list[Ints]:
    """Return the units on the tensors and operands of any node."""
    names = [v.name or "" for v in (*node.inputs, *node.outputs) if v is not None]
    found = [mark.labels for name in names for mark in survey.marks.get(name, ())]
    for position in range(len(node.inputs)):
        operand = survey.operands.get((key(node), position))
        found += [] if operand is None else list(operand.units.values())
    return found
