"""Cases of the rules in `ops/reduce.py`."""

from __future__ import annotations

import numpy as np

from tests.contract.rule_case import Case
from tests.tiny import batch_norm, ints

MIXED = "mixes the whole channel axis"
REDUCTIONS = (
    "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp",
)  # fmt: skip
POSITIVE = ("ReduceProd", "ReduceLogSum")
SPACE = {"a": ints(2, 3)}
CHANNELS = {"a": ints(1)}

CASES = [
    *(Case(op=op, body=f"z = {op}(h, a)", weights=SPACE, frame="maps", note="space") for op in REDUCTIONS),
    *(
        Case(op=op, body=f"p = Sigmoid(h)\nz = {op}(p, a)", weights=SPACE, frame="maps", note="space")
        for op in POSITIVE
    ),
    *(
        Case(op=op, body=f"r = {op}(h, a)\nz = Mul(h, r)", weights=CHANNELS, frame="maps", units=(), refused=MIXED)
        for op in ("ReduceMean", "ReduceL2", "ReduceMax")
    ),
    Case(
        op="ReduceMean",
        body="z = ReduceMean<keepdims=0>(h, a)",
        weights={"a": ints(-1, -2)},
        frame="pooled",
        note="dropped",
    ),
    Case(op="ReduceMean", body="z = ReduceMean<axes=[1], keepdims=0>(h)", frame="tokens", opset=13, note="attribute"),
    Case(op="ReduceSum", body="r = ReduceSum(h)\nz = Mul(h, r)", units=(), refused=MIXED, note="all"),
    Case(op="ReduceSum", body="z = ReduceSum<noop_with_empty_axes=1>(h)", note="noop"),
    *(
        Case(op=op, body=f"r = {op}<axis=2>(h)\nz = Cast<to=1>(r)", frame="maps", note="space")
        for op in ("ArgMax", "ArgMin")
    ),
    Case(op="ArgMax", body="r = ArgMax<axis=-1>(h)\nf = Cast<to=1>(r)\nz = Mul(h, f)", units=(), refused=MIXED),
    *(
        Case(op=op, body=f"z = {op}<axis=-1>(h)", frame="maps", note="space")
        for op in ("Softmax", "LogSoftmax", "Hardmax")
    ),
    *(
        Case(op=op, body=f"z = {op}<axis=1>(h)", frame="maps", units=(), refused=MIXED)
        for op in ("Softmax", "LogSoftmax", "Hardmax")
    ),
    Case(op="Softmax", body="z = Softmax(h)", frame="maps", units=(), refused=MIXED, opset=11, note="default-axis-11"),
    Case(op="CumSum", body="z = CumSum(h, a)", weights={"a": np.array(2)}, frame="maps", note="space"),
    Case(op="CumSum", body="z = CumSum(h, a)", weights={"a": np.array(-1)}, units=(), refused=MIXED),
    Case(op="LpNormalization", body="z = LpNormalization<axis=2>(h)", frame="maps", note="space"),
    Case(op="LpNormalization", body="z = LpNormalization(h)", units=(), refused=MIXED),
    Case(
        op="LayerNormalization",
        body="z = LayerNormalization<axis=-2>(h, a, b)",
        weights={"a": (4, 4), "b": (4, 4)},
        frame="maps",
        note="space",
    ),
    Case(
        op="LayerNormalization",
        body="z = LayerNormalization(h, a, b)",
        weights={"a": (8,), "b": (8,)},
        units=(),
        refused=MIXED,
    ),
    Case(
        op="RMSNormalization",
        body="z = RMSNormalization(h, a)",
        weights={"a": (4,)},
        frame="maps",
        note="space",
        opset=23,
    ),
    Case(
        op="RMSNormalization", body="z = RMSNormalization(h, a)", weights={"a": (8,)}, units=(), refused=MIXED, opset=23
    ),
    Case(
        op="SimplifiedLayerNormalization",
        body="z = SimplifiedLayerNormalization<axis=-1>(h, a)",
        weights={"a": (4,)},
        frame="maps",
        note="space",
    ),
    Case(
        op="BatchNormalization",
        body="z = BatchNormalization(h, s, t, u, v)",
        weights=batch_norm("stuv", 8),
        frame="maps",
    ),
    Case(
        op="BatchNormalization",
        body="z = BatchNormalization(h, s, t, u, v)",
        weights=batch_norm("stuv", 8),
        note="rows",
    ),
    Case(
        op="BatchNormalization",
        body="p = ReduceMax<keepdims=0>(h, a)\nz = BatchNormalization(h, p, t, u, v)",
        units=(),
        weights={"a": ints(0, 2, 3), **batch_norm("stuv", 8)},
        frame="maps",
        refused="computed at run time",
        note="computed-scale",
    ),
    Case(
        op="InstanceNormalization",
        body="z = InstanceNormalization(h, s, t)",
        weights={"s": (8,), "t": (8,)},
        frame="maps",
    ),
    Case(
        op="InstanceNormalization",
        body="r = Reshape(h, a)\nn = InstanceNormalization(r, s, t)\nq = Reshape(n, b)\nz = Mul(q, c)",
        weights={"a": ints(0, 4, -1), "b": ints(-1, 8, 4, 4), "s": (4,), "t": (4,), "c": (8, 1, 1)},
        units=(4,),
        frame="maps",
        note="as-group-norm",
    ),
    Case(
        op="GroupNormalization",
        body="z = GroupNormalization<num_groups=4>(h, s, t)",
        weights={"s": (4,), "t": (4,)},
        units=(4,),
        frame="maps",
        opset=18,
        note="18",
    ),
    Case(
        op="GroupNormalization",
        body="z = GroupNormalization<num_groups=4>(h, s, t)",
        weights={"s": (8,), "t": (8,)},
        units=(4,),
        frame="maps",
        opset=21,
        note="21",
    ),
    Case(
        op="GroupNormalization",
        body="z = GroupNormalization<num_groups=4>(h, x2, t)",
        weights={"t": (8,)},
        units=(),
        inputs="float[8] x2",
        refused="computed at run time",
        frame="maps",
        opset=21,
        note="scale-from-input",
    ),
    Case(op="LRN", body="z = LRN<size=3>(h)", frame="maps", units=(), refused="neighboring channels"),
]
