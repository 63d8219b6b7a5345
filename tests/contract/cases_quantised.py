"""Cases of the rules in `ops/quantised.py`, and of weights read through DequantizeLinear and in MatMulNBits."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from onnxgrail.core import Array
from tests.contract.rule_case import Case
from tests.tiny import scalar

MICROSOFT = "com.microsoft"
RANGES = {"int8": (-128, 128), "uint8": (0, 256), "int4": (-8, 8), "uint4": (0, 16), "int32": (-9999, 9999)}


def codes(shape: tuple[int, ...], kind: str = "int8", seed: int = 0) -> Array:
    """Integers over the whole range of a type."""
    numbers = np.random.default_rng(seed).integers(*RANGES[kind], shape)
    return numbers.astype(getattr(ml_dtypes, kind) if kind.endswith("4") else kind)


def scales(*shape: int, seed: int = 1, size: float = 0.01) -> Array:
    """Positive numbers that differ."""
    return (np.random.default_rng(seed).uniform(0.5, 1.5, shape) * size).astype(np.float32)


def weight(kind: str, scale: Array, *, zero: bool, shape: tuple[int, ...] = (8, 6)) -> dict[str, Array]:
    """Parts of a dequantised matrix; zero points near the middle of the range."""
    low, high = RANGES[kind]
    found = {"q": codes(shape, kind), "s": scale}
    if zero:
        middle = (low + high) // 2 + np.random.default_rng(2).integers(-2, 3, scale.shape)
        found["p"] = np.asarray(middle).astype(found["q"].dtype)
    return found


def matmul(note: str, attributes: str, parts: dict[str, Array], **choices: object) -> Case:
    """A MatMul whose weight is kept as integers."""
    names = "q, s, p" if "p" in parts else "q, s"
    body = f"v = DequantizeLinear{attributes}({names})\nz = MatMul(h, v)"
    width = parts["q"].shape[1]
    given = {"op": "DequantizeLinear", "width": width, "units": (width, 8), "opset": 21, **choices}
    return Case(body=body, weights=parts, note=note, **given)


KINDS = [
    matmul(f"{kind}-{name}-{'zero' if zero else 'symmetric'}", attributes, weight(kind, scale, zero=zero))
    for kind in ("int8", "uint8", "int4")
    for name, attributes, scale in (
        ("tensor", "", scalar(0.01)),
        ("axis0", "<axis=0>", scales(8)),
        ("axis1", "<axis=-1>", scales(6)),
    )
    for zero in (False, True)
]

FOLDED = [
    Case(
        op="Mul",
        body="f = Cast<to=1>(q)\nv = Mul(f, s)\nz = MatMul(h, v)",
        weights={"q": codes((8, 6), kind), "s": scale},
        width=6,
        units=(6, 8),
        note=f"cast-{kind}-{name}",
    )
    for kind in ("int8", "uint8")
    for name, scale in (("tensor", scales(1, 1)), ("axis0", scales(8, 1)), ("axis1", scales(1, 6)))
]
FOLDED.append(
    Case(
        op="Mul",
        body="f = Cast<to=1>(q)\nv = Mul(f, s)\nu = Mul(f, t)\na = MatMul(h, v)\nb = MatMul(g, u)\nz = Add(a, b)",
        weights={"q": codes((8, 6)), "s": scales(1, 6), "t": scales(1, 6, seed=2)},
        width=6,
        units=(6, 8, 8),
        note="cast-shared",
    )
)

BLOCKS = [
    matmul("blocks-k", "<axis=0, block_size=2>", weight("int4", scales(4, 6), zero=True), units=(4, 6)),
    matmul("blocks-n", "<axis=1, block_size=2>", weight("uint4", scales(8, 3), zero=True), units=(3, 8)),
    matmul("blocks-negative", "<axis=-2, block_size=4>", weight("int8", scales(2, 6), zero=False), units=(2, 6)),
    Case(
        op="DequantizeLinear",
        body="k = MatMul(h, u)\nv = DequantizeLinear<axis=0, block_size=4>(q, s)\nz = MatMul(k, v)",
        weights={"u": (8, 14), **weight("int8", scales(4, 6), zero=False, shape=(14, 6))},
        width=6,
        units=(3, 6, 8),
        opset=21,
        note="blocks-ragged",
    ),
]

TWO = {"q": codes((8, 6)), "s": scalar(0.01), "t": scalar(0.02)}
WEIGHTS = [
    Case(
        op="DequantizeLinear",
        body="v = DequantizeLinear(q, s)\nu = DequantizeLinear(q, s)\n"
        "a = MatMul(h, v)\nb = MatMul(g, u)\nz = Add(a, b)",
        weights=TWO,
        width=6,
        units=(6, 8),
        note="one-weight-dequantised-twice",
    ),
    Case(
        op="DequantizeLinear",
        body="v = DequantizeLinear(q, s)\nu = DequantizeLinear(q, t)\n"
        "a = MatMul(h, v)\nb = MatMul(g, u)\nz = Add(a, b)",
        weights=TWO,
        width=6,
        units=(6, 8, 8),
        note="two-weights-of-the-same-integers",
    ),
    Case(
        op="DequantizeLinear",
        body="v = DequantizeLinear(q, s)\nm = MatMul(h, v)\nk = ReduceMax(v)\nz = Mul(m, k)",
        weights=TWO,
        width=6,
        units=(),
        refused="also read by ReduceMax",
        by="ReduceMax",
        note="kept-whole",
    ),
    Case(
        op="DequantizeLinear",
        body="a = QuantizeLinear(f, s)\nv = DequantizeLinear(a, s)\nz = MatMul(h, v)",
        weights={"f": (8, 6), "s": scales(6)},
        width=6,
        units=(6, 8),
        opset=21,
        note="fake",
    ),
    Case(
        op="DequantizeLinear",
        body="a = QuantizeLinear<output_dtype=22>(f, s)\nv = DequantizeLinear(a, s)\nz = MatMul(h, v)",
        weights={"f": (8, 6), "s": scales(6, size=0.1)},
        width=6,
        units=(),
        refused="something else than plain tensors",
        by="MatMul",
        opset=21,
        note="fake-int4",
    ),
    Case(
        op="DequantizeLinear",
        body="v = DequantizeLinear<axis=0>(q, s)\nt = Transpose(v)\nz = MatMul(h, t)",
        weights={"q": codes((6, 8)), "s": scales(6)},
        width=6,
        units=(6, 8),
        note="transposed",
    ),
    Case(
        op="DequantizeLinear",
        body="v = DequantizeLinear(q, s)\nu = DequantizeLinear(r, s)\na = MatMul(h, v)\nz = MatMul(a, u)",
        weights={"q": codes((8, 6)), "r": codes((6, 6), seed=3), "s": scales(6)},
        width=6,
        units=(6, 6, 8),
        note="shared-scale",
    ),
    Case(
        op="DequantizeLinear",
        body="v = DequantizeLinear(q, s)\nb = DequantizeLinear<axis=0>(c, t)\nz = Gemm(h, v, b)",
        weights={"q": codes((8, 6)), "s": scales(6), "c": codes((6,), "int32"), "t": scales(6, size=1e-4)},
        width=6,
        units=(6, 8),
        note="bias",
    ),
    Case(
        op="DequantizeLinear",
        body="v = DequantizeLinear<axis=0>(q, s)\nb = DequantizeLinear<axis=0>(c, t)\nz = Conv(h, v, b)",
        weights={"q": codes((6, 8, 1, 1)), "s": scales(6), "c": codes((6,), "int32"), "t": scales(6, size=1e-4)},
        width=6,
        units=(6, 8),
        frame="maps",
        note="convolution",
    ),
    Case(
        op="DequantizeLinear",
        body="b = DequantizeLinear<axis=0>(c, t)\nk = MatMul(x, v)\n"
        "d = Add(h, b)\ne = Add(g, b)\nf = Add(k, b)\nz = Concat<axis=1>(d, e, f)",
        weights={"v": (6, 8), "c": codes((8,)), "t": scales(8)},
        width=24,
        units=(8, 8, 8),
        note="one-vector-cut-in-three-ways",
    ),
    Case(
        op="DequantizeLinear",
        domain=MICROSOFT,
        body="v = com.microsoft.DequantizeLinear<axis=1>(q, s, p)\nz = MatMul(h, v)",
        weights=weight("int8", scales(6), zero=True),
        width=6,
        units=(6, 8),
        note="weight",
    ),
]

ROUND = {"s": scalar(0.02), "p": np.uint8(128)}
ACTIVATIONS = [
    Case(op="QuantizeLinear", body="a = QuantizeLinear(h, s, p)\nz = DequantizeLinear(a, s, p)", weights=ROUND),
    Case(
        op="QuantizeLinear",
        body="a = QuantizeLinear(h, s)\nz = DequantizeLinear(a, s)",
        weights={"s": scales(8)},
        note="channels",
    ),
    Case(
        op="QuantizeLinear",
        body="a = QuantizeLinear<axis=-1>(h, s, p)\nz = DequantizeLinear<axis=-1>(a, s, p)",
        weights={"s": scales(8), "p": np.arange(120, 128, dtype=np.uint8)},
        frame="tokens",
        note="last-axis",
    ),
    Case(
        op="QuantizeLinear",
        body="a = QuantizeLinear<axis=1>(h, s)\nz = DequantizeLinear<axis=1>(a, s)",
        weights={"s": scales(5)},
        frame="tokens",
        note="another-axis",
    ),
    Case(
        op="QuantizeLinear",
        body="a = QuantizeLinear(h, t)\nz = DequantizeLinear(a, t)",
        inputs="float t",
        units=(),
        refused="computed at run time",
        note="run-time",
    ),
    Case(
        op="DequantizeLinear",
        body="a = QuantizeLinear<axis=2, block_size=4>(h, s)\nz = DequantizeLinear<axis=2, block_size=4>(a, s)",
        weights={"s": scales(3, 5, 2)},
        frame="tokens",
        units=(),
        refused="differs from block to block",
        by="QuantizeLinear",
        opset=21,
        note="blocks",
    ),
    *(
        Case(
            op=op,
            domain=MICROSOFT,
            body="a = com.microsoft.QuantizeLinear(h, s, p)\nz = com.microsoft.DequantizeLinear(a, s, p)",
            weights=ROUND,
        )
        for op in ("QuantizeLinear", "DequantizeLinear")
    ),
    Case(
        op="DynamicQuantizeLinear",
        body="a, s, p = DynamicQuantizeLinear(h)\nz = DequantizeLinear(a, s, p)",
        units=(),
        refused="one range over all channels",
    ),
]


def fused(
    op: str, arguments: str, *, domain: str = "", reason: str = "quantize", parts: str = "a", **choices: object
) -> Case:
    """A kernel between QuantizeLinear and DequantizeLinear that nothing passes; `@` in the arguments is a range."""
    call = f"{domain}.{op}".lstrip(".") + arguments.replace("@", "s, p")
    weights = {**ROUND, "o": np.int8(0), **choices.pop("weights", {})}
    body = f"a = QuantizeLinear(h, s, p)\nc = {call}\nz = {parts}"
    return Case(op=op, domain=domain, body=body, weights=weights, units=(), refused=reason, **choices)


BACK, ROOT = "DequantizeLinear(c, s, p)", "Cast<to=1>(c)"
SQUARE, TAPS = {"q": codes((8, 8))}, {"q": codes((8, 8, 1, 1))}
FUSED = [
    fused("QLinearConv", "(a, @, q, s, o, @)", weights=TAPS, frame="maps", parts=BACK),
    fused("QLinearMatMul", "(a, @, q, s, o, @)", weights=SQUARE, parts=BACK),
    fused("MatMulInteger", "(a, q, p)", weights=SQUARE, parts=ROOT),
    fused("ConvInteger", "(a, q, p)", weights={"q": codes((8, 8, 1, 1), "uint8")}, frame="maps", parts=ROOT),
    fused("QGemm", "(a, @, q, s, o, , @)", domain=MICROSOFT, weights=SQUARE, parts=BACK),
    fused("MatMulIntegerToFloat", "(a, q, s, s, p)", domain=MICROSOFT, weights=SQUARE, parts="Identity(c)"),
    fused("DynamicQuantizeMatMul", "(h, q, s)", domain=MICROSOFT, weights=SQUARE, parts="Identity(c)"),
    fused(
        "QAttention",
        "<num_heads=2>(a, q, b, s, s, , p, o)",
        domain=MICROSOFT,
        weights={"q": codes((8, 24)), "b": (24,)},
        frame="tokens",
        parts="Identity(c)",
    ),
    *(fused(op, "(a, @, a, @, @)", domain=MICROSOFT, parts=BACK) for op in ("QLinearAdd", "QLinearMul")),
    *(fused(op, "(a, @, @)", domain=MICROSOFT, parts=BACK) for op in ("QLinearSigmoid", "QLinearLeakyRelu")),
    fused("QLinearSoftmax", "<axis=1, opset=13>(a, @, @)", domain=MICROSOFT, parts=BACK),
    fused("QLinearGlobalAveragePool", "(a, @, @)", domain=MICROSOFT, frame="maps", parts=BACK),
    fused("QLinearAveragePool", "<kernel_shape=[2,2]>(a, @, @)", domain=MICROSOFT, frame="maps", parts=BACK),
    fused("QLinearConcat", "<axis=1>(@, a, @, a, @)", domain=MICROSOFT, width=16, parts=BACK),
    fused("QLinearWhere", "(i, a, @, a, @, @)", domain=MICROSOFT, weights={"i": np.arange(8) % 2 == 0}, parts=BACK),
]


def packed(note: str, bits: int, extra: str = "", **more: object) -> Case:
    """40 channels that a MatMulNBits reads in blocks of 16, the last one half full, between 8 and 6."""
    attributes = more.pop("attributes", "")
    rng = np.random.default_rng(bits)
    weights = {
        "u": (8, 40),
        "q": rng.integers(0, 256, (6, 3, 2 * bits)).astype(np.uint8),
        "s": scales(6, 3, size=0.1 / 2 ** (bits - 4)),
        **more.pop("weights", {}),
    }
    call = f"<K=40, N=6, bits={bits}, block_size=16{attributes}>(k, q, s{extra})"
    body = f"k = MatMul(h, u)\nz = com.microsoft.MatMulNBits{call}"
    given = {"units": (2, 6, 8), **more}
    return Case(op="MatMulNBits", domain=MICROSOFT, body=body, weights=weights, width=6, note=note, **given)


ZEROS = (np.random.default_rng(5).integers(5, 11, (2, 6, 3)) * [[[1]], [[16]]]).sum(axis=0).astype(np.uint8)
PACKED = [
    *(packed(f"{bits}-bits", bits) for bits in (4, 8)),
    packed("4-bits-zeros", 4, ", p", weights={"p": ZEROS[:, :2]}),
    packed("8-bits-zeros", 8, ", p", weights={"p": ZEROS}),
    packed("fractions", 4, ", p", weights={"p": scales(6, 3, size=8)}),
    packed("flat", 4, ", p", weights={"s": scales(18, size=0.1), "p": ZEROS[:, :2].ravel()}),
    packed("bias", 4, ", , , b", weights={"b": (6,)}),
    packed("exact", 4, attributes=", accuracy_level=0"),
    packed("reordered", 4, ", , i", weights={"i": (np.arange(48) // 16).astype(np.int32)}, units=(8,)),
]

CASES = [*KINDS, *FOLDED, *BLOCKS, *WEIGHTS, *ACTIVATIONS, *FUSED, *PACKED]
