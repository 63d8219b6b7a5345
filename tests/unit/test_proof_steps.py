"""The proof where the last digit decides: ties that TopK or NonMaxSuppression ranks, numbers between two levels."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.allocation.balance import by_units
from onnxgrail.calibration import agreement, proof
from onnxgrail.calibration.agreement import trial_of
from onnxgrail.calibration.proof import prove
from onnxgrail.calibration.runtime.session import CPU
from onnxgrail.core import Block, Refusal
from onnxgrail.graph.cuts.steps import steps
from onnxgrail.graph.ops import rule
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.survey import Survey
from tests.oracle import survey_of
from tests.tiny import Weights, feed, ints, lines, scalar, tiny

WIDE = 64  # 64 channels of 3 x 3 are more than the runtime adds up in one go, so fewer are added up in another order


def proved(model: ir.Model, survey: Survey | None = None) -> tuple[tuple[Block, ...], tuple[Refusal, ...]]:
    survey = survey_of(model, feed(model)) if survey is None else survey
    kept = by_units(survey.blocks, 0.4, 1)
    return prove(trial_of(model, survey, feed(model), CPU), survey.blocks, kept)


def eighths(*shape: int) -> np.ndarray:
    """Few different numbers, so that many sums are equal in exact arithmetic and none in floats."""
    return (np.random.default_rng(0).integers(-9, 10, shape) * np.float32(0.1)).astype(np.float32)


def quantised(depth: int) -> ir.Model:
    """Convolutions between QuantizeLinear and DequantizeLinear; every second sum lies between two levels."""
    layer = """
        dw$i = DequantizeLinear(w$i, sw, zero)
        c$i = Conv<pads=[1,1,1,1]>(x$i, dw$i)
        r$i = Relu(c$i)
        q$i = QuantizeLinear(r$i, sy$i, zero)
        x$j = DequantizeLinear(q$i, sy$i, zero)"""
    body = "xq = QuantizeLinear(x, sx, zero)\nx0 = DequantizeLinear(xq, sx, zero)"
    body += "".join(lines(layer, i=i, j=i + 1) for i in range(depth))
    rng = np.random.default_rng(0)
    weights: dict[str, tuple[int, ...] | np.ndarray] = {"sx": scalar(0.1), "sw": scalar(0.05), "wl": (4, WIDE, 1, 1)}
    weights["zero"] = np.array(0, np.int8)
    for i in range(depth):
        weights |= {f"w{i}": rng.integers(-9, 10, (WIDE, 3 if i == 0 else WIDE, 3, 3)).astype(np.int8)}
        weights |= {f"sy{i}": scalar(0.01 if i == 0 else 0.09)}
    return tiny("float[N,3,12,12] x => float[] y", f"{body}\ny = Conv(x{depth}, wl)", weights)


STEM = """
    h = Conv<pads=[1,1,1,1]>(x, w0)
    r = Relu(h)
    h1 = Conv<pads=[1,1,1,1]>(r, w1)
    r1 = Relu(h1)
    scores = Conv(r1, w2)
    boxes = Conv<pads=[1,1,1,1]>(r1, w3)
"""
FLAT = "s1 = Flatten(scores)\nb1 = Reshape(boxes, four)\n"
RANKED: dict[str, tuple[str, Weights]] = {
    "TopK": (f"{FLAT}v, i = TopK(s1, many)\nj = Unsqueeze(i, last)\ny = GatherND<batch_dims=1>(b1, j)", {}),
    "ArgMax": (f"{FLAT}i = ArgMax<axis=1>(s1)\nj = Unsqueeze(i, last)\ny = GatherND<batch_dims=1>(b1, j)", {}),
    "NonMaxSuppression": (
        f"{FLAT}p = Abs(b1)\ns2 = Unsqueeze(s1, one)\nn = NonMaxSuppression(p, s2, most, iou)\ny = Cast<to=1>(n)",
        {"most": np.array([40]), "iou": scalar(0.5)[None]},
    ),
    "Greater": (
        f"{FLAT}m = ReduceMax(s1)\ng = Less(s1, m)\nl = Greater(s1, zero)\nb = And(g, l)\ny = Cast<to=1>(b)",
        {},
    ),
}


def mirrored(array: np.ndarray) -> np.ndarray:
    return (array + array[..., ::-1]).astype(np.float32)


def detector(op: str) -> ir.Model:
    """Scores of which the left and the right half of a mirrored image differ by the last digit, and boxes differ."""
    text, weights = RANKED[op]
    given: dict[str, tuple[int, ...] | np.ndarray] = {
        "w0": mirrored(eighths(WIDE, 3, 3, 3)),
        "w1": mirrored(eighths(WIDE, WIDE, 3, 3)),
        "w2": eighths(1, WIDE, 1, 1),
        "w3": eighths(4, WIDE, 3, 3),
        "four": ints(0, -1, 4),
        "many": ints(20),
        "last": ints(-1),
        "one": ints(1),
        "zero": scalar(0),
    }
    used = {name: weight for name, weight in (given | dict(weights)).items() if name in f"{STEM}{text}"}
    return tiny("float[N,3,12,12] x => float[] y", STEM + text, used)


@pytest.mark.parametrize("room", [agreement.AT_ONCE, 1])
@pytest.mark.parametrize("depth", [3, 4])
def test_a_level_that_flips_costs_no_block(depth: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where all that the steps read is compared in one run, nor tensor by tensor."""
    monkeypatch.setattr(agreement, "AT_ONCE", room)
    model = quantised(depth)
    blocks, refusals = proved(model)
    assert (len(blocks), refusals) == (depth, ())


@pytest.mark.parametrize("op", RANKED)
def test_ties_cost_no_block(op: str) -> None:
    model = detector(op)
    given = {"x": mirrored(feed(model)["x"])}
    survey = survey_of(model, given)
    assert op in {step.op for step in steps(model, survey.facts)}
    kept = by_units(survey.blocks, 0.4, 1)
    blocks, refusals = prove(trial_of(model, survey, given, CPU), survey.blocks, kept)
    assert (len(blocks), refusals) == (len(survey.blocks), ())


def test_what_is_rounded_with_a_random_number_is_compared_in_front_of_it() -> None:
    model = tiny(
        "float[N,5] x => float[] y",
        "h = MatMul(x, w0)\nr = Relu(h)\ns = MatMul(r, w1)\nn = RandomNormalLike(s)\nt = Add(s, n)\ny = MatMul(t, w2)",
        {"w0": (5, 8), "w1": (8, 6), "w2": (6, 4)},
    )
    blocks, refusals = proved(model)
    assert (sorted(b.units for b in blocks), refusals) == ([8], ())


def passing(site: Site) -> None:
    """A rule that lets everything through."""
    site.emit(site.marks(0))


def lying(end: str) -> ir.Model:
    """A Softmax over channels, of which the rule says that they can go, and after it a step."""
    return tiny(
        "float[N,5] x => float[] y, int64[] i",
        f"a = MatMul(x, w0)\nb = Softmax(a)\nc = MatMul(b, w1)\nd = Relu(c)\ne = MatMul(d, w2)\n{end}",
        {"w0": (5, 8), "w1": (8, 7), "w2": (7, 4), "s": scalar(0.01), "z": np.array(0, np.int8)},
    )


@pytest.mark.parametrize(
    ("end", "place"),
    [
        ("q = QuantizeLinear(e, s, z)\ny = DequantizeLinear(q, s, z)\ni = Cast<to=7>(y)", "e, which QuantizeLinear"),
        ("i = ArgMax<axis=1>(e)\ny = Cast<to=1>(i)", "e, which ArgMax"),
    ],
)
def test_a_rule_that_lies_in_front_of_a_step_is_found_there(
    monkeypatch: pytest.MonkeyPatch, end: str, place: str
) -> None:
    monkeypatch.setitem(rule._RULES, ("", "Softmax"), [(1, passing)])
    blocks, (refusal,) = proved(lying(end))
    assert [b.units for b in blocks] == [7]
    assert refusal.value == "w0"
    assert place in refusal.reason


def test_a_step_that_is_rewritten_wrongly_is_no_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with equal inputs and different outputs is wrong: rounding is not the cause."""

    def halved(cut: Cut) -> None:
        cut.set_operand(1, np.array(cut.facts.values[cut.input_name(1)] / 2, np.float32), "scale")

    monkeypatch.setitem(rule._NARROWS, ("", "QuantizeLinear"), halved)
    model = tiny(
        "float[N,5] x => float[] y",
        "a = MatMul(x, w0)\nq = QuantizeLinear(a, s, z)\nb = DequantizeLinear(q, s, z)\nc = MatMul(b, w1)\n"
        "d = Relu(c)\ny = MatMul(d, w2)",
        {"w0": (5, 8), "w1": (8, 7), "w2": (7, 4), "s": scalar(0.05), "z": np.array(0, np.int8)},
    )
    blocks, (refusal,) = proved(model)
    assert [b.units for b in blocks] == [7]
    assert "QuantizeLinear_1 makes something else of the same numbers" in refusal.reason


def test_an_output_of_numbers_is_judged_by_what_it_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segmentation net may put out nothing but the class of each pixel."""
    monkeypatch.setitem(rule._RULES, ("", "Softmax"), [(1, passing)])
    model = tiny(
        "float[N,5] x => int64[] i",
        "a = MatMul(x, w0)\nb = Softmax(a)\nc = MatMul(b, w1)\ni = ArgMax<axis=1>(c)",
        {"w0": (5, 8), "w1": (8, 7)},
    )
    blocks, (refusal,) = proved(model)
    assert not blocks
    assert "c, which ArgMax" in refusal.reason


def test_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that cannot be proved in time is left alone, and the refusal says so."""
    monkeypatch.setitem(rule._RULES, ("", "Softmax"), [(1, passing)])
    monkeypatch.setattr(proof, "RUNS", 5)
    seen = []
    original = agreement.doubt
    monkeypatch.setattr(proof, "doubt", lambda *some: seen.append(1) or original(*some))
    layers, source = [], "x"
    weights: dict[str, tuple[int, ...]] = {}
    for i in range(8):
        layers.append(f"h{i} = MatMul({source}, u{i})\nr{i} = Softmax(h{i})\nz{i} = MatMul(r{i}, d{i})")
        weights |= {f"u{i}": (5, 6 + i), f"d{i}": (6 + i, 5)}
        source = f"z{i}"
    model = tiny("float[N,5] x => float[] y", "\n".join(layers).replace("z7", "y"), weights)
    survey = survey_of(model, feed(model))
    blocks, refusals = proved(model, survey)
    assert len(seen) == 5
    assert len(blocks) + len(refusals) == len(survey.blocks)
    assert any("not proved" in r.reason for r in refusals)


@pytest.mark.parametrize("tipping", [1, 2])
def test_one_block_stays_where_the_others_then_give_the_same_levels(
    tipping: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only with the units that really go; where leaving out one does not help, all blocks go."""
    model = quantised(3)
    survey = survey_of(model, feed(model))
    guilty = {block.name for block in survey.blocks[:tipping]}
    monkeypatch.setattr(
        proof, "doubt", lambda _trial, some, _dead: "a level" if guilty & {b.name for b in some} else ""
    )
    monkeypatch.setattr(proof, "doubt_by_steps", lambda *_: "")
    dead = np.zeros(survey.ids, dtype=bool)
    for block in survey.blocks:
        dead[block.ids[:8]] = True
    common = (trial_of(model, survey, feed(model), CPU), survey.blocks, by_units(survey.blocks, 0.4, 1))
    blocks, refusals = prove(*common, dead=dead)
    assert (len(blocks), [r.reason for r in refusals]) == ((2, [proof.TIPPED]) if tipping == 1 else (3, []))
    assert len(prove(*common)[0]) == 3


@pytest.mark.filterwarnings("error")
def test_what_is_infinite_in_both_graphs_is_no_difference() -> None:
    array = np.array([np.inf, -np.inf, np.nan, 1.0])
    assert agreement._distance(array, array) == 0
    assert agreement._distance(array, -array) == np.inf
