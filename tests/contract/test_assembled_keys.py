"""Keys that are written piece by piece into an empty tensor, as latent attention does (DeepSeek, MiniCPM3, Kimi)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.core import Array
from tests.contract.attention import HEADS, PROJECTED, SIZE, SPLIT, TOKENS, WIDTH, attention
from tests.oracle import narrowed_equals_masked, survey_of
from tests.tiny import Weights, feed, ints, lines

OWN = 1  # features of a key that each head has for itself; the others are shared by all heads
BATCH = 3
PROJECT = "".join(lines("$p1 = MatMul(x, w$p)\n", p=p) for p in "qv") + "n1 = MatMul(x, wn)\nr1 = MatMul(x, wr)\n"
PIECES = (
    f"{SPLIT.replace('k1', 'q1').replace('k2', 'unused').replace('k3', 'also')}"
    "n2 = Reshape(n1, single)\nnope = Transpose<perm=[0,2,1,3]>(n2)\n"
    "r2 = Reshape(r1, alone)\nr3 = Transpose<perm=[0,2,1,3]>(r2)\nrope = Expand(r3, all)\n"
)
WEIGHTS: Weights = {
    "wn": (WIDTH, HEADS * OWN),
    "wr": (WIDTH, SIZE - OWN),
    "single": ints(0, 0, HEADS, OWN),
    "alone": ints(0, 0, 1, SIZE - OWN),
    "all": ints(1, HEADS, 1, 1),
}


def grid(first: int, last: int) -> Array:
    """The index of a constant batch: every position of the first three axes, some of the last."""
    axes = [np.arange(n) for n in (BATCH, HEADS, TOKENS)]
    return np.stack(np.meshgrid(*axes, np.arange(first, last), indexing="ij"), axis=-1)


def counted(first: int, last: int, name: str) -> str:
    """The same as TorchScript computes it: a Range along each axis of the tensor that is written into."""
    steps = ["all$n_sizes = Shape(empty)"]
    line = "size$n$a = Gather(all$n_sizes, axis$a)\ncount$n$a = Range(axis0, size$n$a, axis1)"
    steps += [line.replace("$a", str(axis)) for axis in range(4)]
    steps.append(f"part$n = Slice(count$n3, from{first}, to{last})")
    for axis, source in enumerate(["count$n0", "count$n1", "count$n2", "part$n"]):
        steps.append(f"line$n{axis} = Reshape({source}, upright{axis})")
    steps.append("sum$n1 = Add(line$n0, line$n1)\nsum$n2 = Add(sum$n1, line$n2)\nsum$n3 = Add(sum$n2, line$n3)")
    steps.append("target$n = Shape(sum$n3)")
    steps += [f"wide$n{a} = Expand(line$n{a}, target$n)\ndeep$n{a} = Unsqueeze(wide$n{a}, last)" for a in range(4)]
    steps.append("$n = Concat<axis=-1>(deep$n0, deep$n1, deep$n2, deep$n3)\n")
    return "\n".join(steps).replace("$n", name)


COUNTS: Weights = {
    **{f"axis{a}": np.array(a) for a in range(4)},
    **{f"upright{a}": ints(-1, *[1] * (3 - a)) for a in range(4)},
    "last": ints(-1),
    "from0": ints(0),
    f"to{OWN}": ints(OWN),
    f"from{OWN}": ints(OWN),
    f"to{SIZE}": ints(SIZE),
}
EMPTY = "shape = Shape(q3)\nempty = ConstantOfShape(shape)\n"
WRITTEN = "k0 = ScatterND(empty, first, nope)\nk3 = ScatterND(k0, second, rope)\n"
TURNED = """
nf = Transpose<perm=[3,0,1,2]>(nope)
rf = Transpose<perm=[3,0,1,2]>(rope)
k0 = ScatterND(empty, first, nf)
k1 = ScatterND(k0, second, rf)
k3 = Transpose<perm=[1,2,3,0]>(k1)
"""
SPELLINGS: dict[str, tuple[str, Weights]] = {
    # dynamo turns the axis that is written along to the front
    "turned": (
        TURNED,
        {
            "empty": np.zeros((SIZE, BATCH, HEADS, TOKENS), np.float32),
            "first": np.arange(OWN)[:, None],
            "second": np.arange(OWN, SIZE)[:, None],
        },
    ),
    "constant": (
        WRITTEN,
        {
            "empty": np.zeros((BATCH, HEADS, TOKENS, SIZE), np.float32),
            "first": grid(0, OWN),
            "second": grid(OWN, SIZE),
        },
    ),
    "counted": (f"{EMPTY}{counted(0, OWN, 'first')}{counted(OWN, SIZE, 'second')}{WRITTEN}", COUNTS),
}


def latent(spelling: str, **others: Array) -> ir.Model:
    """Attention whose keys are assembled; a batch that is written down is fixed.  `others` replace weights."""
    text, weights = SPELLINGS[spelling]
    batch = "N" if spelling == "counted" else BATCH
    return attention(
        inputs=f"float[{batch},{TOKENS},{WIDTH}] x",
        shapes="copied",
        project=PROJECT + PIECES + text,
        weights={**WEIGHTS, **weights, **others},
        projected={name: PROJECTED[name] for name in ("wq", "wv")},
    )


@pytest.mark.parametrize("ratio", [0.25, 0.75])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_heads_pass_an_assembled_key(spelling: str, ratio: float) -> None:
    model = latent(spelling)
    (block,) = narrowed_equals_masked(model, feed(model), ratio).blocks
    assert (block.kind, block.units) == ("heads", HEADS)
    assert {s.initializer for s in block.producers} == {"wq", "wn", "wv"}


def test_an_index_of_many_numbers_is_seen_through() -> None:
    """Its numbers are more than the trace keeps."""
    model = latent("counted")
    big = feed(model, N=200)
    assert 200 * HEADS * TOKENS * 4 > 4096
    assert [b.units for b in narrowed_equals_masked(model, big).blocks] == [HEADS]


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [0, 1, 2, 2]])
def test_heads_that_are_written_in_another_order_stay(order: list[int]) -> None:
    moved = grid(0, OWN)
    moved[..., 1] = np.array(order)[moved[..., 1]]
    model = latent("constant", first=moved)
    survey = narrowed_equals_masked(model, feed(model))
    assert "wn" not in {s.initializer for b in survey.blocks for s in b.producers}
    assert any("numbered positions" in r.reason for r in survey.refusals if r.value == "wn")


def test_an_index_that_is_fed_proves_nothing() -> None:
    """It may count in this run and do something else in the next."""
    model = latent("constant")
    index = model.graph.initializers.pop("first")
    value = ir.Value(name="fed", shape=index.shape, type=ir.TensorType(ir.DataType.INT64))
    model.graph.inputs.append(value)
    index.replace_all_uses_with(value)
    survey = survey_of(model, {**feed(latent("constant")), "fed": grid(0, OWN)})
    assert "wn" not in {s.initializer for b in survey.blocks for s in b.producers}
