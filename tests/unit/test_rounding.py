"""Rounding to a few bits: scales by search, errors carried on, and the packed form that ONNX Runtime reads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.algebra.rounding.carried import carried, carried_to, factor, squared_error
from onnxgrail.algebra.rounding.grid import nearest
from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.core import Array, Floats, Grid
from onnxgrail.graph.attributes import MICROSOFT
from onnxgrail.graph.bits.dequantize import dequantize_matrix, dequantize_table
from onnxgrail.graph.bits.matrices import pack, pack_table, stored_bytes, stored_table_bytes
from onnxgrail.graph.fittable.matrices import matrices, tables
from onnxgrail.graph.io.serial import pack as serialised
from onnxgrail.graph.stored.integers import Levels
from tests.tiny import tiny

SIZES = (16, 32, 64, 128, 256)


def correlated(inputs: int, rows: int = 600) -> Floats:
    rng = np.random.default_rng(0)
    mixed = rng.normal(size=(rows, inputs // 3)) @ rng.normal(size=(inputs // 3, inputs))
    return np.asarray(mixed + 0.3 * rng.normal(size=(rows, inputs)))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_carried_errors_change_the_outputs_less(bits: int, symmetric: bool) -> None:
    weights = np.random.default_rng(1).normal(size=(90, 24))
    rows = correlated(90)
    gram = rows.T @ rows
    grid = Grid(bits=bits, size=32, symmetric=symmetric)
    plain, found = (weights - one.values() for one in (nearest(weights, grid), carried(weights, factor(gram), grid)))
    assert squared_error(found, gram) < 0.4 * squared_error(plain, gram)


def test_errors_are_carried_to_given_scales() -> None:
    weights = np.random.default_rng(1).normal(size=(150, 24))
    gram = (rows := correlated(150)).T @ rows
    scale, whole = np.full(weights.shape, 0.3), np.zeros(weights.shape)
    levels = Levels(scale, whole + 8, whole, whole + 15)
    found = carried_to(weights, gram, levels.nearest)
    np.testing.assert_allclose(levels.nearest(found), found)
    assert squared_error(weights - found, gram) < 0.4 * squared_error(weights - levels.nearest(weights), gram)
    np.testing.assert_allclose(carried_to(found, gram, levels.nearest), found, atol=1e-12)
    np.testing.assert_allclose(carried_to(weights, 0 * gram, levels.nearest), levels.nearest(weights))


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_search_is_better_than_the_range(symmetric: bool) -> None:
    """A range from the lowest to the highest number wastes codes on outliers."""
    weights = np.random.default_rng(2).normal(size=(32, 200))
    grid = Grid(bits=4, size=32, symmetric=symmetric)
    found = np.square(weights - nearest(weights, grid).values()).sum()
    if symmetric:
        scale = np.abs(weights).max(axis=0) / 8
        codes = np.clip(np.rint(weights / scale), -8, 7)
    else:
        low, high = np.minimum(weights.min(axis=0), 0), np.maximum(weights.max(axis=0), 0)
        scale = (high - low) / 15
        zero = np.rint(-low / scale)
        codes = np.clip(np.rint(weights / scale + zero), 0, 15) - zero
    assert found < 0.9 * np.square(weights - codes * scale).sum()


def test_numbers_on_the_grid_stay() -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (64, 5))
    codes[[0, 1, 32, 33]] = np.array([0, 15, 0, 15])[:, None]
    weights = (codes - 8) * 0.25
    for grid in (Grid(bits=4, size=32), Grid(bits=4, size=32, symmetric=True)):
        np.testing.assert_allclose(nearest(weights, grid).values(), weights, atol=1e-6)


@pytest.mark.parametrize("weights", [np.zeros((40, 3)), np.full((40, 3), 1e-30), np.full((40, 3), 0.7)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_blocks_of_one_number(weights: Floats, symmetric: bool) -> None:
    grid = Grid(bits=4, size=32, symmetric=symmetric)
    for found in (nearest(weights, grid), carried(weights, factor(np.eye(40)), grid)):
        np.testing.assert_allclose(found.values(), weights, rtol=1e-5, atol=1e-35)


def test_silent_inputs_and_no_rows() -> None:
    weights = np.random.default_rng(4).normal(size=(40, 6))
    rows = correlated(40)
    rows[:, 7] = 0.0
    for gram in (rows.T @ rows, np.zeros((40, 40))):
        found = carried(weights, factor(gram), Grid(bits=8, size=16))
        np.testing.assert_allclose(found.values(), weights, atol=0.2)


def run(model: ir.Model, feed: dict[str, Array]) -> Array:
    with open_session(serialised(model), Setup()) as session:
        return np.asarray(session.run(feed)["y"])


@pytest.mark.parametrize("symmetric", [False, True], ids=["zero-points", "symmetric"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("body", ["y = MatMul(x, w)", "y = Gemm<transB = 1, alpha = 0.5>(x, wt, b)"])
def test_the_kernel_reads_the_packed_numbers(body: str, bits: int, size: int, symmetric: bool) -> None:
    inputs, outputs = 2 * size + 9, 11  # the last block is padded, the packed zero points end within a byte
    weights = np.random.default_rng(5).normal(size=(inputs, outputs)).astype(np.float32)
    bias = np.arange(outputs, dtype=np.float32)
    constants = {"wt": np.ascontiguousarray(weights.T), "b": bias} if "Gemm" in body else {"w": weights}
    model = tiny(f"float[N,{inputs}] x => float[N,{outputs}] y", body, constants)
    (matrix,) = set(matrices(model).values())
    found = nearest(weights.astype(np.float64), Grid(bits=bits, size=size, symmetric=symmetric))
    x = np.random.default_rng(6).normal(size=(3, inputs)).astype(np.float32)
    wanted = x.astype(np.float64) @ found.values()
    wanted = 0.5 * wanted + bias if "Gemm" in body else wanted
    pack(model.graph, matrix, found, 0)
    model.opset_imports[MICROSOFT] = 1
    np.testing.assert_allclose(run(model, {"x": x}), wanted, rtol=1e-4, atol=1e-4)
    stored = [v.const_value for n, v in model.graph.initializers.items() if n != "b" and v.const_value is not None]
    assert sum(tensor.nbytes for tensor in stored) == stored_bytes(matrix.inputs, matrix.outputs, found.grid)


def tied(columns: int, rows: int = 21) -> tuple[ir.Model, Array]:
    """A table that is looked up twice, and whose transpose is the head."""
    table = np.random.default_rng(7).normal(size=(rows, columns)).astype(np.float32)
    body = """
        e = Gather(t, i)
        f = Gather(t, j)
        h = Add(e, f)
        u = Transpose<perm = [1, 0]>(t)
        y = MatMul(h, u)
    """
    return tiny(f"int64[N] i, int64[N] j => float[N,{rows}] y", body, {"t": table}, opset=21), table


@pytest.mark.parametrize(
    ("write", "bits", "size", "symmetric"),
    [
        (pack_table, 8, 32, False),
        (pack_table, 8, 16, True),
        (pack_table, 4, 32, False),
        (pack_table, 4, 64, False),
        (pack_table, 4, 16, True),
        (dequantize_table, 8, 64, True),
    ],
)
def test_a_tied_table_is_stored_once(write: Callable[..., None], bits: int, size: int, symmetric: bool) -> None:
    model, array = tied(64)
    (table,) = tables(model)
    grid = Grid(bits=bits, size=size, symmetric=symmetric)
    found = nearest(array.T.astype(np.float64), grid)
    write(model.graph, table, found, *([0] if write is pack_table else []))
    model.opset_imports[MICROSOFT] = 1
    feed = {"i": np.array([3, 0, 20]), "j": np.array([-1, 5, 5])}
    values = found.values().T
    wanted = (values[feed["i"]] + values[feed["j"]]) @ values.T
    np.testing.assert_allclose(run(model, feed), wanted, rtol=1e-4, atol=1e-3)
    weights = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
    assert sum(w.nbytes for w in weights if w.dtype != ir.DataType.INT64) == stored_table_bytes(*array.shape, grid)


@pytest.mark.parametrize("symmetric", [False, True], ids=["zero-points", "symmetric"])
@pytest.mark.parametrize(("bits", "columns"), [(4, 40), (4, 72), (4, 88), (8, 33), (8, 40)])
def test_the_last_block_of_a_table_may_be_shorter(bits: int, columns: int, symmetric: bool) -> None:
    array = np.random.default_rng(7).normal(size=(21, columns)).astype(np.float32)
    model = tiny(f"int64[N] i => float[N,{columns}] y", "y = Gather(t, i)", {"t": array})
    (table,) = tables(model)
    grid = Grid(bits=bits, size=32, symmetric=symmetric)
    found = nearest(array.T.astype(np.float64), grid)
    pack_table(model.graph, table, found, 0)
    model.opset_imports[MICROSOFT] = 1
    feed = {"i": np.array([3, 0, 20, -1])}
    np.testing.assert_allclose(run(model, feed), found.values().T[feed["i"]], rtol=1e-6)
    stored = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
    assert sum(tensor.nbytes for tensor in stored) == stored_table_bytes(21, columns, grid)


@pytest.mark.parametrize("symmetric", [False, True], ids=["zero-points", "symmetric"])
@pytest.mark.parametrize(("bits", "size"), [(4, 16), (4, 128), (8, 32)])
@pytest.mark.parametrize("body", ["y = MatMul(x, w)", "y = Gemm<transB = 1, alpha = 0.5>(x, wt, b)"])
def test_standard_operators_read_the_same_numbers(body: str, bits: int, size: int, symmetric: bool) -> None:
    inputs, outputs = 2 * size, 11
    weights = np.random.default_rng(5).normal(size=(inputs, outputs)).astype(np.float32)
    bias = np.arange(outputs, dtype=np.float32)
    constants = {"wt": np.ascontiguousarray(weights.T), "b": bias} if "Gemm" in body else {"w": weights}
    model = tiny(f"float[N,{inputs}] x => float[N,{outputs}] y", body, constants, opset=21)
    (matrix,) = set(matrices(model).values())
    found = nearest(weights.astype(np.float64), Grid(bits=bits, size=size, symmetric=symmetric))
    x = np.random.default_rng(6).normal(size=(3, inputs)).astype(np.float32)
    wanted = x.astype(np.float64) @ found.values()
    wanted = 0.5 * wanted + bias if "Gemm" in body else wanted
    dequantize_matrix(model.graph, matrix, found)
    exact = Setup(extended=False)  # extended optimization fuses the nodes, and the kernel rounds activations to 8 bits
    with open_session(serialised(model), exact) as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], wanted, rtol=1e-4, atol=1e-4)
    assert np.abs(run(model, {"x": x}) - wanted).max() < 0.02 * np.abs(wanted).max()
