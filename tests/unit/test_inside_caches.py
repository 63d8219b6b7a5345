"""Caches of heads in another basis: the model computes the same, and without channels, the caches are narrower."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.calibration.agreement import trial_of
from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.proof import prove
from onnxgrail.graph.ops.layers.cache import CACHE
from onnxgrail.graph.rewrite.caches import shown, with_matrices, without_matrices
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.rewrite.interface import between, fit, note
from onnxgrail.graph.rotate.basis import rotate
from onnxgrail.graph.rotate.inside import POSITIONS
from onnxgrail.graph.rotate.restore import restore
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.graph.trace.tracer import trace
from tests.inside import KINDS, bases_of, found_in, projected
from tests.oracle import check_same, narrowed_equals_masked, run, survey_of
from tests.tiny import Weights, feed, ints, lines, scalar, tiny

HEADS, GROUPS, SIZE, WIDTH = 4, 2, 4, 12
SPLIT = "".join(
    lines("$p0 = MatMul(x, w$p)\n$p1 = Reshape($p0, into$p)\n$p2 = Transpose<perm=[0,2,1,3]>($p1)\n", p=p)
    for p in "qkv"
)
PLAIN = "q3 = Identity(q2)\nk3 = Identity(k2)\n"
ROTARY = "".join(lines("$p3 = RotaryEmbedding($p2, cosine, sine, places)\n", p=p) for p in "qk")
NORMED = "".join(lines("$p3 = RMSNormalization<axis=-1, epsilon=0.3>($p2, gain)\n", p=p) for p in "qk")
BOTH = NORMED.replace("3 = RMS", "n = RMS") + ROTARY.replace("(q2", "(qn").replace("(k2", "(kn")
REPEATED = "".join(
    lines("$p5 = Unsqueeze($p4, second)\n$p6 = Expand($p5, twice)\n$p7 = Reshape($p6, heads)\n", p=p) for p in "kv"
)
PRODUCTS = f"""
    k4 = Concat<axis=-2>(past_k, k3)
    v4 = Concat<axis=2>(past_v, v2)
    {REPEATED}
    kt = Transpose<perm=[0,1,3,2]>(k7)
    a0 = MatMul(q3, kt)
    a1 = Mul(a0, scale)
    a2 = Softmax<axis=-1>(a1)
    o0 = MatMul(a2, v7)
    present_k = Identity(k4)
    present_v = Identity(v4)
"""
OTHER_WAY = PRODUCTS.replace("(past_k,", "(kp,").replace("Identity(k4)", "Transpose<perm=[0,2,1,3]>(k4)")
KERNEL = "o0, present_k, present_v = Attention(q3, k3, v2, , past_k, past_v)\n"
SIDE_BY_SIDE = (
    "".join(lines("$p0 = MatMul(x, w$p)\n", p=p) for p in "qkv")
    + f"""
    o, present_k, present_v = Attention<q_num_heads={HEADS}, kv_num_heads={GROUPS}>(q0, k0, v0, , past_k, past_v)
    y = MatMul(o, wo)
"""
)
MERGE = "o1 = Transpose<perm=[0,2,1,3]>(o0)\no2 = Reshape(o1, back)\ny = MatMul(o2, wo)"

# what is between, and the units of queries and keys
NETS = {
    "products": (PLAIN + PRODUCTS, SIZE),
    "products, rotated": (ROTARY + PRODUCTS, SIZE // 2),
    "products, normalized": (NORMED + PRODUCTS, SIZE),
    "products, normalized and rotated": (BOTH + PRODUCTS, SIZE // 2),
    "a kernel, normalized and rotated": (BOTH + KERNEL, SIZE // 2),
    "another layout": ("kp = Transpose<perm=[0,2,1,3]>(past_k)\n" + PLAIN + OTHER_WAY, SIZE),
    "a past alone": ("kp = Concat<axis=0>(past_k)\n" + PLAIN + PRODUCTS.replace("(past_k,", "(kp,"), SIZE),
    "a kernel": (PLAIN + KERNEL, SIZE),
    "a kernel after the cache": (
        PLAIN + "present_k = Concat<axis=2>(past_k, k3)\npresent_v = Concat<axis=2>(past_v, v2)\n"
        "o0 = Attention(q3, present_k, present_v)\n", SIZE),
    "a kernel, side by side": (SIDE_BY_SIDE, SIZE),
    "a kernel, rotated": (ROTARY + KERNEL, SIZE // 2),
    "presents that are read": (PLAIN + PRODUCTS.replace("k4", "present_k").replace("v4", "present_v").replace(
        "present_k = Identity(present_k)", "").replace("present_v = Identity(present_v)", ""), SIZE),
}  # fmt: skip


def cached(name: str, *, more: str = "") -> ir.Model:
    """One layer of a decoder with a cache; query heads share keys and values."""
    between, _ = NETS[name]
    counts = {"q": HEADS, "k": GROUPS, "v": GROUPS}
    weights: Weights = {
        **{f"w{p}": (WIDTH, SIZE * count) for p, count in counts.items()},
        **{f"into{p}": ints(0, 0, count, -1) for p, count in counts.items()},
        "back": ints(0, 0, -1),
        "wo": (HEADS * SIZE, 5),
        "scale": scalar(SIZE**-0.5),
        "second": ints(2),
        "twice": ints(1, 1, HEADS // GROUPS, 1, 1),
        "heads": ints(0, HEADS, -1, SIZE),
        "gain": np.array([0.5, 2, 1, 0.7], np.float32),
        "cosine": np.cos(np.outer(np.arange(9), [1.0, 0.3])).astype(np.float32),
        "sine": np.sin(np.outer(np.arange(9), [1.0, 0.3])).astype(np.float32),
    }
    body = between if "y = " in between else f"{SPLIT}{between}{MERGE}{more}"
    used = {label: weight for label, weight in weights.items() if label in body}
    turned = "kp = Transpose" in body
    pasts = f"float[N,{'P' if turned else GROUPS},{GROUPS if turned else 'P'},{SIZE}] past_k"
    places = ", int64[N,S] places" if "places" in body else ""
    signature = f"float[N,S,{WIDTH}] x, {pasts}, float[N,{GROUPS},P,{SIZE}] past_v{places}"
    return tiny(f"{signature} => float[] y, float[] present_k, float[] present_v", body, used, opset=23)


def picks(name: str) -> bool:
    """Queries and keys have no free basis."""
    return "rotated" in name or "normalized" in name


@pytest.mark.parametrize("name", NETS)
def test_the_interface_is_the_same_until_channels_go(name: str) -> None:
    model = cached(name)
    found = found_in(model, interface=True)
    assert [(one.kind, one.units is None) for one in found.heads.values()] == [
        ("qk", not picks(name)),
        ("vo", True),
    ]
    other = rotate(found, bases_of(found))
    check_same(run(other, feed(model)), run(model, feed(model)))


@pytest.mark.parametrize("name", NETS)
def test_narrower_caches_are_those_of_projected_heads(name: str) -> None:
    model, arrays = cached(name), feed(cached(name))
    found = found_in(model, interface=True)
    bases = bases_of(found)
    other = rotate(found, bases)
    survey = trace(other, observe(other, arrays), interface=True)
    assert {(block.kind, block.units) for block in survey.blocks} == {("qk", NETS[name][1]), ("vo", SIZE)}
    assert not [refusal for refusal in shown(other, survey).refusals if "past" in refusal.value]
    trial = trial_of(other, survey, arrays, ("CPUExecutionProvider",))
    assert prove(trial, survey.blocks, {block.name: 1 for block in survey.blocks}) == (survey.blocks, ())
    narrowed_equals_masked(other, arrays, kinds=KINDS, interface=True)
    dead = np.zeros(survey.ids, dtype=bool)
    for block in survey.blocks:
        dead[block.ids[block.units // 2 :]] = True
    slim = other.clone()
    apply(slim.graph, survey, Ledger(dead=dead, arrays={}))
    note(slim, without_matrices(slim))
    restore(slim)
    ports = between(model, slim)
    assert {(port.name, port.before, port.after) for port in ports} == {
        (f"{when}_{p}", SIZE, SIZE // 2) for when in ("past", "present") for p in "kv"
    }
    got = run(slim, fit(arrays, ports))
    whole = fit(run(model, arrays), ports)
    same = ("present_v",) if "normalized" in name else ("present_k", "present_v")  # the mean of squares lacks channels
    check_same({n: got[n] for n in same}, {n: whole[n] for n in same})
    if not picks(name):
        want = run(projected(model, bases, SIZE // 2, interface=True), arrays)
        check_same({"y": got["y"]}, {"y": want["y"]})
    gathers = 2 if "rotated" in name else 0  # of cosines and sines
    assert len([*slim.graph]) == len([*model.graph]) + gathers
    assert not any(node.metadata_props for node in slim.graph)


@pytest.mark.parametrize("name", NETS)
def test_caches_stay_without_leave(name: str) -> None:
    found = found_in(cached(name))
    assert not found.heads
    assert {refusal.reason for refusal in found.refusals} == {POSITIONS if "(past" in NETS[name][0] else CACHE}


def test_a_cache_that_is_read_elsewhere_stays() -> None:
    model = cached("products", more="\nz = ReduceSum<keepdims=0>(past_k)")
    model.graph.outputs.append(next(node.outputs[0] for node in model.graph if node.outputs[0].name == "z"))
    assert [one.kind for one in found_in(model, interface=True).heads.values()] == ["vo"]


def test_the_cache_of_a_convolution_gets_no_matrix() -> None:
    body = "c = Concat<axis=2>(past, x)\npresent = Identity(c)\ny = Conv(c, w)"
    signature = "float[N,3,S,4] x, float[N,3,P,4] past => float[] y, float[] present"
    model = tiny(signature, body, {"w": (2, 3, 2, 1)})
    facts = survey_of(model, feed(model)).facts
    assert with_matrices(model, facts) is facts
    assert len([*model.graph]) == 3
