"""Choose the weights that are stored in a few bits, with reasons for the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from onnxgrail.core import Array, Grid, Recipe, Refusal
from onnxgrail.errors import ModelError
from onnxgrail.graph.attributes import given, input_of, name_of, numbers_of
from onnxgrail.graph.bits.dequantize import CHANNELS, HALF, OPSET
from onnxgrail.graph.bits.matrices import (
    LEAST,
    least_padding,
    name_bytes,
    small_heads,
    stored_bytes,
    stored_table_bytes,
    unpackable,
)
from onnxgrail.graph.bits.slots import FLOATS, slots_of
from onnxgrail.graph.bits.unpacked import HARDLY, PAIRS_BYTES, UNEVEN, convolutions, node_bytes, saved, whole_blocks
from onnxgrail.graph.fittable.matrices import Matrix, Table, array_of, matrices, tables
from onnxgrail.graph.flatten.inner import weights_inside
from onnxgrail.graph.io.opset import opset_of
from onnxgrail.graph.rewrite.unique import origin
from onnxgrail.graph.rotate.marked import SECOND
from onnxgrail.graph.trace.facts import Facts, key
from onnxgrail.options import WEIGHTS

FLOAT = 32  # bits of a weight that keeps its numbers
TABLE = 8  # bits of tables: four would cost more than in matrices, since no sum averages their errors
NONE: Mapping[str, int] = MappingProxyType({})
NOWHERE: Mapping[str, str] = MappingProxyType({})
TYPES = (np.float32, np.float16)  # that the kernels compute in
INSIDE = "its layers lie inside the body of this {}, where weights keep their bits"
LAST = "a small last layer keeps more bits"
VECTOR = "its input has one axis"
CELLS = "recurrent layers keep more bits"
LAYERS = "fused layers keep more bits"
RECURRENT = ("LSTM", "GRU", "RNN")
KEPT_FUSED = ("Attention", "EmbedLayerNormalization")
SMALLER = "it would not get smaller"
SPARED = "it was chosen to keep all of its bits"


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a weight in a few bits.

    Attributes:
        grid: of its numbers.
        padded: the last block is stored in full.
        turned: its inputs are along the second axis, and the axes after it.
        more: bytes of names, and of nodes that convert it.
    """

    grid: Grid
    padded: bool
    turned: bool
    more: int = 0

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a weight of this shape."""
        inputs, outputs = (math.prod(shape[1:]), shape[0])[:: 1 if self.turned else -1]
        if self.padded:
            return stored_bytes(inputs, outputs, least_padding(inputs, outputs, self.grid)) + self.more
        return stored_table_bytes(outputs, inputs, self.grid) + self.more


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """The weights to store in a few bits.

    Attributes:
        matrices, tables: each with its form.
        left: nodes that stay in float.
        standard: True for the form of standard operators.
        unpacked: convolutions, and matrices that are spared, in 4 bits that a runtime converts.
        coded: convolutions in 8 bits, by their names before narrowing, with the reason why they have more than others.
    """

    matrices: tuple[tuple[Matrix, Grid], ...]
    tables: tuple[tuple[Table, Grid], ...]
    left: tuple[Refusal, ...]
    standard: bool = False
    unpacked: tuple[tuple[Matrix, Grid], ...] = ()
    coded: Mapping[str, str] = field(default_factory=dict)

    def forms(self) -> dict[str, Form]:
        """Return the form of each weight."""
        matrices = {m.weight: self._form(m.weight, grid, turned=m.turned) for m, grid in self.matrices}
        tables = {t.weight: self._form(t.weight, grid, turned=True, table=True) for t, grid in self.tables}
        return matrices | self.in_four() | tables

    def _form(self, weight: str, grid: Grid, *, turned: bool, table: bool = False) -> Form:
        padded = not self.standard and not table
        return Form(grid, padded=padded, turned=turned, more=name_bytes(weight))

    def in_four(self) -> dict[str, Form]:
        """Return the form of each weight in 4 bits that a runtime converts."""
        return {m.weight: Form(grid, padded=True, turned=True, more=node_bytes(m)) for m, grid in self.unpacked}


def check(model: ir.Model, recipe: Recipe) -> None:
    """Check that the model can hold the form of the weights.

    Raises:
        ModelError: `--qdq` needs a newer opset.
    """
    opset, four = opset_of(model), recipe.quantize == "int4"
    needed = OPSET if four else CHANNELS
    if recipe.qdq and recipe.quantize != "int8" and opset < needed:  # for int8, the model is converted
        hint = "--quantize int8-weights needs less" if four and opset >= CHANNELS else f"Convert it to opset {needed}"
        raise ModelError(
            f"--qdq needs opset {needed}{' for 4 bits' if four else ''}, the model has {opset}",
            hint=f"{hint}, or leave out --qdq: MatMulNBits needs no opset",
        )


def by_channel(model: ir.Model, recipe: Recipe) -> bool:
    """Return True if standard operators of the model's opset have no blocks, only a scale per output and 8 bits."""
    return recipe.qdq and opset_of(model) < OPSET


def with_initializers(model: ir.Model) -> ir.Model:
    """Return the model with its large constants as initializers, where plans look for weights; a copy if it has nodes.

    Weights of a branch that all data take are nodes of type Constant, as exporters write them.
    """
    if not any(node.op_type == "Constant" for node in model.graph):
        return model
    made = model.clone()
    LiftConstantsToInitializersPass()(made)
    return made


def beside(model: ir.Model, bits: Mapping[str, int]) -> dict[str, int]:
    """Return bits by weight in which a weight beside another, whose layer became two, has as many as that.

    It keeps its numbers where no channel between the two goes: the file then has one layer.
    """
    shapes = {origin(name): value.shape for name, value in model.graph.initializers.items() if value.shape is not None}
    pairs = [(name, name.removesuffix(SECOND), shape) for name, shape in shapes.items() if name.endswith(SECOND)]
    found = {name: bits[first] for name, first, shape in pairs if first in bits and shape[0] != shape[1]}
    return {**bits, **found}


def plan_of(
    model: ir.Model, facts: Facts, recipe: Recipe, bits: Mapping[str, int] = NONE, spared: Mapping[str, str] = NOWHERE
) -> Plan:
    """Choose the matrices and tables that get smaller.

    Args:
        model: the graph whose nodes will be changed, as `with_initializers` returns it.
        facts: its shapes.
        recipe: kind, form, block size and symmetry.
        bits: by weight, `FLOAT` for those that keep their numbers; a weight without bits has the fewest of these. If
            there are none, the kind of quantization says how many bits all have, but for small heads.
        spared: the reason why a weight is in no form that a kernel reads, by its name before narrowing.

    Raises:
        ModelError: a weight holds NaN or infinity.
    """
    known, looked_up = matrices(model), tables(model)
    bits = {name: few if few <= TABLE else FLOAT for name, few in bits.items()}  # 16 bits are no form of a matrix
    least = min(bits.values(), default=WEIGHTS.get(recipe.quantize, FLOAT))
    left = unpackable(model, known, facts.constants)
    for node in {node for table in looked_up for node in table.products}:
        left.pop(node, None)
    left |= {node: INSIDE.format(node.op_type) for node in model.graph if weights_inside(node)}
    chosen, rows, slower, vectors, channels = [], [], list[Matrix](), list[Matrix](), by_channel(model, recipe)
    windows = convolutions(model)
    heads = set() if bits else small_heads(known | {node: one for node, one, _ in windows if one is not None})
    windows = [(node, one, LAST) if one and one.weight in heads else (node, one, why) for node, one, why in windows]
    if channels and opset_of(model) < HALF:
        halves = [node for node, m in known.items() if array_of(m, model.graph).dtype == np.float16]
        left |= dict.fromkeys(halves, f"DequantizeLinear has half precision from opset {HALF} on")
    for matrix in dict.fromkeys(known.values()):
        array = array_of(matrix, model.graph)
        few = bits.get(origin(matrix.weight), TABLE if matrix.weight in heads else least)
        grid = None if channels else _grid(array, recipe, few, whole=recipe.qdq)
        if channels or (bits and grid is None):  # a size counts on every weight, whatever its width
            grid = _channels(array, recipe, few)
        why = next((left[node] for node in matrix.nodes if node in left), "") or _why(array, grid)
        vector = VECTOR if any(len(facts.shapes.get(name_of(node, 0), ())) == 1 for node in matrix.nodes) else ""
        slow = spared.get(origin(matrix.weight), vector)
        if slow and not why and few < TABLE and array.dtype == np.float32:
            slower.append(matrix)
        if vector and not why and few <= TABLE:
            vectors.append(matrix)
        why = why or slow
        if why or grid is None or stored_bytes(matrix.inputs, matrix.outputs, grid) >= _cap(matrix.weight, array, bits):
            left |= {node: left.get(node, why or SMALLER) for node in matrix.nodes}
            continue
        chosen.append((matrix, grid))
        _check_finite(array, matrix.weight)
    for table in looked_up:
        array = table.array(model.graph)
        few = bits.get(origin(table.weight), least if bits else TABLE)
        grid = _of_rows(array, few) if recipe.qdq else _of_blocks(table, array, recipe, few)
        why = _why(array.T, grid) or spared.get(origin(table.weight), "")
        if why or grid is None or stored_table_bytes(len(array), len(array.T), grid) >= _cap(table.weight, array, bits):
            left |= dict.fromkeys((*table.lookups, *table.products), why or SMALLER)
            continue
        rows.append((table, grid))
        _check_finite(array, table.weight)
    unpacked, coded = _unpacked(slower, windows if recipe.target != "tensorrt" else (), recipe, bits, left)
    if recipe.target != "tensorrt":
        coded |= _converted(model, recipe, bits)
    coded |= {origin(matrix.weight): VECTOR for matrix in vectors if matrix not in {one for one, _ in unpacked}}
    return Plan(
        matrices=tuple(chosen),
        tables=tuple(rows),
        left=_refusals(model, facts, left),
        standard=recipe.qdq,
        unpacked=tuple(unpacked),
        coded=coded,
    )


def _unpacked(
    slower: Sequence[Matrix],
    windows: Sequence[tuple[ir.Node, Matrix | None, str]],
    recipe: Recipe,
    bits: Mapping[str, int],
    left: dict[ir.Node, str],
) -> tuple[list[tuple[Matrix, Grid]], dict[str, str]]:
    """Return what a runtime converts from 4 bits, and the convolutions in 8 bits with the reason, see `Plan`."""
    grids = [(matrix, whole_blocks(matrix, recipe.block_size)) for matrix in slower]
    unpacked = [(matrix, grid) for matrix, grid in grids if grid is not None and saved(matrix, grid) > 0]
    coded = dict[str, str]()
    for node, matrix, why in windows:
        weight = given(node, 1)
        name = weight.name or ""
        few = bits.get(origin(name), FLOAT) if bits else WEIGHTS.get(recipe.quantize, FLOAT)
        if few > TABLE:
            continue
        grid = whole_blocks(matrix, recipe.block_size) if matrix is not None and not why and few < TABLE else None
        small = matrix is not None and grid is not None and saved(matrix, grid) <= 0
        coded[origin(name)] = "" if few == TABLE else why or (HARDLY if small else UNEVEN)
        left[node] = SMALLER
        if matrix is not None and grid is not None and not small:
            unpacked.append((matrix, grid))
        _check_finite(numbers_of(weight), name)
    if sum(saved(*one) for one in unpacked) <= PAIRS_BYTES:
        return [], coded | {origin(matrix.weight): HARDLY for matrix, _ in unpacked if matrix not in slower}
    for matrix, _ in unpacked:
        coded.pop(origin(matrix.weight), None)
        for node in matrix.nodes:
            del left[node]
    return unpacked, coded


def _converted(model: ir.Model, recipe: Recipe, bits: Mapping[str, int]) -> dict[str, str]:
    """Return the weights of recurrent and fused layers in 8 bits with the reason, see `Plan.coded`."""
    found = {}
    for node in model.graph:
        fused = node.op_type in KEPT_FUSED
        for slot in slots_of(node) if fused or (node.op_type in RECURRENT and not node.domain) else ():
            value = input_of(node, slot)
            if value is None or not value.is_initializer() or value.dtype not in FLOATS:
                continue
            name = origin(value.name or "")
            few = bits.get(name, FLOAT) if bits else WEIGHTS.get(recipe.quantize, FLOAT)
            if few <= TABLE:
                found[name] = "" if few == TABLE else LAYERS if fused else CELLS
    return found


def _grid(array: Array, recipe: Recipe, bits: int, *, whole: bool) -> Grid | None:
    """Return the form of a matrix (inputs, outputs); None if only `whole` blocks are allowed and none divide it."""
    symmetric = recipe.symmetric or recipe.target == "tensorrt"
    grid = Grid(bits=bits, size=recipe.block_size, symmetric=symmetric, dtype=array.dtype)
    while whole and len(array) % grid.size:
        if grid.size == LEAST:
            return None
        grid = replace(grid, size=grid.size // 2)
    inputs, outputs = array.shape
    return grid if whole else least_padding(inputs, outputs, grid)


def _channels(array: Array, recipe: Recipe, bits: int) -> Grid:
    """Return the form of a matrix (inputs, outputs) with a scale per output, and 8 bits or all."""
    symmetric = recipe.symmetric or recipe.target == "tensorrt"
    return Grid(bits=max(bits, TABLE), size=len(array), symmetric=symmetric, dtype=array.dtype)


def _of_rows(table: Array, bits: int) -> Grid:
    """Return the form of a table in standard operators: one scale per row, and 8 bits or all."""
    return Grid(bits=max(bits, TABLE), size=table.shape[1], symmetric=True, dtype=table.dtype)


def _of_blocks(table: Table, array: Array, recipe: Recipe, bits: int) -> Grid | None:
    """Return the form of a table in blocks; products need whole blocks, and two columns of 4 bits are a byte."""
    few = TABLE if array.shape[1] % 2 else bits
    return _grid(array.T, recipe, max(few, bits), whole=bool(table.products))


def _why(array: Array, grid: Grid | None) -> str:
    if array.dtype not in TYPES:
        return f"no kernel computes in {array.dtype}"
    if grid is not None and grid.bits == FLOAT:
        return SPARED
    return f"its {len(array)} inputs do not divide into blocks of {LEAST}" if grid is None else ""


def _cap(weight: str, array: Array, bits: Mapping[str, int]) -> int:
    """Return the bytes that a weight has to fall below; where the size of the file decides, its names count."""
    return array.nbytes - (name_bytes(weight) if bits else 0)


def _check_finite(array: Array, name: str) -> None:
    if not np.isfinite(array).all():
        raise ModelError(f"the weight {name} holds NaN or infinity", hint="Repair the model")


def _refusals(model: ir.Model, facts: Facts, left: Mapping[ir.Node, str]) -> tuple[Refusal, ...]:
    """Return the nodes that stay in float, in node order."""
    return tuple(
        Refusal(value=_weight(node, facts), node=node.name or key(node), op=node.op_type, reason=left[node], position=k)
        for k, node in enumerate(model.graph)
        if node in left
    )


def _weight(node: ir.Node, facts: Facts) -> str:
    """Return the name of a node's constant with the most axes."""
    found = [v.name or "" for v in node.inputs if v is not None and v.name in facts.constants]
    inside = min(weights_inside(node), default="")
    return inside or max(found, key=lambda name: len(facts.shapes.get(name, ())), default="")
