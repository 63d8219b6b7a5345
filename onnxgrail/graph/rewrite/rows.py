"""Take rows out of embedding tables: the graph maps ids of tokens to the rows that stay, and values of a head back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Ints, Refusal
from onnxgrail.graph.attributes import given, integer, name_of
from onnxgrail.graph.fittable.matrices import Table, tables, uses
from onnxgrail.graph.io.mapped import like
from onnxgrail.graph.io.model_file import weight_bytes
from onnxgrail.graph.io.opset import opset_of
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.unique import free_name
from onnxgrail.graph.rotate.bridges import follow
from onnxgrail.graph.trace.facts import key

MOVING = frozenset(
    {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)  # ops that leave every id as it is
LOOKUPS = {"Gather": (0, 1), "GatherBlockQuantized": (0, 1), "EmbedLayerNormalization": (2, 0)}  # table and ids
TOKENS = "onnxgrail.tokens"  # key in a model's `meta`: by input, the ids that it may hold
AXES = 18  # first opset whose ReduceMin takes its axes as an input


@dataclass(frozen=True, kw_only=True, slots=True)
class Trimmed:
    """A table that has lost rows.

    Attributes:
        table: name of the weight.
        rows_before, rows_after: its rows.
        bytes_saved: of weights, less those of new maps from ids to rows.
        others: the id that is looked up instead of ids that are not kept.
        heads: the values of tied heads for the ids that are kept.
    """

    table: str
    rows_before: int
    rows_after: int
    bytes_saved: int
    others: int
    heads: tuple[str, ...]

    def __str__(self) -> str:
        """Return a note on the table."""
        rows = f"{self.table}: {self.rows_after:,} of {self.rows_before:,} rows stay"
        if self.bytes_saved < 0:
            size = f"{-self.bytes_saved:,} bytes more, since the map from ids to rows takes more than the others did"
        else:
            size = f"{self.bytes_saved:,} bytes less"
        told = f"{rows}, {size}; ids that --keep-tokens leaves out are looked up as {self.others}"
        return f"{told}, and the head gives them its lowest value" if self.heads else told


def trim(
    model: ir.Model, ids: Sequence[int], inputs: Collection[str], *, tied: bool
) -> tuple[list[Trimmed], list[Refusal]]:
    """Keep only some rows of every table that tokens are looked up in; inputs and outputs stay as they are.

    Ids that are not kept are looked up as the first one that is, and a tied head gives them the lowest value of those
    that are.

    Args:
        model: changed in place.
        ids: the rows to keep.
        inputs: names of the graph inputs that hold ids of tokens.
        tied: also cut tables that are the head of the model.

    Returns:
        The tables, and why others that tokens are looked up in keep all rows.
    """
    known = {table.weight: table for table in tables(model)}
    done, refused, cutter = [], [], _Cutter(model, ids)
    fed: set[str] = set()
    for weight, node in dict(_looked_up(model.graph, inputs)).items():
        name = weight.name or ""
        reason = _reason(weight, known.get(name), cutter.rows, inputs, tied=tied)
        if reason:
            refused.append(Refusal(value=name, node=node.name or key(node), op=node.op_type, reason=reason))
            continue
        fed.update(_source(node.inputs[1], inputs) for node in known[name].lookups)
        done.append(cutter.cut(known[name]))
    model.meta[TOKENS] = dict.fromkeys(fed, tuple(cutter.rows.tolist()))
    return done, refused


def _looked_up(graph: ir.Graph, inputs: Collection[str]) -> Iterator[tuple[ir.Value, ir.Node]]:
    """Yield the weights in which ids of the inputs are looked up, with the node that does."""
    for node in graph:
        table, ids = LOOKUPS.get(node.op_type, (0, 0))
        if table == ids or len(node.inputs) <= max(table, ids) or integer(node, "axis"):
            continue
        value = node.inputs[table]
        while value is not None and (maker := value.producer()) is not None:
            value = next(iter(maker.inputs), None)
        if value is not None and value.const_value is not None and _source(node.inputs[ids], inputs):
            yield value, node


def _source(ids: ir.Value | None, inputs: Collection[str]) -> str:
    """Return the input whose ids a value holds unchanged; empty if there is none."""
    while ids is not None and (maker := ids.producer()) is not None:
        exact = integer(maker, "to", ir.DataType.INT64) in (ir.DataType.INT32, ir.DataType.INT64)  # of a Cast
        ids = maker.inputs[0] if maker.op_type in MOVING and exact else None
    return ids.name or "" if ids is not None and ids.name in inputs else ""


def _reason(weight: ir.Value, table: Table | None, rows: Ints, inputs: Collection[str], *, tied: bool) -> str:
    """Return why a table keeps all rows; empty if it need not."""
    assert weight.const_value is not None
    size = weight.const_value.shape.numpy()[0]
    if table is None:
        others = [other.op_type for other, _, _ in uses(weight, turned=False) if other.op_type != "Gather"]
        return f"{others[0]} reads it" if others else "it is no matrix of floats that only nodes of the main graph read"
    if table.products and not tied:
        return "it is the head of the model, too, and --max-loss does not judge values that go: give --ratio 0 first"
    if any(len(head.inputs) > 2 for head in table.products):
        return "it is the head of the model, too, with a bias in the same node"
    if not all(_source(other.inputs[1], inputs) for other in table.lookups):
        return "ids that are no input's are looked up in it too"
    if rows[-1] >= size:
        return f"it has {size} rows, and id {rows[-1]} is kept"
    return "all of its rows are kept" if len(rows) == size else ""


class _Cutter:
    """Takes rows out of the tables of a graph; lookups of the same ids share their row numbers.

    Attributes:
        rows: the kept ids, ascending.
    """

    def __init__(self, model: ir.Model, ids: Sequence[int]) -> None:
        self._model, self._graph, self._first, self.rows = model, model.graph, ids[0], np.unique(ids)
        self._maps: dict[tuple[int, int], ir.Value] = {}
        self._found: dict[tuple[ir.Value, int], ir.Value] = {}

    def cut(self, table: Table) -> Trimmed:
        """Cut a table, and map the ids of its lookups to rows, and the values of its heads to ids."""
        before, array = weight_bytes(self._model), table.array(self._graph)
        weight, size = self._graph.initializers[table.weight], len(array)
        old = weight.const_value
        assert old is not None
        fresh = ir.tensor(array[self.rows], dtype=old.dtype, name=table.weight)
        weight.const_value, weight.shape = like(old, fresh), ir.Shape(fresh.shape.numpy())
        _forget_copies(weight)
        for node in table.lookups:
            node.replace_input_with(1, self._row_numbers(node, size))
        heads = tuple(self._spread(head, size) for head in table.products)
        saved = before - weight_bytes(self._model)
        rows = {"rows_before": size, "rows_after": len(self.rows), "bytes_saved": saved}
        return Trimmed(table=table.weight, **rows, others=self._first, heads=heads)

    def _row_numbers(self, node: ir.Node, size: int) -> ir.Value:
        """Return the row numbers of the ids that a node looks up."""
        ids = given(node, 1)
        if (ids, size) not in self._found:
            rows = self._map(size, int(np.searchsorted(self.rows, self._first)), f"{name_of(node, 0)}/row_of_id")
            made = self._node("Gather", [rows, ids], f"{key(node)}/row", node, axis=0)
            follow(self._graph, made, ids, [])
            made.outputs[0].type = ir.TensorType(ir.DataType.INT32)
            self._found[ids, size] = made.outputs[0]
        return self._found[ids, size]

    def _spread(self, head: ir.Node, size: int) -> str:
        """Give the ids that go the lowest of the values that stay; return the name of these."""
        value, name, count = head.outputs[0], key(head), len(self.rows)
        readers = [use.node for use in value.uses()]
        axes = [constant(self._graph, np.array([-1]), f"{name}/last")] if opset_of(self._model) >= AXES else []
        last = {} if axes else {"axes": [-1]}
        lowest = self._node("ReduceMin", [value, *axes], f"{name}/lowest", head, keepdims=1, **last)
        joined = self._node("Concat", [value, *lowest.outputs], f"{name}/with_lowest", head, axis=-1)
        rows = self._map(size, count, f"{name}/value_of_id")
        whole = self._node("Gather", [*joined.outputs, rows], f"{name}/all", head, axis=-1)
        follow(self._graph, whole, value, readers, output=True)
        self._graph.insert_before(whole, [lowest, joined])
        value.shape = None if value.shape is None else ir.Shape([*value.shape.dims[:-1], count])
        return value.name or ""

    def _map(self, size: int, other: int, name: str) -> ir.Value:
        """Return a vector with the row of every id, and another number for ids that are not kept."""
        if (size, other) not in self._maps:
            numbers = np.full(size, other, np.int32)
            numbers[self.rows] = np.arange(len(self.rows))
            self._maps[size, other] = constant(self._graph, numbers, name)
        return self._maps[size, other]

    def _node(
        self, op: str, inputs: Sequence[ir.Value], name: str, beside: ir.Node, **numbers: int | list[int]
    ) -> ir.Node:
        """Return a new node in the module of another one, with a name for its output."""
        made = ir.node(op, inputs, numbers, name=free_name(self._graph, name))
        made.outputs[0].name = made.name
        made.metadata_props.update(beside.metadata_props)
        return made


def _forget_copies(weight: ir.Value) -> None:
    """Remove the stated shapes of copies of a weight."""
    for use in weight.uses():
        if use.node.op_type == "Transpose":
            use.node.outputs[0].shape = None
            _forget_copies(use.node.outputs[0])
