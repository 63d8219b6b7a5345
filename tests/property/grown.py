"""Whole graphs: inputs, steps one after another, heads, and now and then an intermediate tensor as an output."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.property.sketch import SIDE, TOKENS, Dim, Shape, Sketch, Step, channels
from tests.property.steps_any import ON_ANY
from tests.property.steps_heads import HEADS
from tests.property.steps_maps import ON_MAPS
from tests.property.steps_rare import RARE_ON_MAPS, RARE_ON_ROWS, RARE_ON_VECTORS
from tests.property.steps_rows import ON_ROWS, ON_VECTORS
from tests.tiny import VOCABULARY, tiny

STEPS: dict[int, list[Step]] = {
    2: [*ON_VECTORS, *ON_ANY],
    3: [*ON_ROWS, *HEADS, *ON_ANY],
    4: [*ON_MAPS, *ON_ANY],
}
IMPORTS = {"com.microsoft": 1}
RARE_STEPS: dict[int, list[Step]] = {2: RARE_ON_VECTORS, 3: RARE_ON_ROWS, 4: RARE_ON_MAPS}


@dataclass(frozen=True)
class Grown:
    """A model, the steps that made it, and whether its sequences may be of another length."""

    model: ir.Model
    steps: frozenset[str]
    sequence: bool


def fuzzed(count: int, few: int, *unchecked: HealthCheck) -> settings:
    """Settings of a test over graphs: `count` new ones, or the same `few` ones if that is 0."""
    return settings(
        max_examples=count or few,
        derandomize=not count,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, *unchecked],
    )


@st.composite
def graphs(draw: st.DrawFn, most: int = 9) -> Grown:
    """Four steps or more one after another, each free to read something earlier again; heads that read the last."""
    g = Sketch(draw, opset=draw(st.sampled_from([17, 18, 20, 20, 21, 23])))
    signature, last = inputs(g)
    for _ in range(draw(st.integers(4, most))):
        step = g.one(*(RARE_STEPS if g.rarely() else STEPS)[len(g.shapes[last])])
        g.used.add(step.__name__)
        last = step(g, last)
    outputs = ["float[] y"]
    head(g, last, "y")
    if g.rarely():
        outputs.append("float[] z")
        head(g, g.one(*[n for n, s in g.shapes.items() if isinstance(s[-1], int)]), "z")
    seen = [n for n in g.shapes if n.startswith("t")]
    if g.rarely() and seen:
        outputs.append(f"float[] {g.one(*seen)}")
    text = f"{', '.join(signature)} => {', '.join(outputs)}"
    recorded = g.one(True, True, False)
    model = tiny(text, "\n".join(g.lines), g.weights, opset=g.opset, imports=IMPORTS, recorded=recorded)
    return Grown(model, frozenset(g.used), any("S" in part for part in signature))


def inputs(g: Sketch) -> tuple[list[str], str]:
    """Declarations, and the tensor to begin with."""
    tokens: Dim = g.one(TOKENS, "S")
    shapes: dict[str, Shape] = {
        "map": ("N", g.one(3, 4), SIDE, SIDE),
        "rows": ("N", tokens, 6),
        "ids": ("N", tokens),
        "vector": ("N", 6),
    }
    kind = g.one("map", "map", "map", "rows", "rows", "rows", "ids", "vector")
    if kind != "ids":
        g.shapes["x"] = shapes[kind]
        declared, start = [declaration("float", g.shapes["x"], "x")], "x"
    else:
        g.symbols["ids"] = shapes["ids"]
        declared = [declaration("int64", shapes["ids"], "ids")]
        width = g.width()
        start = g.add(f"Gather({g.matrix(VOCABULARY, width)}, ids)", *shapes["ids"], width)
    if g.rarely():
        g.shapes["u"] = g.shapes[start] if g.one(True, False) else shapes["vector"]
        declared.append(declaration("float", g.shapes["u"], "u"))
    elif kind == "rows" and g.rarely():
        g.symbols["ids"] = shapes["ids"]
        declared.append(declaration("int64", shapes["ids"], "ids"))
    return declared, start


def declaration(kind: str, shape: Shape, name: str) -> str:
    """An input in ONNX text."""
    return f"{kind}[{','.join(map(str, shape))}] {name}"


def head(g: Sketch, x: str, name: str) -> None:
    """The consumer of the last channels."""
    rank = len(g.shapes[x])
    if rank == 4 and g.shapes[x][0] == "N" and all(isinstance(d, int) for d in g.shapes[x][1:]):
        g.lines.append(f"{name} = Conv({x}, {g.matrix(3, channels(g, x, 1), 1, 1)})")
    else:
        g.lines.append(f"{name} = MatMul({x}, {g.matrix(channels(g, x, rank - 1), 3)})")
