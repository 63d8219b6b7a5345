"""A rule's test case: producer → op → consumer, beside a branch that must stay narrowable whatever the op does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxgrail.core import Array
from tests.tiny import lines, tiny

SIDE = 7  # units of the second branch

FRAMES = {  # input, producer and the shape of its weight, consumer; by what h and z are: rows, tokens, feature maps
    "rows": ("float[N,6] x", "$h = MatMul(x, $w)", (6, 8), "$y = MatMul($z, $w)"),
    "tokens": ("float[N,5,6] x", "$h = MatMul(x, $w)", (6, 8), "$y = MatMul($z, $w)"),
    "maps": ("float[N,3,4,4] x", "$h = Conv(x, $w)", (8, 3, 1, 1), "$y = Conv($z, $w)"),
    "pooled": ("float[N,3,4,4] x", "$h = Conv(x, $w)", (8, 3, 1, 1), "$y = MatMul($z, $w)"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op between a producer of h (8 channels) and a consumer of z.

    Attributes:
        op: what is tested; it must occur in the body.
        body: nodes from h to z; g is a second producer's output of the same shape, where it is used.
        frame: a key of `FRAMES`; width: channels of z; weights: of the body.
        units: of the blocks that are found beside the second branch.
        refused: part of the reason for which h's channels stay; by: the op that is named, when it is another one.
        ratios: at which it is tried.
        note: tells cases of one op apart; opset, imports, inputs, outputs, functions: of the model.
        interface: caches among inputs and outputs may be narrowed.
    """

    op: str
    body: str
    frame: str = "rows"
    width: int = 8
    weights: Mapping[str, tuple[int, ...] | Array] = field(default_factory=dict)
    units: tuple[int, ...] = (8,)
    refused: str = ""
    by: str = ""
    note: str = ""
    ratios: tuple[float, ...] = (0.5,)
    opset: int = 20
    domain: str = ""
    inputs: str = ""
    outputs: str = ""
    functions: str = ""
    interface: bool = False

    def __str__(self) -> str:
        name = f"{self.domain}.{self.op}".lstrip(".")
        return "-".join(part for part in (name, self.note, "refused" if self.refused else "") if part)


def build(case: Case) -> ir.Model:
    """The model of a case."""
    x, make, made, read = FRAMES[case.frame]
    contracted = (case.width, 5) if "MatMul" in read else (5, case.width, 1, 1)
    weights = {"w_in": made, "w_out": contracted, **case.weights}
    body = [lines(make, h="h", w="w_in")]
    if "(g" in case.body or " g" in case.body:
        body.append(lines(make, h="g", w="w_also"))
        weights["w_also"] = made
    body += [case.body, lines(read, y="y", z="z", w="w_out")]
    body += [lines(make, h="side", w="w_side"), "side_r = Softplus(side)"]
    if len(made) == 2:
        weights |= {"w_side": (made[0], SIDE), "w_end": (SIDE, 2)}
        body.append("side_y = MatMul(side_r, w_end)")
    else:
        weights |= {"w_side": (SIDE, *made[1:]), "w_end": (2, SIDE, 1, 1)}
        body.append("side_y = Conv(side_r, w_end)")
    imports = {case.domain: 1} if case.domain else None
    signature = f"{', '.join(i for i in (x, case.inputs) if i)} => float[] y, float[] side_y{case.outputs}"
    return tiny(
        signature,
        "\n".join(body),
        weights,
        opset=case.opset,
        imports=imports,
        ir_version=_ir_version(case.opset),
        functions=case.functions,
    )


def _ir_version(opset: int) -> int:
    """Old operators come in old files."""
    return 10 if opset >= 13 else 7 if opset >= 9 else 4
