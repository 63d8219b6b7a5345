"""Steps with ops that few exports have: fused ones, choices by value, scatters, other norms and reductions."""

from __future__ import annotations

import numpy as np

from tests.property.sketch import Sketch, Step, channels
from tests.property.steps_any import axis_of


# ---- any rank
def reduced(g: Sketch, x: str) -> str:
    """A reduction that keeps its axis, and what it was reduced from."""
    axis = g.one(axis_of(g, x), 1, len(g.shapes[x]) - 1)
    op = g.one("ReduceSum", "ReduceL1", "ReduceL2", "ReduceMin", "ReduceLogSumExp", "ReduceSumSquare", "ReduceMax")
    shape = (*g.shapes[x][:axis], 1, *g.shapes[x][axis + 1 :])
    small = g.add(g.reduce(op, x, axis, keep=True), *shape)
    return g.same(f"{g.one('Sub', 'Add', 'Min')}({x}, {small})", x)


def sorted_out(g: Sketch, x: str) -> str:
    """The largest numbers, of all or of some."""
    axis = g.one(axis_of(g, x), len(g.shapes[x]) - 1)
    size = g.shapes[x][axis]
    if isinstance(size, str) or size < 2:
        return reduced(g, x)
    shape = (*g.shapes[x][:axis], size // 2, *g.shapes[x][axis + 1 :])
    known, name = g.ints(size // 2), f"t{len(g.lines)}"
    g.lines.append(f"{name}, {name}n = TopK<axis={axis}>({x}, {known})")  # the second output is no activation
    g.shapes[name] = shape
    return name


def scattered(g: Sketch, x: str) -> str:
    """Some channels are replaced by others, or added to."""
    axis = axis_of(g, x)
    if axis != 1 or len(g.shapes[x]) != 2 or channels(g, x, axis) < 2:
        return compressed(g, x)
    turned = g.add(f"Transpose({x})", *g.shapes[x][::-1])
    numbers = g.constant(np.array([[1], [0]]))
    rows = g.add(f"Gather({turned}, {g.ints(0, 1)})", 2, "N")
    mixed = g.same(f'ScatterND<reduction="{g.one("none", "add")}">({turned}, {numbers}, {rows})', turned)
    return g.add(f"Transpose({mixed})", *g.shapes[x])


def compressed(g: Sketch, x: str) -> str:
    """Channels by a constant mask."""
    axis = axis_of(g, x)
    stays = np.arange(channels(g, x, axis)) % 3 < 2
    shape = (*g.shapes[x][:axis], int(stays.sum()), *g.shapes[x][axis + 1 :])
    return g.add(f"Compress<axis={axis}>({x}, {g.constant(stays)})", *shape)


def triangle(g: Sketch, x: str) -> str:
    return g.same(f"Trilu<upper={g.one(0, 1)}>({x})", x)


def cast(g: Sketch, x: str) -> str:
    """Through numbers of another type."""
    wide = g.hidden(f"Cast<to=11>({x})")
    changed = g.hidden(f"Abs({wide})")
    return g.same(f"{g.one(f'Cast<to=1>({changed})', f'CastLike({changed}, {x})')}", x)


def unit_norm(g: Sketch, x: str) -> str:
    return g.same(f"LpNormalization<axis={g.one(1, -1)}>({x})", x)


def chosen_by_branch(g: Sketch, x: str) -> str:
    """A body that reads an outer tensor."""
    yes = g.constant(np.array(True))
    lowest = f"{x}_low{len(g.lines)}"
    bodies = [f"b{k} () => (float[] {lowest}{k}) {{ {lowest}{k} = {op}({x}) }}" for k, op in enumerate(("Relu", "Neg"))]
    return g.same(f"If ({yes}) <then_branch = {bodies[0]}, else_branch = {bodies[1]}>", x)


def counted(g: Sketch, x: str) -> str:
    """Scaled by how many channels there are, as the graph counts them."""
    count = g.hidden(f"Cast<to=1>({g.measured(x, axis_of(g, x))})")
    return g.same(f"{g.one('Div', 'Mul')}({x}, {g.hidden(f'Sqrt({count})')})", x)


# ---- tokens
def by_microsoft(g: Sketch, x: str) -> str:
    """Ops of ONNX Runtime on the last axis."""
    width = channels(g, x, -1)
    op = g.one("skip", "simple", "bias", "quick", "fused", "turned")
    if op == "skip":
        known = f"{g.weight(width)}, {g.weight(width)}, {g.weight(width)}"
        shapes = g.shapes[x]
        name = g.add(f"com.microsoft.SkipLayerNormalization<epsilon=0.01>({x}, {g.like(x)}, {known})", *shapes)
        return g.same(f"Add({name}, {x})", x)
    if op == "simple":
        return g.same(f"SimplifiedLayerNormalization<axis=-1, epsilon=0.01>({x}, {g.weight(width)})", x)
    if op == "bias":
        return g.same(f"com.microsoft.{g.one('BiasGelu', 'FastGelu')}({x}, {g.weight(width)})", x)
    if op == "quick":
        return g.same(f"com.microsoft.QuickGelu<alpha=1.7>({x})", x)
    out = g.width()
    matrix = g.matrix(out, width) if op == "turned" else g.matrix(width, out)
    settings = f"alpha=0.5, transB={int(op == 'turned')}"
    return g.add(f"com.microsoft.FusedMatMul<{settings}>({x}, {matrix})", *g.shapes[x][:-1], out)


def fused_attention(g: Sketch, x: str) -> str:
    """Attention of ONNX Runtime, packed or separate, and of the standard in three dimensions."""
    width, (batch, tokens) = channels(g, x, 2), g.shapes[x][:2]
    count, size = g.one(1, 2, 3), g.one(2, 4)
    whole = count * size
    way = g.one("packed", "separate", "standard") if g.opset >= 23 else g.one("packed", "separate")
    if way == "packed":
        known = f"{g.weight(width, 3 * whole)}, {g.weight(3 * whole)}"
        text = f"com.microsoft.Attention<num_heads={count}>({x}, {known})"
        return g.add(text, batch, tokens, whole)
    groups = g.divisor(count) if way == "standard" else count
    widths = (whole, groups * size, groups * size)
    parts = [g.add(f"MatMul({x}, {g.matrix(width, w)})", batch, tokens, w) for w in widths]
    if way == "standard":
        return g.same(f"Attention<q_num_heads={count}, kv_num_heads={groups}>({', '.join(parts)})", parts[0])
    bias = f", {g.weight(3 * whole)}" if g.one(True, False) else ""
    return g.same(f"com.microsoft.MultiHeadAttention<num_heads={count}>({', '.join(parts)}{bias})", parts[0])


def norm_by_root(g: Sketch, x: str) -> str:
    width = channels(g, x, -1)
    if g.opset < 23:
        return unit_norm(g, x)
    return g.same(f"RMSNormalization<axis=-1, epsilon=0.01>({x}, {g.weight(width)})", x)


def backwards(g: Sketch, x: str) -> str:
    """Every other token or channel, or all from the end."""
    axis = g.one(1, 2)
    size = g.shapes[x][axis]
    bounds = g.ints(-1), g.ints(-(2**62)), g.ints(axis), g.ints(-1)
    if isinstance(size, int) and size > 2 and g.one(True, False):
        shape = (*g.shapes[x][:axis], -(-size // 2), *g.shapes[x][axis + 1 :])
        return g.add(f"Slice({x}, {g.ints(0)}, {g.ints(2**62)}, {g.ints(axis)}, {g.ints(2)})", *shape)
    return g.same(f"Slice({x}, {', '.join(bounds)})", x)


def similar(g: Sketch, x: str) -> str:
    """Products of tokens with tokens, without heads."""
    tokens = g.shapes[x][1]
    other = g.like(x)
    turned = g.add(f"Transpose<perm=[0,2,1]>({other})", "N", channels(g, x, 2), tokens)
    scores = g.add(f"MatMul({x}, {turned})", "N", tokens, tokens)
    return g.same(f"MatMul({g.same(f'Softmax({scores})', scores)}, {g.like(x)})", x)


def across(g: Sketch, x: str) -> str:
    """Attention of channels to channels."""
    tokens, width = g.shapes[x][1], channels(g, x, 2)
    turned = g.add(f"Transpose<perm=[0,2,1]>({x})", "N", width, tokens)
    scores = g.add(f"MatMul({turned}, {g.like(x)})", "N", width, width)
    return g.same(f"MatMul({x}, {g.same(f'Softmax({scores})', scores)})", x)


# ---- feature maps
def sampled(g: Sketch, x: str) -> str:
    """At places that a convolution computes."""
    c, h, w = channels(g, x, 1), channels(g, x, 2), channels(g, x, 3)
    places = g.add(f"Conv({x}, {g.weight(2, c, 1, 1)})", "N", 2, h, w)
    grid = g.add(f"Transpose<perm=[0,2,3,1]>({g.same(f'Tanh({places})', places)})", "N", h, w, 2)
    mode = "linear" if g.opset >= 20 else "bilinear"
    return g.same(f'GridSample<mode="{mode}", padding_mode="border">({x}, {grid})', x)


def computed_kernel(g: Sketch, x: str) -> str:
    """A weight that is normalised in the graph."""
    c, h, w = channels(g, x, 1), channels(g, x, 2), channels(g, x, 3)
    out = g.width()
    raw = g.constant((out, c, 1, 1))
    mean = g.hidden(g.reduce("ReduceMean", raw, 1, 2, 3, keep=True))
    return g.add(f"Conv({x}, {g.hidden(f'Sub({raw}, {mean})')})", "N", out, h, w)


def mean_and_variance(g: Sketch, x: str) -> str:
    """Of channels that are never constant, whose variance would be nothing but rounding errors."""
    uneven = g.same(f"Add({x}, {g.weight(channels(g, x, 1), channels(g, x, 2), channels(g, x, 3))})", x)
    return g.same(f"MeanVarianceNormalization<axes={g.one('[0,2,3]', '[2,3]', '[1,2,3]')}>({uneven})", x)


def windows(g: Sketch, x: str) -> str:
    """Cut into four windows that become samples, changed, and put together again."""
    c, h, w = channels(g, x, 1), channels(g, x, 2), channels(g, x, 3)
    if h % 2 or w % 2:
        return mean_and_variance(g, x)
    cells = g.reshape(x, "N", c, 2, h // 2, 2, w // 2)
    turned = g.add(f"Transpose<perm=[0,2,4,3,5,1]>({cells})", "N", 2, 2, h // 2, w // 2, c)
    rows = g.reshape(turned, "N*4", h // 2 * (w // 2), c)
    made = g.add(f"MatMul({rows}, {g.matrix(c, c)})", *g.shapes[rows])
    back = g.reshape(g.same(f"Add({made}, {rows})", rows), "N", 2, 2, h // 2, w // 2, c)
    again = g.add(f"Transpose<perm=[0,5,1,3,2,4]>({back})", "N", c, 2, h // 2, 2, w // 2)
    return g.reshape(again, "N", c, h, w)


RARE: list[Step] = [reduced, sorted_out, compressed, triangle, cast, unit_norm, chosen_by_branch, counted]
RARE_ON_VECTORS: list[Step] = [*RARE, scattered]
RARE_ON_ROWS: list[Step] = [
    *RARE, by_microsoft, by_microsoft, fused_attention, fused_attention, norm_by_root, backwards, similar, across,
]  # fmt: skip
RARE_ON_MAPS: list[Step] = [*RARE, sampled, computed_kernel, mean_and_variance, windows, windows]
