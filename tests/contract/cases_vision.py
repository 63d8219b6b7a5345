"""Cases of the rules in `ops/vision.py`."""

from __future__ import annotations

import numpy as np

from tests.contract.rule_case import Case
from tests.tiny import ints

SAMPLED = [
    Case(op="GridSample", body="z = GridSample(h, p)", inputs="float[N,5,3,2] p", frame="maps"),
    Case(
        op="GridSample",
        domain="com.microsoft",
        body="z = com.microsoft.GridSample(h, p)",
        inputs="float[N,5,3,2] p",
        frame="maps",
    ),
    Case(
        op="GridSample",
        body="r = Reshape(h, s)\np = Tanh(r)\nq = GridSample(g, p)\nz = Relu(q)",
        weights={"s": ints(0, 4, 16, 2)},
        frame="maps",
        units=(8,),
        refused="as coordinates",
        note="coordinates",
    ),
    Case(
        op="RoiAlign",
        body="z = RoiAlign<output_height=2, output_width=2>(h, boxes, rows)",
        weights={"boxes": np.float32([[0, 0, 3, 3], [1, 0, 3, 2]]), "rows": ints(0, 1)},
        frame="maps",
    ),
    Case(
        op="MaxRoiPool",
        body="z = MaxRoiPool<pooled_shape=[2,2]>(h, boxes)",
        weights={"boxes": np.float32([[0, 0, 0, 3, 3], [1, 1, 0, 3, 2]])},
        frame="maps",
    ),
    Case(
        op="RoiAlign",
        body="t = Transpose<perm=[1,0,2,3]>(h)\nr = RoiAlign<output_height=2, output_width=2>(t, boxes, rows)\n"
        "z = Transpose<perm=[1,0,2,3]>(r)",
        weights={"boxes": np.float32([[0, 0, 3, 3]] * 8), "rows": ints(*range(8))},
        frame="maps",
        units=(),
        refused="samples of the batch",
        note="samples",
    ),
    Case(
        op="AffineGrid",
        body="r = Reshape(h, s)\np = AffineGrid(r, size)\nt = Transpose<perm=[0,3,1,2]>(p)\nz = Relu(t)",
        weights={"s": ints(-1, 2, 3), "size": ints(64, 1, 4, 4)},
        frame="maps",
        width=2,
        inputs="float[1,1,1,1] unused",
        units=(),
        refused="as coordinates",
    ),
]

FOLDED = [
    Case(
        op="MaxUnpool",
        body="z = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(h, i)",
        inputs="int64[N,8,4,4] i",
        frame="maps",
        units=(),
        refused="number the channels",
    ),
    Case(
        op="Col2Im",
        body="r = Reshape(h, s)\nz = Col2Im(r, image, block)",
        weights={"s": ints(0, 8, 16), "image": ints(5, 5), "block": ints(2, 2)},
        frame="maps",
        width=2,
        units=(2,),
    ),
    Case(op="MeanVarianceNormalization", body="z = MeanVarianceNormalization<axes=[2,3]>(h)", frame="maps"),
    Case(op="MeanVarianceNormalization", body="z = MeanVarianceNormalization(h)", frame="maps", note="default"),
    Case(
        op="MeanVarianceNormalization",
        body="z = MeanVarianceNormalization<axes=[1,2,3]>(h)",
        frame="maps",
        units=(),
        refused="mixes the whole channel axis",
    ),
    Case(op="CenterCropPad", body="z = CenterCropPad<axes=[2,3]>(h, s)", weights={"s": ints(3, 5)}, frame="maps"),
    Case(
        op="CenterCropPad",
        body="z = CenterCropPad<axes=[1,2]>(h, s)",
        weights={"s": ints(6, 5)},
        frame="maps",
        width=6,
        units=(),
        refused="size of the channel axis",
    ),
    Case(
        op="DeformConv",
        body="z = DeformConv<kernel_shape=[2,2]>(h, v, p, b)",
        weights={"v": (6, 8, 2, 2), "b": (6,)},
        inputs="float[N,8,3,3] p",
        frame="maps",
        width=6,
        units=(6, 8),
    ),
    Case(
        op="DeformConv",
        body="z = DeformConv<kernel_shape=[2,2], group=4>(h, v, p, , m)",
        weights={"v": (12, 2, 2, 2)},
        inputs="float[N,8,3,3] p, float[N,4,3,3] m",
        frame="maps",
        width=12,
        units=(4,),
        note="grouped",
    ),
    Case(
        op="DeformConv",
        body="z = DeformConv<kernel_shape=[2,2], offset_group=2>(h, v, p)",
        weights={"v": (6, 8, 2, 2)},
        inputs="float[N,16,3,3] p",
        frame="maps",
        width=6,
        units=(6,),
        refused="offsets of its own",
        note="offset-groups",
    ),
]

CASES = [*SAMPLED, *FOLDED]
