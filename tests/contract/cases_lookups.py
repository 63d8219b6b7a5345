"""Cases of weights in 4 bits that lookups in a table of pairs turn into floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgrail.core import Array
from onnxgrail.graph.stored.looked_up import pairs_of_a_byte
from tests.contract.cases_quantised import codes, scales
from tests.contract.rule_case import Case

CHAIN = "i = Cast<to=6>(q)\nn = Gather(t, i)\nm = Mul(n, {scale})\nv = Reshape(m, r)\n"
PICKED = "j = Cast<to=6>(p)\nc = Gather<axis=1>(s, j)\n"


def lookups(note: str, shape: tuple[int, ...], blocks: int, *, picked: bool = False, **more: Any) -> Case:
    """A weight (outputs, inputs, ...) with its bytes in blocks, or with the blocks of its bytes `picked`."""
    row = int(np.prod(shape[1:])) // 2
    sizes = (shape[0], row) if picked else (shape[0], blocks, row // blocks)
    scale = scales(shape[0], blocks, size=0.1)
    weights: dict[str, Array] = {"q": codes(sizes, "uint8"), "t": pairs_of_a_byte(), "r": np.array(shape, np.int64)}
    weights |= {"s": scale if picked else scale[..., None, None]}
    weights |= {"p": np.sort(np.arange(row) % blocks).astype(np.uint8)[:, None]} if picked else {}
    chain = (PICKED if picked else "") + CHAIN.format(scale="c" if picked else "s")
    given = {"op": "Reshape", "width": shape[0], "units": (shape[0], 4), "body": chain + more.pop("read"), **more}
    return Case(weights=weights, note=f"lookups-{note}", **given)


GEMM = "z = Gemm<transB=1>(h, v)"
MATRICES = [
    lookups("whole", (6, 8), 2, read=GEMM),
    lookups("single", (6, 8), 1, read=GEMM),
    lookups("picked", (6, 8), 3, picked=True, read=GEMM),
]
LOOKUPS = [
    *MATRICES,
    lookups("transposed", (6, 8), 2, read="u = Transpose(v)\nz = MatMul(h, u)"),
    lookups("taps", (6, 8, 3, 3), 4, read="z = Conv<pads=[1,1,1,1]>(h, v)", frame="maps"),
    lookups("even-taps", (6, 8, 1, 2), 4, read="z = Conv(h, v)", frame="maps", units=(6, 8)),
    lookups("picked-taps", (6, 8, 3, 3), 5, picked=True, read="z = Conv<pads=[1,1,1,1]>(h, v)", frame="maps"),
    lookups(
        "read-twice",
        (6, 8),
        2,
        read="a = Gemm<transB=1>(h, v)\nb = Gemm<transB=1>(g, v)\nz = Add(a, b)",
        units=(6, 4),
    ),
]
