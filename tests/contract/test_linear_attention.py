"""Linear attention with a column of ones beside the values, whose product with the keys is the denominator (Sana)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from tests.contract.attention import HEADS, SIZE, TOKENS, WIDTH, attention
from tests.oracle import narrowed_equals_masked
from tests.tiny import Weights, feed, ints, scalar

ONE = np.ones((1, HEADS, TOKENS, 1), np.float32)
LINEAR = """
q4 = Softplus(q3)
k4 = Softplus(k3)
kt = Transpose<perm=[0,1,3,2]>(k4)
kv = MatMul(kt, v4)
o9 = MatMul(q4, kv)
top = Slice(o9, i0, size, last)
low = Slice(o9, size, more, last)
low1 = Add(low, eps)
o0 = Div(top, low1)
"""
BASE: Weights = {"i0": ints(0), "size": ints(SIZE), "more": ints(SIZE + 1), "last": ints(3), "eps": scalar(1e-3)}
FILLED = """
sv = Shape<start=0, end=3>(v3)
so = Concat<axis=0>(sv, single)
ones = ConstantOfShape<value=float[1]{1.0}>(so)
"""
REPEATED = """
so = Shape<start=0, end=1>(v3)
to = Concat<axis=0>(so, rest)
ones = Expand(one, to)
"""
BESIDE: dict[str, tuple[str, Weights]] = {
    "padded": ("v4 = Pad(v3, pads, one)", {"pads": ints(0, 0, 0, 0, 0, 0, 0, 1), "one": scalar(1)}),
    "constant": ("v4 = Concat<axis=3>(v3, one)", {"one": ONE}),
    "filled": (f"{FILLED}v4 = Concat<axis=3>(v3, ones)", {"single": ints(1)}),
    "repeated": (f"{REPEATED}v4 = Concat<axis=3>(v3, ones)", {"one": ONE, "rest": ints(HEADS, TOKENS, 1)}),
    "fed": ("v4 = Concat<axis=3>(v3, fed)", {}),
}


def linear(beside: str) -> ir.Model:
    text, weights = BESIDE[beside]
    batch = 1 if beside == "constant" else "N"
    extra = f", float[N,{HEADS},{TOKENS},1] fed" if beside == "fed" else ""
    return attention(
        inputs=f"float[{batch},{TOKENS},{WIDTH}] x{extra}",
        shapes="copied",
        scores="",
        mask="",
        softmax=f"{text}\n{LINEAR}",
        weights={**BASE, **weights},
    )


@pytest.mark.parametrize("ratio", [0.25, 0.75])
@pytest.mark.parametrize("beside", ["padded", "constant", "filled", "repeated"])
def test_ones_go_with_their_heads(beside: str, ratio: float) -> None:
    model = linear(beside)
    (block,) = narrowed_equals_masked(model, feed(model), ratio).blocks
    assert (block.kind, block.units, block.unit_size) == ("heads", HEADS, SIZE)
    assert {s.initializer for s in block.producers} == {"wq", "wk", "wv"}


def test_values_that_a_tie_has_frozen_keep_the_heads() -> None:
    """An input beside the values stays, so the values stay, so queries and keys do."""
    model = linear("fed")
    survey = narrowed_equals_masked(model, feed(model))
    assert not survey.blocks
    assert {"wq", "wk", "wv"} <= {r.value for r in survey.refusals}
