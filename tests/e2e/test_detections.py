"""Outputs with as many rows as the model finds, as after non-maximum suppression: other models find more or fewer."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.errors import ModelError
from onnxgrail.fidelity.clues import Clues
from onnxgrail.fidelity.kinds import parts_of
from onnxgrail.fidelity.lists import LISTED, Lists, lists_of, open_axes
from tests.tiny import tiny

SCORES = """
h = MatMul(x, w1)
r = Relu(h)
s = MatMul(r, w2)
p = Relu(s)
i = NonZero(p)
t = Transpose(i)
v = GatherND(p, t)
u = Unsqueeze(v, one)
f = Cast<to=1>(t)
scores = Concat<axis=1>(f, u)
"""


def detector(seed: int = 0) -> onnx.ModelProto:
    """A model that lists every position with a score above 0; nothing is above 0 where the input is zero."""
    weights: dict[str, Any] = {"w1": (8, 16), "w2": (16, 3), "one": np.array([1])}
    return ir.to_proto(tiny("float[1,8] x => float[K,3] scores", SCORES, weights, seed=seed))


def feeds(samples: int = 40) -> dict[str, np.ndarray[Any, Any]]:
    x = np.random.default_rng(0).normal(size=(samples, 8)).astype(np.float32)
    x[::3] = 0
    return {"x": x}


def test_a_model_is_like_itself_also_where_it_finds_nothing() -> None:
    (output,) = onnxgrail.compare(detector(), detector(), data=feeds()).outputs
    assert (output.samples, output.nmse, output.max_abs) == (40, 0, 0)
    assert [verdict.why for verdict in output.verdicts] == [LISTED]


def test_more_or_fewer_rows_are_a_difference() -> None:
    (output,) = onnxgrail.compare(detector(), detector(seed=1), data=feeds()).outputs
    assert output.samples == 40
    assert output.nmse is not None
    assert output.nmse > 0.1


def test_other_columns_are_still_an_error() -> None:
    wide = tiny("float[1,8] x => float[K,4] scores", "scores = MatMul(x, w)", {"w": (8, 4)})
    with pytest.raises(ModelError, match="got shape"):
        onnxgrail.compare(detector(), ir.to_proto(wide), data=feeds())


@pytest.mark.parametrize("amount", [{"ratio": 0.5}, {"max_loss": 0.9, "minimize": "params"}])
def test_such_a_model_is_compressed(amount: dict[str, Any]) -> None:
    result = onnxgrail.compress(detector(), data=feeds(), round_to=1, **amount)
    assert sum(block["kept"] for block in result.report.data["blocks"]) < 16


def test_rows_that_one_model_lacks() -> None:
    names: set[str] = set()
    lists = Lists(open_axes({"n": ["K"], "d": [1, "K", 2], "fixed": [1, 3], "last": ["N", "C"]}), names)
    ones = np.ones((1, 2, 2), np.float32)
    wanted = {"n": np.zeros(2, np.int64), "d": ones, "fixed": ones[0], "last": ones[0]}
    got = {"n": np.zeros(0, np.int64), "d": ones[:, :0], "fixed": ones[0], "last": ones[0, :, :1]}
    one, two = lists.leveled({"x": ones}, wanted, got)
    assert names == {"n", "d", "last"}
    np.testing.assert_array_equal(two["d"], np.zeros_like(ones))
    assert not (one["n"] == two["n"]).any()
    np.testing.assert_array_equal(two["last"], [[1, 0], [1, 0]])
    assert parts_of("d", [ones], Clues(lists=names))[0].kind == "values"


def test_the_distance_that_chooses_weights_counts_missing_rows() -> None:
    outputs = tiny("float[1,8] x => float[K,3] scores", SCORES, {"w1": (8, 16), "w2": (16, 3), "one": np.array([1])})
    lists = lists_of(outputs.graph.outputs)
    one, two = lists.leveled({}, {"scores": np.ones((2, 3), np.float32)}, {"scores": np.ones((1, 3), np.float32)})
    assert lists.names == {"scores"}
    assert one["scores"].shape == two["scores"].shape == (2, 3)
