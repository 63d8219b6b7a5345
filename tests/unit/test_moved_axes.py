"""Products that move axes of their operands or results: heads written so have channels of their own, too."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.calibration.observe import observe
from onnxgrail.graph.products import letters_of, orders_of
from onnxgrail.graph.rotate.basis import rotatable, rotate
from onnxgrail.graph.rotate.unfused import move_axes
from tests.inside import turned
from tests.oracle import check_same, narrowed_equals_masked, run
from tests.tiny import Weights, feed, ints, scalar, tiny

MS, BOTH = "com.microsoft.FusedMatMul", "transBatchA=1, transBatchB=1"
HEADS = f"""
    q = MatMul(x, wq)
    k = MatMul(x, wk)
    v = MatMul(x, wv)
    qh = Reshape(q, split)
    kh = Reshape(k, split)
    vh = Reshape(v, split)
    s = {MS}<{BOTH}, transB=1, alpha=0.35>(qh, kh)
    p = Softmax(s)
    o = {MS}<transBatchB=1>(p, vh)
    t = Transpose<perm=[1,0,2]>(o)
    u = Reshape(t, join)
    y = MatMul(u, wo)
"""  # of one sample: positions, then heads, then channels, as the multi-head attention of torch splits them


def model() -> ir.Model:
    weights = dict.fromkeys(("wq", "wk", "wv", "wo"), (32, 32))
    sizes = {"split": np.array([-1, 4, 8]), "join": np.array([-1, 32])}
    return tiny("float[S,32] x => float[] y", HEADS, {**weights, **sizes}, imports={"com.microsoft": 1})


def test_a_transpose_takes_over() -> None:
    plain, other = model(), model()
    facts = observe(other, feed(other))
    shapes = move_axes(other, facts).shapes
    assert [shapes[f"{name}/moved"] for name in ("qh", "kh", "vh")] == [(4, 5, 8)] * 3
    assert not any("transBatch" in name for node in other.graph for name in node.attributes)
    arrays = feed(plain)
    np.testing.assert_allclose(run(other, arrays)["y"], run(plain, arrays)["y"], rtol=1e-5, atol=1e-5)


def test_channels_inside_heads_get_a_basis() -> None:
    plain = model()
    found = rotatable(plain, observe(plain, feed(plain)), ("qk", "vo"))
    assert sorted(inside.kind for inside in found.heads.values()) == ["qk", "vo"]
    rng = np.random.default_rng(0)
    bases = {name: np.stack([np.linalg.qr(rng.normal(size=(8, 8)))[0] for _ in range(4)]) for name in found.heads}
    arrays = feed(plain)
    np.testing.assert_allclose(run(rotate(found, bases), arrays)["y"], run(plain, arrays)["y"], rtol=1e-3, atol=1e-3)


SECOND = ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd")  # scores, sums of values
LETTERS = {
    "heads second": SECOND,
    "batch later": ("qbhd,kbhd->bhqk", "bhqk,kbhd->bqhd"),
    "keys first": ("bkhd,bqhd->bhqk", "bkhd,bhqk->bqhd"),
    "an ellipsis": ("...qhd,...khd->...hqk", "...hqk,...khd->...qhd"),
}
SCALES = {
    "heads": ("m = Mul(qt, of_heads)", True),
    "all channels": ("n = Neg(qt)\nm = Mul(n, scale)", True),
    "half of the channels": ("a, b = Split<axis=3>(qt, halves)\nc = Mul(a, scale)\nm = Concat<axis=3>(c, b)", False),
    "half of the channels by -1": ("a, b = Split<axis=3>(qt, halves)\nc = Neg(a)\nm = Concat<axis=3>(c, b)", False),
    "channels": ("m = Mul(qt, of_channels)", False),
}


def lettered(scores: str, sums: str, *, scaled: str = "m = Identity(qt)") -> ir.Model:
    """An attention of four heads of 8 channels with Einsum; its queries qt are scaled before they are read as m."""
    first = scores.startswith("bk")  # keys and values are the first operands
    move = "Transpose<perm=[1,0,2,3]>" if scores.startswith("qb") else "Identity"
    body = "".join(f"$ = MatMul(x, w$)\n$h = Reshape($, split)\n$t = {move}($h)\n".replace("$", p) for p in "qkv")
    body += f"""
        {scaled}
        s = Einsum<equation="{scores}">({"kt, m" if first else "m, kt"})
        p = Softmax(s)
        o = Einsum<equation="{sums}">({"vt, p" if first else "p, vt"})
        u = Reshape(o, join)
        y = MatMul(u, wo)
    """
    weights: Weights = {**dict.fromkeys(("wq", "wk", "wv", "wo"), (32, 32)), "split": ints(0, 0, 4, 8)}
    weights |= {"join": ints(0, 0, 32), "halves": ints(4, 4), "scale": scalar(3), "of_heads": (4, 1)}
    read = {name: one for name, one in {**weights, "of_channels": (4, 8)}.items() if name in body}
    return tiny("float[N,5,32] x => float[] y", body, read)


@pytest.mark.parametrize("name", SCALES)
def test_the_basis_is_free_if_all_channels_of_a_head_are_scaled_alike(name: str) -> None:
    scaled, free = SCALES[name]
    plain = lettered(*SECOND, scaled=scaled)
    other, _, bases = turned(plain)
    assert ("s/qk" in bases) == free
    check_same(run(other, feed(plain)), run(plain, feed(plain)))


@pytest.mark.parametrize("name", LETTERS)
def test_heads_of_einsum_get_a_basis(name: str) -> None:
    plain = lettered(*LETTERS[name])
    other, survey, bases = turned(plain)
    assert [name.rpartition("/")[2] for name in bases] == ["qk", "vo"]
    assert not any(node.op_type == "Einsum" for node in other.graph)
    check_same(run(other, feed(plain)), run(plain, feed(plain)))
    assert {block.kind for block in survey.blocks} == {"qk", "vo"}
    narrowed_equals_masked(other, feed(other), kinds=("qk", "vo"))


def test_an_einsum_that_repeats_what_it_sums_over_stays() -> None:
    model = tiny("float[2,3] x, float[1,4] z => float[2,4] y", 'y = Einsum<equation="ij,jk->ik">(x, z)', {})
    facts = observe(model, feed(model))
    move_axes(model, facts)
    assert [node.op_type for node in model.graph] == ["Einsum"]


@pytest.mark.parametrize("equation", ["ij,jk", "ij,ki->kj", "bij,bjk->bki", "ijb,jkb->bik", "...ij,...kj->...ik"])
def test_an_einsum_with_one_axis_each_is_a_product(equation: str) -> None:
    rng = np.random.default_rng(0)
    sizes = {"b": 2, "h": 3, "i": 4, "j": 5, "k": 6, "...": (2, 3)}
    terms = equation.partition("->")[0].split(",")
    shapes = [[*(sizes["..."] if "..." in t else ()), *(sizes[c] for c in t.replace("...", ""))] for t in terms]
    arrays = [rng.normal(size=shape) for shape in shapes]
    orders = orders_of(*letters_of(equation, [len(shape) for shape in shapes]))
    assert orders is not None
    left, right = (arrays[k].transpose(order) for k, order in orders.pairs)
    np.testing.assert_allclose((left @ right).transpose(orders.after), np.einsum(equation, *arrays))


@pytest.mark.parametrize(
    "equation", ["ij,jk,kl->il", "ii,ij->ij", "ij,ij->i", "ijk,jkl->il", "ij,kl->ijkl", "ij,jk->k", "hi,hji->hj"]
)
def test_other_sums_are_no_product(equation: str) -> None:
    ranks = [len(term) for term in equation.partition("->")[0].split(",")]
    assert orders_of(*letters_of(equation, ranks)) is None
