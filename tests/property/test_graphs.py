"""Random small graphs: whatever the tracer offers equals the mask, at random ratios."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import onnx_ir as ir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnxgrail.core import Array
from tests.oracle import check_recorded, check_same, killed, masked, narrowed, run, short, survey_of
from tests.tiny import batch_norm, feed, ints, tiny

SIDE = 4  # feature maps are SIDE x SIDE
UNARY = ("Relu", "Sigmoid", "Tanh", "Gelu", "HardSwish", "Neg", "Softplus")


@dataclass
class Sketch:
    """A graph as it grows: node lines, weights, and the shapes (without batch) of tensors that may be read."""

    lines: list[str] = field(default_factory=list)
    weights: dict[str, tuple[int, ...] | Array] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, text: str, shape: tuple[int, ...]) -> str:
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.shapes[name] = shape
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(shape)

    def constant(self, value: tuple[int, ...] | Array) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = value
        return name


Step = Callable[[st.DrawFn, Sketch, str], str]


def unary(draw: st.DrawFn, g: Sketch, x: str) -> str:
    return g.add(f"{draw(st.sampled_from(UNARY))}({x})", g.shapes[x])


def join(draw: st.DrawFn, g: Sketch, x: str) -> str:
    """With anything of the same shape, on any axis that channels lie on."""
    other = draw(st.sampled_from([n for n, s in g.shapes.items() if s == g.shapes[x]]))
    axis = 0 if len(g.shapes[x]) == 3 else 1
    op = draw(st.sampled_from(["Add", "Mul", "Max", f"Concat<axis={axis + 1}>"]))
    shape = list(g.shapes[x])
    shape[axis] *= 2 if "Concat" in op else 1
    return g.add(f"{op}({x}, {other})", tuple(shape))


def conv(draw: st.DrawFn, g: Sketch, x: str) -> str:
    out = draw(st.integers(2, 8))
    return g.add(f"Conv({x}, {g.weight(out, g.shapes[x][0], 1, 1)}, {g.weight(out)})", (out, SIDE, SIDE))


def depthwise(draw: st.DrawFn, g: Sketch, x: str) -> str:
    channels = g.shapes[x][0]
    w, b = g.weight(channels, 1, 3, 3), g.weight(channels)
    return g.add(f"Conv<group={channels}, pads=[1,1,1,1]>({x}, {w}, {b})", g.shapes[x])


def grouped(draw: st.DrawFn, g: Sketch, x: str) -> str:
    channels = g.shapes[x][0]
    if channels % 2:
        return conv(draw, g, x)
    out = 2 * draw(st.integers(1, 3))
    return g.add(f"Conv<group=2>({x}, {g.weight(out, channels // 2, 1, 1)})", (out, SIDE, SIDE))


def norm_by_batch(draw: st.DrawFn, g: Sketch, x: str) -> str:
    names = f"bnmv{len(g.lines)}"
    g.weights |= batch_norm(names, g.shapes[x][0])
    return g.add(f"BatchNormalization({x}, {', '.join(c + names[4:] for c in names[:4])})", g.shapes[x])


def pool(draw: st.DrawFn, g: Sketch, x: str) -> str:
    return g.add(f"MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>({x})", g.shapes[x])


def gate(draw: st.DrawFn, g: Sketch, x: str) -> str:
    channels = g.shapes[x][0]
    pooled = g.add(f"GlobalAveragePool({x})", (channels, 1, 1))
    squeezed = g.add(f"Conv({pooled}, {g.weight(3, channels, 1, 1)})", (3, 1, 1))
    grown = g.add(f"Conv({squeezed}, {g.weight(channels, 3, 1, 1)})", (channels, 1, 1))
    return g.add(f"Mul({x}, {grown})", g.shapes[x])


def shuffle(draw: st.DrawFn, g: Sketch, x: str) -> str:
    channels = g.shapes[x][0]
    if channels % 2:
        return conv(draw, g, x)
    split = g.add(f"Reshape({x}, {g.constant(ints(-1, 2, channels // 2, SIDE, SIDE))})", ())
    turned = g.add(f"Transpose<perm=[0,2,1,3,4]>({split})", ())
    return g.add(f"Reshape({turned}, {g.constant(ints(-1, channels, SIDE, SIDE))})", g.shapes[x])


def linear(draw: st.DrawFn, g: Sketch, x: str) -> str:
    tokens, width = g.shapes[x]
    out = draw(st.integers(2, 8))
    return g.add(f"MatMul({x}, {g.weight(width, out)})", (tokens, out))


def bias(draw: st.DrawFn, g: Sketch, x: str) -> str:
    tokens, width = g.shapes[x]
    return g.add(f"Add({g.weight(*draw(st.sampled_from([(width,), (1, width), (tokens, 1)])))}, {x})", g.shapes[x])


def split(draw: st.DrawFn, g: Sketch, x: str) -> str:
    tokens, width = g.shapes[x]
    if width % 2:
        return linear(draw, g, x)
    a, b = f"a{len(g.lines)}", f"b{len(g.lines)}"
    g.lines.append(f"{a}, {b} = Split<axis=-1, num_outputs=2>({x})")
    return g.add(f"Mul({a}, {b})", (tokens, width // 2))


def tail(draw: st.DrawFn, g: Sketch, x: str) -> str:
    tokens, width = g.shapes[x]
    if width < 3:
        return linear(draw, g, x)
    start = draw(st.integers(0, width - 2))
    bounds = ", ".join(g.constant(ints(v)) for v in (start, width, 2))
    return g.add(f"Slice({x}, {bounds})", (tokens, width - start))


def norm(draw: st.DrawFn, g: Sketch, x: str) -> str:
    return g.add(f"LayerNormalization({x}, {g.weight(g.shapes[x][1])})", g.shapes[x])


def over_tokens(draw: st.DrawFn, g: Sketch, x: str) -> str:
    tokens = g.shapes[x][0]
    turned = g.add(f"Transpose<perm=[0,2,1]>({x})", ())
    mixed = g.add(f"MatMul({turned}, {g.weight(tokens, tokens)})", ())
    return g.add(f"Transpose<perm=[0,2,1]>({mixed})", g.shapes[x])


def heads(draw: st.DrawFn, g: Sketch, x: str) -> str:
    tokens, width = g.shapes[x]
    count, size = draw(st.sampled_from([(2, 2), (3, 2), (4, 1)]))
    parts = []
    for _ in range(3):
        made = g.add(f"MatMul({x}, {g.weight(width, count * size)})", ())
        cut = g.add(f"Reshape({made}, {g.constant(ints(0, 0, count, size))})", ())
        parts.append(g.add(f"Transpose<perm=[0,2,1,3]>({cut})", ()))
    turned = g.add(f"Transpose<perm=[0,1,3,2]>({parts[1]})", ())
    scores = g.add(f"MatMul({parts[0]}, {turned})", ())
    mixed = g.add(f"MatMul({g.add(f'Softmax({scores})', ())}, {parts[2]})", ())
    back = g.add(f"Transpose<perm=[0,2,1,3]>({mixed})", ())
    return g.add(f"Reshape({back}, {g.constant(ints(0, 0, -1))})", (tokens, count * size))


ON_MAPS: list[Step] = [conv, conv, unary, norm_by_batch, depthwise, grouped, join, pool, gate, shuffle]
ON_ROWS: list[Step] = [linear, linear, unary, bias, join, split, tail, norm, heads, over_tokens]


@st.composite
def graphs(draw: st.DrawFn) -> ir.Model:
    """Five to ten nodes behind one another, each free to read something earlier again; a head that reads the last."""
    g = Sketch()
    images = draw(st.booleans())
    steps, start = (ON_MAPS, (3, SIDE, SIDE)) if images else (ON_ROWS, (5, 6))
    g.shapes["x"] = start
    last = "x"
    for _ in range(draw(st.integers(4, 9))):
        last = draw(st.sampled_from(steps))(draw, g, last)
    if images:
        channels = g.shapes[last][0]
        if draw(st.booleans()):
            flat = g.add(f"Reshape({last}, {g.constant(ints(-1, channels * SIDE * SIDE))})", ())
            head = g.weight(channels * SIDE * SIDE, 3)
        else:
            flat = g.add(f"Flatten({g.add(f'GlobalAveragePool({last})', ())})", ())
            head = g.weight(channels, 3)
        g.lines.append(f"y = MatMul({flat}, {head})")
    else:
        g.lines.append(f"y = MatMul({last}, {g.weight(g.shapes[last][1], 3)})")
    shape = ",".join(map(str, start))
    return tiny(f"float[N,{shape}] x => float[] y", "\n".join(g.lines), g.weights)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(graphs(), st.sampled_from([0.2, 0.5, 0.9]), st.integers(0, 3))
def test_narrowed_equals_masked(model: ir.Model, ratio: float, seed: int) -> None:
    arrays = feed(model)
    survey = survey_of(model, arrays)
    for refusal in survey.refusals:
        assert refusal.reason
        assert refusal.value
    dead = killed(survey, ratio, seed=seed)
    slim, mask = narrowed(model, survey, dead), masked(model, survey, dead)
    for some in (arrays, short(arrays)):
        assert some is not None
        check_same(run(slim, some), run(mask, some))
    check_recorded(slim, arrays)
