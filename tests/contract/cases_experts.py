"""Cases of the rules in `ops/moe.py`."""

from __future__ import annotations

import numpy as np

from onnxgrail.core import Array
from tests.contract.rule_case import Case

MICROSOFT = "com.microsoft"
EXPERTS, INNER = 3, 10
SEVERAL = (0.25, 0.6, 0.9)
ROUTE = "r = MatMul(x, router)\n"
SUM = "\nz = Add(h, y0)"  # what MoE reads must live on: some releases of ONNX Runtime write over it
FLOATS = {
    "router": (6, EXPERTS),
    "up": (EXPERTS, INNER, 8),
    "b_up": (EXPERTS, INNER),
    "down": (EXPERTS, 8, INNER),
    "b_down": (EXPERTS, 8),
}
WIDE = {"up": (EXPERTS, 2 * INNER, 8), "b_up": (EXPERTS, 2 * INNER)}
RELU = 'activation_type="relu"'
GATED = 'activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.7, activation_beta=1.0, swiglu_limit=7.0'


def codes(*shape: int) -> Array:
    """Bytes of any kind."""
    return np.random.default_rng(len(shape) + shape[-1]).integers(0, 256, shape).astype(np.uint8)


def packed(
    inner: int, bits: int, size: int = 0, *, zeros: bool = False, fused: int = 1
) -> dict[str, Array | tuple[int, ...]]:
    """Weights of a QMoE with so many hidden channels; a block of `size` numbers has a scale, 0: a row."""
    found: dict[str, Array | tuple[int, ...]] = {"router": (6, EXPERTS)}
    for name, rows, columns in (("up", fused * inner, 8), ("down", 8, inner)):
        found[f"q_{name}"] = codes(EXPERTS, rows, columns * bits // 8)
        blocks = -(-columns // size) if size else 1
        scale = np.random.default_rng(1).uniform(0.01, 0.1, (EXPERTS, rows, blocks)).astype(np.float32)
        found[f"s_{name}"] = scale if size else scale[..., 0]
        if zeros:
            found[f"z_{name}"] = (
                codes(EXPERTS, rows, -(-blocks * bits // 8)) if size else codes(EXPERTS, rows * bits // 8)
            )
    return found


def quantised(bits: int, size: int = 0, *, zeros: bool = False) -> str:
    """The node."""
    block = f", block_size={size}" if size else ""
    beyond = ", , , , , z_up, z_down" if zeros else ""
    return (
        f'{ROUTE}y0 = com.microsoft.QMoE<k=2, activation_type="relu", expert_weight_bits={bits}{block}>'
        f"(h, r, q_up, s_up, , q_down, s_down{beyond}){SUM}"
    )


CASES = [
    Case(
        op="MoE",
        domain=MICROSOFT,
        ratios=SEVERAL,
        body=f'{ROUTE}y0 = com.microsoft.MoE<k=2, activation_type="relu">(h, r, up, b_up, down, b_down){SUM}',
        weights=FLOATS,
        units=(8, INNER),
    ),
    Case(
        op="MoE",
        domain=MICROSOFT,
        body=f'{ROUTE}y0 = com.microsoft.MoE<k=1, activation_type="silu">(h, r, up, , down){SUM}',
        weights={name: FLOATS[name] for name in ("router", "up", "down")},
        units=(8, INNER),
        note="without-biases",
    ),
    Case(
        op="MoE",
        domain=MICROSOFT,
        ratios=SEVERAL,
        body=f"{ROUTE}y0 = com.microsoft.MoE<k=2, {GATED}>(h, r, up, b_up, down, b_down){SUM}",
        weights=FLOATS | WIDE,
        units=(8, INNER),
        note="gated",
    ),
    Case(
        op="MoE",
        domain=MICROSOFT,
        body=f"r = Slice(h, one, four, one)\ny0 = com.microsoft.MoE<k=1, {RELU}>(h, r, up, , down){SUM}",
        weights={"one": np.array([1]), "four": np.array([4]), "up": FLOATS["up"], "down": FLOATS["down"]},
        units=(INNER,),
        refused="ranks the experts",
        note="router-of-channels",
    ),
    Case(
        op="MoE",
        domain=MICROSOFT,
        body=f'{ROUTE}t = Mul(up, scale)\ny0 = com.microsoft.MoE<k=1, activation_type="relu">(h, r, t, , down){SUM}',
        weights={name: FLOATS[name] for name in ("router", "up", "down")},
        inputs="float[1] scale",
        units=(),
        refused="computed at run time",
        note="computed",
    ),
    *(
        Case(
            op="QMoE",
            domain=MICROSOFT,
            ratios=SEVERAL,
            body=quantised(bits, zeros=zeros),
            weights=packed(12, bits, zeros=zeros),
            units=(4, 6) if bits == 4 else (8, 12),
            note=f"{bits}-bits{'-zeros' * zeros}",
        )
        for bits, zeros in ((4, False), (4, True), (8, False), (8, True))
    ),
    Case(
        op="QMoE",
        domain=MICROSOFT,
        ratios=SEVERAL,
        body=quantised(4, 16, zeros=True),
        weights=packed(64, 4, 16, zeros=True),
        units=(4,),
        refused="16 numbers shares a scale",
        note="blocks",
    ),
    Case(
        op="QMoE",
        domain=MICROSOFT,
        ratios=SEVERAL,
        body=f"{ROUTE}y0 = com.microsoft.QMoE<k=2, expert_weight_bits=8, {GATED}>"
        f"(h, r, q_up, s_up, b_up, q_down, s_down, b_down){SUM}",
        weights=packed(INNER, 8, fused=2) | {"b_up": WIDE["b_up"], "b_down": FLOATS["b_down"]},
        units=(8, INNER),
        note="gated",
    ),
]
