"""Constants that are smaller in the file than where they are read are never stored larger than they were."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.core import Array
from onnxgrail.graph.cost import counting
from onnxgrail.graph.io.model_file import copy
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.trace.survey import Ledger
from tests.oracle import killed, narrowed, narrowed_equals_masked
from tests.tiny import feed, ints, tiny

SLOPES = {"a": (1, 8, 1, 1)}
LITTLE = 16  # numbers that any constant may take
SIZE = 12  # of a map


def model_of(body: str, weights: dict[str, tuple[int, ...] | Array], *, opset: int = 20) -> ir.Model:
    """Convolution, a constant `s` that is computed, and another convolution."""
    return tiny(
        f"float[N,3,{SIZE},{SIZE}] x => float[] y",
        f"h = Conv<pads=[1,1,1,1]>(x, w)\n{body}\ny = Conv(z, v)",
        {"w": (8, 3, 3, 3), "v": (5, 8, 3, 3), **weights},
        opset=opset,
        ir_version=10 if opset > 12 else 7,
    )


TO = {"to": ints(1, 8, SIZE, SIZE)}
CASES = {
    "expand": ("s = Expand(a, to)\nz = PRelu(h, s)", SLOPES | TO),
    "expand lower rank": ("s = Expand(a, to)\nz = Mul(h, s)", {"a": (8, 1, 1)} | TO),
    "expand of one number": ("s = Expand(a, to)\nz = Mul(h, s)", {"a": (1,)} | TO),
    "expand twice": ("s = Expand(a, to)\nt = Expand(a, to)\ng = PRelu(h, s)\nz = Mul(g, t)", SLOPES | TO),
    "expand read twice": ("s = Expand(a, to)\ng = PRelu(h, s)\nz = Mul(g, s)", SLOPES | TO),
    "expand, computed target": (
        "t = Concat<axis=0>(t0, t1)\ns = Expand(a, t)\nz = PRelu(h, s)",
        SLOPES | {"t0": ints(1, 8), "t1": ints(SIZE, SIZE)},
    ),
    "tile": ("s = Tile(a, times)\nz = PRelu(h, s)", SLOPES | {"times": ints(1, 1, SIZE, SIZE)}),
    "tile, opset 9": ("s = Tile(a, times)\nz = PRelu(h, s)", SLOPES | {"times": ints(1, 1, SIZE, SIZE)}),
    "expand, opset 9": ("s = Expand(a, to)\nz = PRelu(h, s)", SLOPES | TO),
    "broadcast": ("s = Add(a, o)\nz = Mul(h, s)", SLOPES | {"o": np.zeros((1, 1, SIZE, SIZE), np.float32)}),
    "outer product": ("s = Mul(a, o)\nz = Mul(h, s)", SLOPES | {"o": (1, 1, SIZE, SIZE)}),
    "transposed": (
        "e = Expand(a, to)\ns = Transpose<perm=[0,3,1,2]>(e)\nz = PRelu(h, s)",
        {"a": (1, 1, 1, 8), "to": ints(1, SIZE, SIZE, 8)},
    ),
    "each channel several times": (
        "e = Expand(a, to)\ns = Reshape(e, shape)\nz = PRelu(h, s)",
        {"a": (1, 4, 1, 1, 1), "to": ints(1, 4, 2, SIZE, SIZE), "shape": ints(1, 8, SIZE, SIZE)},
    ),
    "all channels several times": (
        "s = Tile(a, times)\nz = PRelu(h, s)",
        {"a": (1, 2, 1, 1), "times": ints(1, 4, SIZE, SIZE)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_no_constant_is_stored_larger(case: str) -> None:
    body, weights = CASES[case]
    model = model_of(body, dict(weights), opset=9 if case.endswith("opset 9") else 20)
    survey = narrowed_equals_masked(model, feed(model))
    assert [block.units for block in survey.blocks] == [8]
    dead = killed(survey, 0.5)
    slim = narrowed(model, survey, dead)
    assert counting.parameters(model) - counting.removed(survey, dead)[0] == counting.parameters(slim)
    assert numbers(slim) <= max(numbers(model), LITTLE)
    assert ir.to_proto(slim).ByteSize() < ir.to_proto(model).ByteSize()


def numbers(model: ir.Model) -> int:
    """Of the largest float constant beside the weights of the two convolutions."""
    stored = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
    return max(t.size for t in stored if t.dtype == ir.DataType.FLOAT and t.name not in ("w", "v"))


def test_the_node_that_repeats_stays_and_its_source_is_narrowed() -> None:
    body, weights = CASES["expand"]
    model = model_of(body, dict(weights))
    survey = narrowed_equals_masked(model, feed(model))
    slim = narrowed(model, survey, killed(survey, 0.5))
    assert [(n.op_type, n.name) for n in slim.graph] == [(n.op_type, n.name) for n in model.graph]
    sizes = {name: value.const_value.numpy() for name, value in slim.graph.initializers.items() if value.const_value}
    assert sizes["a"].shape == (1, 4, 1, 1)
    assert sizes["to"].tolist() == [1, 4, SIZE, SIZE]


def test_a_table_that_blocks_share_is_not_copied_for_each() -> None:
    body = "".join(f"h{k} = Conv(x, w{k})\nm{k} = Mul(h{k}, table)\ny{k} = Conv(m{k}, v{k})\n" for k in range(4))
    weights: dict[str, tuple[int, ...] | Array] = {"table": (1, 8, SIZE, SIZE)}
    for k in range(4):
        weights |= {f"w{k}": (8, 3, 1, 1), f"v{k}": (5, 8, 1, 1)}
    model = tiny(f"float[N,3,{SIZE},{SIZE}] x => {', '.join(f'float[] y{k}' for k in range(4))}", body, weights)
    survey = narrowed_equals_masked(model, feed(model))
    assert len(survey.blocks) == 4
    dead = killed(survey, 0.25)
    slim = narrowed(model, survey, dead)
    assert (
        counting.parameters(model) - counting.removed(survey, dead)[0]
        == counting.parameters(slim)
        < counting.parameters(model)
    )


def test_new_numbers_of_a_repeated_constant_are_stored_once() -> None:
    """A fold averages slopes: what repeats itself does so afterwards."""
    body, weights = CASES["expand"]
    model = model_of(body, dict(weights))
    survey = narrowed_equals_masked(model, feed(model))
    dead = killed(survey, 0.5)
    slopes = np.broadcast_to(np.arange(8, dtype=np.float32).reshape(1, 8, 1, 1), (1, 8, SIZE, SIZE))
    slim = copy(model)
    apply(slim.graph, survey, Ledger(dead=dead, arrays={"s": slopes}))
    assert numbers(slim) == 4
