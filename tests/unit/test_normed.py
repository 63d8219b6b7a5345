"""Queries and keys that are normalized: channels are picked, and the root mean square is taken over the old width."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.algebra.rotation import of_unit_size, order_of_pairs
from onnxgrail.calibration.agreement import trial_of
from onnxgrail.calibration.proof import prove
from onnxgrail.core import Floats, Ints, Stats
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.rotate.basis import rotatable
from onnxgrail.graph.rotate.inside import BENDS, POSITIONS
from onnxgrail.graph.rotate.restore import restore
from onnxgrail.graph.trace.survey import Ledger
from tests.oracle import check_same, narrowed_equals_masked, run, survey_of
from tests.tiny import Weights, feed, ints, scalar
from tests.unit.test_picked import FORMS, GROUPS, HEADS, KERNEL, SIZE, picked, rotary

EPSILON = 0.3  # large, so that it counts
WRITTEN = """
    $p_square = Pow($p2, two)
    $p_mean = ReduceMean<keepdims=1>($p_square, last)
    $p_stable = Add($p_mean, epsilon)
    $p_root = Sqrt($p_stable)
"""
NORMS = {
    "divided": WRITTEN + "$p_unit = Div($p2, $p_root)\n$pn = Mul($p_unit, g$p)\n",
    "inverted": WRITTEN + "$p_inverse = Reciprocal($p_root)\n$p_unit = Mul($p2, $p_inverse)\n$pn = Mul(g$p, $p_unit)\n",
    "without a scale": WRITTEN + "$pn = Div($p2, $p_root)\n",
    "in double": """
        $p_wide = Cast<to=11>($p2)
        $p_square = Pow($p_wide, two)
        $p_mean = ReduceMean<keepdims=1>($p_square, last)
        $p_stable = Add($p_mean, epsilon_wide)
        $p_root = Sqrt($p_stable)
        $p_unit = Div($p_wide, $p_root)
        $p_short = Cast<to=1>($p_unit)
        $pn = Mul(g$p, $p_short)
    """,
    "one operator": f"$pn = RMSNormalization<epsilon={EPSILON}>($p2, g$p)\n",
    "an operator of ONNX Runtime": f"$pn = SimplifiedLayerNormalization<axis=-1, epsilon={EPSILON}>($p2, g$p)\n",
}
GAINS = np.random.default_rng(6).uniform(0.5, 2, (2, SIZE)).astype(np.float32)
GIVEN: Weights = {
    "gq": GAINS[0], "gk": GAINS[1], "two": scalar(2), "last": ints(-1), "epsilon": scalar(EPSILON),
    "epsilon_wide": np.array(EPSILON),
}  # fmt: skip


def normed(norm: str, way: str = "none", *, sides: str = "qk", packed: bool = False, kernel: str = "") -> ir.Model:
    """The layer of `rotary` with some normalizations."""
    text = [NORMS[norm] if side in sides else "" for side in "qk"]
    body = "".join(text).replace("$p", "")
    used = {n: w for n, w in GIVEN.items() if (n[1:] in sides and "g$p" in NORMS[norm]) or n in body}
    return rotary(way, packed=packed, kernel=kernel, norms=text, given=used)


def masked(model: ir.Model, kept: Ints) -> ir.Model:
    """The original, in which some channels of queries and keys are zero from where heads are apart."""
    other = model.clone()
    numbers = np.zeros(SIZE, np.float32)
    numbers[kept] = 1
    mask = constant(other.graph, numbers, "mask")
    for node in [n for n in other.graph if n.outputs[0].name in ("q2", "k2")]:
        product = ir.Node("", "Mul", [node.outputs[0], mask], num_outputs=1)
        product.outputs[0].name = f"{node.outputs[0].name}/masked"
        node.outputs[0].replace_all_uses_with(product.outputs[0])
        product.replace_input_with(0, node.outputs[0])
        other.graph.insert_after(node, product)
    return other


@pytest.mark.parametrize(
    ("norm", "way", "sides", "packed", "kernel"),
    [
        *((norm, way, "qk", False, "") for norm in NORMS for way in ("none", "halves")),
        *(
            ("divided", way, "qk", False, "")
            for way in ("two halves", "interleaved", "one operator", "scaled by position")
        ),
        ("divided", "none", "q", False, ""),
        ("divided", "constant tables", "k", False, ""),
        ("one operator", "halves", "qk", True, ""),
        ("divided", "none", "qk", True, ""),
        ("one operator", "one operator", "qk", False, KERNEL),
        ("divided", "none", "qk", False, KERNEL),
    ],
)
def test_without_channels_the_root_mean_square_is_over_the_old_width(
    norm: str, way: str, sides: str, packed: bool, kernel: str
) -> None:
    model = normed(norm, way, sides=sides, packed=packed, kernel=kernel)
    other, survey, inside, order = picked(model)
    assert inside.units is not None
    assert [len(side) for side in inside.norms] == [int(side in sides) for side in "qk"]
    check_same(run(other, feed(model)), run(model, feed(model)))
    (block,) = [block for block in survey.blocks if block.kind == "qk"]
    assert (block.units, block.ranked) == (len(order), inside.name) == (FORMS[way][3], inside.name)
    assert block.unit_size == (HEADS + GROUPS * packed) * SIZE // len(order)
    narrowed_equals_masked(other, feed(other), kinds=("qk", "vo"))
    dead = np.zeros(survey.ids, dtype=bool)
    dead[block.ids[block.units // 2 :]] = True
    trial = trial_of(other, survey, feed(other), ("CPUExecutionProvider",))
    assert prove(trial, [block], {block.name: block.units // 2}) == ((block,), ())
    apply(other.graph, survey, Ledger(dead=dead, arrays={}))
    restore(other)
    kept = np.flatnonzero(np.isin(inside.units, order[: block.units // 2]))
    want = run(masked(model, kept), feed(model))
    check_same(run(other, feed(model)), want)
    assert np.abs(want["y"] - run(model, feed(model))["y"]).max() > 1e-3
    assert not any(node.metadata_props for node in other.graph)


def test_a_norm_over_all_heads_loses_the_same_channels_of_each() -> None:
    whole = (
        WRITTEN.replace("$p2", "$p1")
        + "$p_unit = Div($p1, $p_root)\n$p_whole = Mul($p_unit, g$p)\n$pn = Reshape($p_whole, into$p)\n"
    )
    rng = np.random.default_rng(6)
    gains = {f"g{p}": rng.uniform(0.5, 2, count * SIZE) for p, count in (("q", HEADS), ("k", GROUPS))}
    given = {**GIVEN, **{name: gain.astype(np.float32) for name, gain in gains.items()}}
    other, survey, inside, _ = picked(rotary("constant tables", norms=[whole, whole], given=given))
    assert inside.normed == [False, False]
    assert [block.units for block in survey.blocks if block.kind == "qk"] == [SIZE // 2]
    narrowed_equals_masked(other, feed(other), kinds=("qk", "vo"))


@pytest.mark.parametrize(
    ("norm", "why"),
    [
        ("$pn = LayerNormalization<epsilon=0.3>($p2, g$p)\n", POSITIONS),
        (f"{NORMS['divided']}$p_extra = Relu($p_mean)\n", POSITIONS),  # the mean has another reader
        (f"{NORMS['divided'].replace('$pn', '$p_scaled')}$pn = Relu($p_scaled)\n", BENDS),
    ],
)
def test_what_else_depends_on_all_channels_is_refused_by_name(norm: str, why: str) -> None:
    extra = {"gq": GAINS[0], "gk": GAINS[1]} | ({} if "Layer" in norm else GIVEN)
    model = rotary("none", norms=[norm, norm], given=extra)
    if "$p_extra" in norm:
        value = next(node.outputs[0] for node in model.graph if node.outputs[0].name == "q_extra")
        model.graph.outputs.append(value)
    found = rotatable(model, survey_of(model, feed(model)).facts, ("qk",))
    assert not any(one.kind == "qk" for one in found.heads.values())
    assert why in [refusal.reason for refusal in found.refusals]


def test_channels_are_ranked_by_what_is_left_of_them_after_the_norm() -> None:
    rng = np.random.default_rng(0)
    count, width = 4000, 6
    sizes = np.array([[1, 2, 3, 1, 2, 3], [40, 90, 10, 60, 20, 30]])[:, None]  # one head is large: norms undo that
    gains = np.array([1.0, 0.2, 0.6, 3.0, 0.5, 0.1])
    heads = [rng.normal(size=(2, count, width)) * sizes for _ in range(2)]

    def sums(x: Floats) -> Stats:
        return Stats(gram=(x**2).sum(axis=0), total=x.sum(axis=0), count=len(x))

    after = [x / np.sqrt((x**2).mean(axis=2, keepdims=True)) * gains for x in heads]
    apart = [of_unit_size([[sums(x)] for x in side]) for side in heads]
    order = order_of_pairs(*apart, [sums(x.reshape(-1, width)) for x in after], np.arange(width), normed=True)
    lost = sum((q**2).mean(axis=0) * (k**2).mean(axis=0) for q, k in zip(*after, strict=True))
    assert order.tolist() == np.argsort(-lost).tolist()
