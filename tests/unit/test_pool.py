"""The nodes of input compensation against its formula, and its size against the paper's counts."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.core import Array
from onnxgrail.errors import ModelError
from onnxgrail.graph.cost import counting
from onnxgrail.graph.fittable.pool import Entry, Plan, border_of, entry_of, insert, plan_of, query_size, strips
from onnxgrail.graph.io.model_file import copy
from onnxgrail.graph.io.serial import to_bytes
from tests.tiny import VOCABULARY, Weights, feed, tiny

RNG = np.random.default_rng


def image(text: str = "float[N,2,13,10] x", opset: int = 20) -> ir.Model:
    return tiny(f"{text} => float[] y", "y = Neg(x)", {"unused": (2, 2)}, opset=opset, recorded=False)


def entry(model: ir.Model) -> Entry:
    return entry_of(model, observe(model, feed(model)))


def softmax(scores: Array) -> Array:
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(shares / shares.sum(-1, keepdims=True))


def with_pool(model: ir.Model, place: Entry, plan: Plan, sides: list[int]) -> tuple[ir.Model, list[Array], list[Array]]:
    rng = RNG(0)
    keys = [rng.normal(size=(plan.query, plan.rank)).astype(np.float32) for _ in sides]
    values = [rng.normal(size=(plan.rank, size)).astype(np.float32) for size in sides]
    found = copy(model)
    insert(found, place, plan, keys, values)
    return found, keys, values


def run(model: ir.Model, given: dict[str, Array]) -> dict[str, Array]:
    with open_session(to_bytes(model)) as session:
        return session.run(given)


@pytest.mark.parametrize(("rank", "millions"), [(2, 0.14), (4, 0.29), (8, 0.58), (16, 1.15), (32, 2.30), (128, 9.20)])
def test_the_papers_counts_for_clip(rank: int, millions: float) -> None:
    """Table 8: 30 pixels around 224 x 224 x 3, an embedding of 512, keys for each of the four sides."""
    image = Entry(value="x", dtype=ir.DataType.FLOAT, size=(3, 224, 224), rank=4, image=True)
    border = sum(map(math.prod, strips(image, border_of(image))))
    plan = Plan(form="frame", rank=rank, query=512, value=border, sides=4)
    assert border == 69_840
    assert plan.parameters == rank * (69_840 + 4 * 512)
    assert round(plan.parameters / 1e6, 2) == pytest.approx(millions, abs=0.001)


def test_the_papers_count_for_llama() -> None:
    """Keys and values of the embedding's width: 2 r d."""
    assert Plan(form="token", rank=32, query=4096, value=4096).parameters == 262_144


def test_images_get_a_weighted_sum_of_images() -> None:
    model = image()
    place, given = entry(model), feed(model)
    plan = plan_of(place, 20, limit=10_000, rank=3)
    assert (plan.form, plan.rank, plan.value) == ("image", 3, 2 * 13 * 10)
    found, (keys,), (values,) = with_pool(model, place, plan, [plan.value])
    x = given["x"]
    cells = [x[:, :, 3 * i : 3 * i + 3, 2 * j : 2 * j + 2].mean((2, 3)) for i in range(4) for j in range(5)]
    query = np.stack(cells, -1).reshape(len(x), -1)
    assert query.shape[1] == plan.query == query_size(place)
    want = x + (softmax(query @ keys) @ values).reshape(x.shape)
    np.testing.assert_allclose(run(found, given)["y"], -want, atol=1e-5)
    assert counting.parameters(found) - counting.parameters(model) == plan.parameters


def test_frames_change_the_border_alone() -> None:
    model = image()
    place, given = entry(model), feed(model)
    border = border_of(place)
    assert border == 1
    whole = plan_of(place, 20, limit=10_000, rank=1).parameters
    plan = plan_of(place, 20, limit=4 * whole - 1, rank=32)  # not even four whole images
    assert (plan.form, plan.value, plan.sides) == ("frame", 2 * 2 * (13 + 10 - 2), 4)
    assert plan.parameters <= 4 * whole - 1 < plan.parameters + plan.parameters // plan.rank
    sides = [2 * 10, 2 * 10, 2 * 11, 2 * 11]
    found, keys, values = with_pool(model, place, plan, sides)
    shift = -run(found, given)["y"] - given["x"]
    assert not shift[:, :, 1:-1, 1:-1].any()
    x = given["x"]
    cells = [x[:, :, 3 * i : 3 * i + 3, 2 * j : 2 * j + 2].mean((2, 3)) for i in range(4) for j in range(5)]
    query = np.stack(cells, -1).reshape(len(x), -1)
    parts = [softmax(query @ k) @ v for k, v in zip(keys, values, strict=True)]
    top, bottom, left, right = parts
    np.testing.assert_allclose(shift[:, :, 0], top.reshape(3, 2, 10), atol=1e-5)
    np.testing.assert_allclose(shift[:, :, -1], bottom.reshape(3, 2, 10), atol=1e-5)
    np.testing.assert_allclose(shift[:, :, 1:-1, 0], left.reshape(3, 2, 11), atol=1e-5)
    np.testing.assert_allclose(shift[:, :, 1:-1, -1], right.reshape(3, 2, 11), atol=1e-5)
    assert counting.parameters(found) - counting.parameters(model) == plan.parameters


@pytest.mark.parametrize("opset", [11, 20])
def test_tokens_are_shifted_behind_the_embedding(opset: int) -> None:
    table = RNG(1).normal(size=(VOCABULARY, 6)).astype(np.float32)
    weights: Weights = {"table": table}
    model = tiny("int64[N,T] ids => float[] y", "h = Gather(table, ids)\ny = Neg(h)", weights, opset=opset)
    place, given = entry(model), feed(model)
    assert (place.value, place.size, place.rank) == ("h", (6,), 3)
    plan = plan_of(place, opset, limit=10_000, rank=5)
    assert (plan.form, plan.parameters, plan.macs(4)) == ("token", 2 * 5 * 6, 4 * 2 * 5 * 6)
    found, (keys,), (values,) = with_pool(model, place, plan, [6])
    h = table[given["ids"]]
    np.testing.assert_allclose(run(found, given)["y"], -(h + softmax(h @ keys) @ values), atol=1e-5)


def test_positions_are_no_tokens() -> None:
    """A table that is read by numbers of the graph's own is not where the input comes in."""
    text = "p = Gather(places, zero)\nh = Gather(table, ids)\ny = Add(h, p)"
    weights = {"places": (4, 6), "table": (VOCABULARY, 6), "zero": np.zeros((1,), np.int64)}
    assert entry(tiny("int64[N,T] ids => float[] y", text, weights)).value == "h"


def test_ids_may_be_reshaped_and_tables_scaled() -> None:
    """As GPT-2 is exported, and as quantised tables are read."""
    text = "i = Reshape(ids, shape)\nq = Gather(table, i)\nh = DequantizeLinear(q, scale)\ny = Neg(h)"
    weights = {
        "table": RNG(1).integers(0, 255, (VOCABULARY, 6)).astype(np.uint8),
        "shape": np.array([-1, 4], np.int64),
        "scale": np.float32(0.1),
    }
    place = entry(tiny("int64[N,T] ids => float[] y", text, weights))
    assert (place.value, place.dtype, place.size) == ("h", ir.DataType.FLOAT, (6,))


def test_vectors_are_compensated_as_they_are() -> None:
    model = tiny("float[N,6] x => float[] y", "y = Neg(x)", {"unused": (2, 2)})
    place, given = entry(model), feed(model)
    plan = plan_of(place, 20, limit=100, rank=2)
    found, (keys,), (values,) = with_pool(model, place, plan, [6])
    x = given["x"]
    np.testing.assert_allclose(run(found, given)["y"], -(x + softmax(x @ keys) @ values), atol=1e-5)


@pytest.mark.parametrize("text", ["float[N,3,H,16] x", "float[N,64,16,16] x"])
def test_without_a_place_it_says_so(text: str) -> None:
    model = image(text)
    with pytest.raises(ModelError, match="no place for input compensation"):
        entry_of(model, observe(model, feed(model, H=16)))


def test_a_pool_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ModelError, match="numbers, and 20 are allowed"):
        plan_of(entry(image()), 20, limit=20, rank=32)


def test_files_of_old_opsets_get_whole_images_only() -> None:
    place = entry(image(opset=9))
    with pytest.raises(ModelError, match="are allowed"):
        plan_of(place, 9, limit=200, rank=32)
    assert plan_of(place, 11, limit=260, rank=32).form == "frame"
