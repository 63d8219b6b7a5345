"""Cases of the rules in `ops/layout.py`, `ops/join.py` and of those that read sizes."""

from __future__ import annotations

import numpy as np

from tests.contract.rule_case import Case
from tests.tiny import ints, scalar

RUNTIME = "computed at run time"
FULL = "an activation of full width that cannot be narrowed"

LAYOUT = [
    Case(op="Reshape", body="z = Reshape(h, s)", weights={"s": ints(-1, 128)}, frame="pooled", width=128, note="flattened"),
    Case(op="Reshape", body="z = Reshape<allowzero=1>(h, s)", weights={"s": ints(-1, 8, 8, 2)}, frame="maps", note="allowzero"),
    Case(op="Reshape", body="z = Reshape(h, s)", weights={"s": ints(0, -1, 8, 2)}, frame="maps", note="free-width"),
    Case(op="Reshape", body="z = Reshape(h, s)", weights={"s": ints(0, 0, 16, 1)}, frame="maps", note="copied"),
    Case(op="Reshape", body="r = Reshape(h, s)\nq = Mul(r, c)\nz = Reshape(q, t)",
         weights={"s": ints(0, 5, 4, 2), "c": (4, 1), "t": ints(0, 5, 8)}, frame="tokens", units=(4,), note="heads"),
    Case(op="Reshape", body="i = Shape<end=1>(h)\ns = Concat<axis=0>(i, t)\nz = Reshape(h, s)", weights={"t": ints(8, 8, 2)},
         frame="maps", note="computed"),
    Case(op="Reshape", body="i = Shape<end=2>(h)\ns = Concat<axis=0>(i, t)\nz = Reshape(h, s)", weights={"t": ints(16, 1)},
         frame="maps", note="follows-itself"),
    Case(op="Reshape", body="z = Reshape<shape=[3,8,16,1]>(h)", frame="maps", opset=4, units=(), refused="attribute",
         note="opset-4"),
    Case(op="Flatten", body="z = Flatten(h)", frame="pooled", width=128),
    Case(op="Flatten", body="z = Flatten<axis=-1>(h)", frame="tokens", note="rows"),
    Case(op="Squeeze", body="p = GlobalMaxPool(h)\nz = Squeeze(p, a)", weights={"a": ints(2, 3)}, frame="pooled"),
    Case(op="Squeeze", body="p = GlobalMaxPool(h)\nz = Squeeze<axes=[2,3]>(p)", frame="pooled", opset=11, note="attribute"),
    Case(op="Squeeze", body="p = GlobalMaxPool(h)\nz = Squeeze(p)", frame="pooled", note="all"),
    Case(op="Unsqueeze", body="p = Unsqueeze(h, a)\nq = Relu(p)\nz = Squeeze(q, a)", weights={"a": ints(1)}),
    Case(op="Unsqueeze", body="p = Unsqueeze<axes=[1]>(h)\nz = Squeeze<axes=[1]>(p)", opset=11, note="attribute"),
    Case(op="Transpose", body="t = Transpose<perm=[0,2,3,1]>(h)\nc = Mul(t, s)\nz = Transpose<perm=[0,3,1,2]>(c)",
         weights={"s": (8,)}, frame="maps"),
    Case(op="Transpose", body="t = Transpose(h)\nc = Mul(t, s)\nz = Transpose(c)", weights={"s": (8, 1)}, note="default"),
    Case(op="Expand", body="p = ReduceMax(h, a)\nz = Expand(p, s)", weights={"a": ints(2, 3), "s": ints(1, 8, 4, 4)}, frame="maps"),
    Case(op="Expand", body="p = ReduceMax(h, a)\nz = Expand(p, s)", weights={"a": ints(2, 3), "s": ints(4, 1)}, frame="maps",
         note="no-channels"),
    Case(op="Expand", body="p = ReduceMax(h, a)\ni = Shape(h)\nz = Expand(p, i)", weights={"a": ints(2, 3)}, frame="maps",
         note="computed"),
    Case(op="Tile", body="z = Tile(h, s)", weights={"s": ints(1, 2)}, width=16, note="channels"),
    Case(op="Tile", body="z = Tile(h, s)", weights={"s": ints(1, 1, 2, 1)}, frame="maps", note="space"),
    Case(op="Slice", body="z = Slice(h, i, j, a)", weights={"i": ints(2), "j": ints(2**63 - 1), "a": ints(1)}, width=6,
         units=(6,)),
    Case(op="Slice", body="p = Slice(h, i, j, a)\nq = Slice(h, j, k, a)\nz = Mul(p, q)", width=4, units=(4,), note="halves",
         weights={"i": ints(0), "j": ints(4), "k": ints(2**63 - 1), "a": ints(-1)}),
    Case(op="Slice", body="p = Slice(h, i, j, a, s)\nz = Slice(p, k, l, a)", frame="maps", note="space",
         weights={"i": ints(-1), "j": ints(-9), "a": ints(2), "s": ints(-1), "k": ints(1), "l": ints(3)}),
    Case(op="Slice", body="z = Slice(h, i, j, a, s)", width=4, units=(), refused="every n-th channel", note="strided",
         weights={"i": ints(0), "j": ints(8), "a": ints(1), "s": ints(2)}),
    Case(op="Slice", body="z = Slice<axes=[2], starts=[1], ends=[3]>(h)", frame="maps", opset=9, note="space-9"),
    Case(op="Slice", body="z = Slice<axes=[1], starts=[2], ends=[8]>(h)", width=6, opset=9, units=(), refused="opset below 10",
         note="channels-9"),
    Case(op="Pad", body="z = Pad(h, p)", weights={"p": ints(0, 0, 1, 1, 0, 0, 1, 1)}, frame="maps", note="space"),
    Case(op="Pad", body="z = Pad(h, p, c, a)", weights={"p": ints(1, 2), "c": scalar(1), "a": ints(-1)}, frame="maps", note="axes"),
    Case(op="Pad", body='z = Pad<pads=[0,0,1,1,0,0,1,1], mode="reflect">(h)', frame="maps", opset=9, note="attribute"),
    Case(op="Pad", body="z = Pad(h, p)", weights={"p": ints(0, 1, 0, 1)}, width=10, units=(), refused="pads the channel"),
]  # fmt: skip

JOIN = [
    Case(op="Concat", body="z = Concat<axis=1>(h, g)", width=16, units=(8, 8)),
    Case(op="Concat", body="z = Concat<axis=-1>(h, x2)", inputs="float[N,4] x2", width=12, note="with-input"),
    Case(op="Concat", body="z = Concat<axis=-1>(h, h)", width=16, note="twice"),
    Case(op="Concat", body="z = Concat<axis=1>(h, g)", frame="tokens", note="along-tokens"),
    Case(op="Concat", body="z = Concat<axis=0>(h, c)", weights={"c": (1, 8)}, note="constant-row"),
    Case(op="Concat", body="z = Concat<axis=1>(h, x2)", inputs="float[N,2,8] x2", frame="tokens", units=(),
         refused="another piece of the Concat", note="along-input"),
    Case(op="Split", body="p, q = Split<axis=1, num_outputs=2>(h)\nz = Mul(p, q)", width=4, units=(4,), note="gate"),
    Case(op="Split", body="p, q = Split<axis=-1>(h, s)\nr = Relu(p)\nz = Concat<axis=-1>(q, r)", weights={"s": ints(3, 5)},
         note="sizes"),
    Case(op="Split", body="p, q, r = Split<axis=1, num_outputs=3>(h)\ns = Relu(p)\nz = Concat<axis=1>(r, s)", width=5,
         units=(5,), note="uneven"),
    Case(op="Split", body="p, q = Split<axis=1, split=[2,6]>(h)\nr = Relu(q)\nz = Concat<axis=1>(p, r)", opset=11,
         note="attribute"),
    Case(op="Split", body="p, q = Split<axis=1>(h)\nr = Relu(q)\nz = Concat<axis=1>(p, r)", opset=11, note="default-11"),
    Case(op="Split", body="p, q = Split<axis=1>(h)\nr = Relu(q)\nz = Concat<axis=1>(p, r)", opset=13, note="default-13"),
    Case(op="Gather", body="z = Gather<axis=1>(h, i)", weights={"i": ints(3, 0, -1, 5)}, width=4, units=(4,), note="channels"),
    Case(op="Gather", body="z = Gather<axis=1>(h, i)", weights={"i": ints(7, 6, 5, 4, 3, 2, 1, 0)}, note="permuted"),
    Case(op="Gather", body="z = Gather<axis=1>(h, i)", weights={"i": np.array(2)}, frame="tokens", note="one-token"),
    Case(op="Gather", body="z = Gather<axis=1>(h, i)", weights={"i": ints(1, 1, 0)}, frame="tokens", note="tokens"),
    Case(op="Gather", body="e = Gather(v, ids)\nz = Add(h, e)", weights={"v": (7, 8)}, inputs="int64[N,5] ids", frame="tokens",
         note="embedding"),
    Case(op="Gather", body="z = Gather<axis=1>(h, ids)", inputs="int64[4] ids", width=4, units=(), refused=RUNTIME,
         note="from-input"),
    Case(op="Gather", body="b = Greater(h, c)\ni = Cast<to=7>(b)\ne = Gather(v, i)\nz = ReduceSum<keepdims=0>(e, a)", width=4,
         weights={"v": (7, 4), "c": scalar(0), "a": ints(1)}, units=(4,), refused="", note="index-from-channels"),
    Case(op="GatherND", body="z = GatherND(h, i)", weights={"i": np.array([[0], [2]])}, frame="tokens", note="rows"),
    Case(op="GatherND", body="g0 = GatherND<batch_dims=1>(h, i)\nz = Unsqueeze(g0, a)", weights={"i": ints(1, 0, 2)[:, None],
         "a": ints(0)}, width=3, units=(), refused=RUNTIME, note="channels"),
    Case(op="GatherElements", body="z = GatherElements<axis=1>(h, i)", inputs="int64[N,8] i", units=(), refused=RUNTIME),
    Case(op="GatherElements", body="z = GatherElements<axis=0>(h, i)", weights={"i": np.zeros((2, 8), np.int64)}, units=(),
         refused=RUNTIME, note="rows"),
]  # fmt: skip

SIZES = [
    Case(op="Shape", body="s = Shape(h)\nr = Relu(h)\nz = Reshape(r, s)"),
    Case(op="Size", body="s = Size(h)\nm = Min(s, o)\nf = Cast<to=1>(m)\nz = Div(h, f)", weights={"o": np.array(2)}),
    Case(op="Range", body="s = Shape<start=1, end=2>(h)\nt = Squeeze(s)\np = Range(o, t, i)\ne = Gather(v, p)\nz = Add(h, e)",
         weights={"o": np.array(0), "i": np.array(1), "v": (9, 8)}, frame="tokens"),
    Case(op="ConstantOfShape", body="s = Shape(h)\nc = ConstantOfShape<value = float[1] {2.0}>(s)\nz = Mul(h, c)", units=(),
         refused=FULL, by="Mul"),
    Case(op="ConstantOfShape", body="s = Shape<end=1>(h)\nt = Concat<axis=0>(s, o)\nc = ConstantOfShape(t)\nz = Add(h, c)",
         weights={"o": ints(1)}, note="rows"),
    Case(op="EyeLike", body="e = EyeLike(h)\nz = Add(h, e)", units=(), refused=FULL, by="Add"),
    Case(op="NonZero", body="i = NonZero(h)\nt = Transpose(i)\nv = GatherND(h, t)\nr = Shape<end=2>(h)\nq = Reshape(v, r)\n"
         "z = Add(h, q)", units=(), refused="positions of nonzero channels"),
]  # fmt: skip

CASES = [*LAYOUT, *JOIN, *SIZES]
