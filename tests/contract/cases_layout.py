"""Cases of the rules in `ops/layout.py`."""

from __future__ import annotations

from tests.contract.rule_case import Case
from tests.tiny import ints, scalar

RUNTIME = "computed at run time"
FULL = "an activation of full width that cannot be narrowed"
MANY = (0.25, 0.6, 0.9)  # few, an uneven number and all but one unit

CASES = [
    Case(
        op="Reshape",
        body="z = Reshape(h, s)",
        weights={"s": ints(-1, 128)},
        frame="pooled",
        width=128,
        note="flattened",
    ),
    Case(
        op="Reshape",
        body="z = Reshape<allowzero=1>(h, s)",
        weights={"s": ints(-1, 8, 8, 2)},
        frame="maps",
        note="allowzero",
    ),
    Case(op="Reshape", body="z = Reshape(h, s)", weights={"s": ints(0, -1, 8, 2)}, frame="maps", note="free-width"),
    Case(op="Reshape", body="z = Reshape(h, s)", weights={"s": ints(0, 0, 16, 1)}, frame="maps", note="copied"),
    Case(
        op="Reshape",
        body="r = Reshape(h, s)\nq = Mul(r, c)\nz = Reshape(q, t)",
        weights={"s": ints(0, 5, 4, 2), "c": (4, 1), "t": ints(0, 5, 8)},
        frame="tokens",
        units=(4,),
        note="heads",
    ),
    Case(
        op="Reshape",
        body="i = Shape<end=1>(h)\ns = Concat<axis=0>(i, t)\nz = Reshape(h, s)",
        weights={"t": ints(8, 8, 2)},
        frame="maps",
        note="computed",
    ),
    Case(
        op="Reshape",
        body="i = Shape<end=2>(h)\ns = Concat<axis=0>(i, t)\nz = Reshape(h, s)",
        weights={"t": ints(16, 1)},
        frame="maps",
        note="follows-itself",
    ),
    Case(
        op="Reshape",
        body="z = Reshape<shape=[3,8,16,1]>(h)",
        frame="maps",
        opset=4,
        units=(),
        refused="attribute",
        note="opset-4",
    ),
    Case(op="Flatten", body="z = Flatten(h)", frame="pooled", width=128),
    Case(op="Flatten", body="z = Flatten<axis=-1>(h)", frame="tokens", note="rows"),
    Case(
        op="Squeeze",
        ratios=MANY,
        body="p = GlobalMaxPool(h)\nz = Squeeze(p, a)",
        weights={"a": ints(2, 3)},
        frame="pooled",
    ),
    Case(
        op="Squeeze",
        ratios=MANY,
        body="p = GlobalMaxPool(h)\nz = Squeeze<axes=[2,3]>(p)",
        frame="pooled",
        opset=11,
        note="attribute",
    ),
    Case(op="Squeeze", ratios=MANY, body="p = GlobalMaxPool(h)\nz = Squeeze(p)", frame="pooled", note="all"),
    Case(op="Unsqueeze", body="p = Unsqueeze(h, a)\nq = Relu(p)\nz = Squeeze(q, a)", weights={"a": ints(1)}),
    Case(op="Unsqueeze", body="p = Unsqueeze<axes=[1]>(h)\nz = Squeeze<axes=[1]>(p)", opset=11, note="attribute"),
    Case(
        op="Transpose",
        body="t = Transpose<perm=[0,2,3,1]>(h)\nc = Mul(t, s)\nz = Transpose<perm=[0,3,1,2]>(c)",
        weights={"s": (8,)},
        frame="maps",
    ),
    Case(
        op="Transpose", body="t = Transpose(h)\nc = Mul(t, s)\nz = Transpose(c)", weights={"s": (8, 1)}, note="default"
    ),
    Case(
        op="Expand",
        body="p = ReduceMax(h, a)\nz = Expand(p, s)",
        weights={"a": ints(2, 3), "s": ints(1, 8, 4, 4)},
        frame="maps",
    ),
    Case(
        op="Expand",
        body="p = ReduceMax(h, a)\nz = Expand(p, s)",
        weights={"a": ints(2, 3), "s": ints(4, 1)},
        frame="maps",
        note="no-channels",
    ),
    Case(
        op="Expand",
        body="p = ReduceMax(h, a)\ni = Shape(h)\nz = Expand(p, i)",
        weights={"a": ints(2, 3)},
        frame="maps",
        note="computed",
    ),
    Case(op="Tile", body="z = Tile(h, s)", weights={"s": ints(1, 2)}, width=16, note="channels"),
    Case(op="Tile", body="z = Tile(h, s)", weights={"s": ints(1, 1, 2, 1)}, frame="maps", note="space"),
    Case(
        op="Slice",
        body="z = Slice(h, i, j, a)",
        weights={"i": ints(2), "j": ints(2**63 - 1), "a": ints(1)},
        width=6,
        units=(6,),
    ),
    Case(
        op="Slice",
        ratios=MANY,
        body="p = Slice(h, i, j, a)\nq = Slice(h, j, k, a)\nz = Mul(p, q)",
        width=4,
        units=(4,),
        note="halves",
        weights={"i": ints(0), "j": ints(4), "k": ints(2**63 - 1), "a": ints(-1)},
    ),
    Case(
        op="Slice",
        body="p = Slice(h, i, j, a, s)\nz = Slice(p, k, l, a)",
        frame="maps",
        note="space",
        weights={"i": ints(-1), "j": ints(-9), "a": ints(2), "s": ints(-1), "k": ints(1), "l": ints(3)},
    ),
    Case(
        op="Slice",
        body="z = Slice(h, i, j, a, s)",
        width=4,
        units=(),
        refused="every n-th channel",
        note="strided",
        weights={"i": ints(0), "j": ints(8), "a": ints(1), "s": ints(2)},
    ),
    Case(op="Slice", body="z = Slice<axes=[2], starts=[1], ends=[3]>(h)", frame="maps", opset=9, note="space-9"),
    Case(
        op="Slice",
        body="z = Slice<axes=[1], starts=[2], ends=[8]>(h)",
        width=6,
        opset=9,
        units=(),
        refused="opset below 10",
        note="channels-9",
    ),
    Case(op="Pad", body="z = Pad(h, p)", weights={"p": ints(0, 0, 1, 1, 0, 0, 1, 1)}, frame="maps", note="space"),
    Case(
        op="Pad",
        body="z = Pad(h, p, c, a)",
        weights={"p": ints(1, 2), "c": scalar(1), "a": ints(-1)},
        frame="maps",
        note="axes",
    ),
    Case(op="Pad", body='z = Pad<pads=[0,0,1,1,0,0,1,1], mode="reflect">(h)', frame="maps", opset=9, note="attribute"),
    Case(
        op="Pad", body="z = Pad(h, p)", weights={"p": ints(0, 1, 0, 1)}, width=10, units=(), refused="pads the channel"
    ),
]
