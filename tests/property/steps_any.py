"""Steps that work on tensors of any rank: on all numbers alone, or along the channel axis."""

from __future__ import annotations

import numpy as np

from tests.property.sketch import WIDEST, Sketch, Step, channels

UNARY = (
    "Relu", "Sigmoid", "Tanh", "HardSwish", "Neg", "Softplus", "Abs", "Erf", "LeakyRelu", "Clip", "Identity", "Sin",
    "Elu", "Dropout",
)  # fmt: skip
NEWER = "Gelu", "Mish"


def axis_of(g: Sketch, x: str) -> int:
    """Return the axis of the channels: after the batch in feature maps, else last."""
    rank = len(g.shapes[x])
    return 1 if rank == 4 else rank - 1


def unary(g: Sketch, x: str) -> str:
    return g.same(f"{g.one(*UNARY, *(NEWER if g.opset >= 20 else ()))}({x})", x)


def swish(g: Sketch, x: str) -> str:
    return g.same(f"Mul({x}, {g.same(f'Sigmoid({x})', x)})", x)


def join(g: Sketch, x: str) -> str:
    """With anything of the same shape."""
    op = g.one("Add", "Add", "Add", "Sub", "Mul", "Max", "Sum", "Mean")
    pair = [x, g.like(x)]
    if op in ("Sum", "Mean"):
        pair.append(g.like(x))
    return g.same(f"{op}({g.shuffled(*pair)})", x)


def chosen(g: Sketch, x: str) -> str:
    """One of two tensors, number by number."""
    positive = g.hidden(f"Greater({g.like(x)}, {g.constant(np.zeros((), dtype=np.float32))})")
    return g.same(f"Where({positive}, {x}, {g.like(x)})", x)


def concat(g: Sketch, x: str) -> str:
    """Of channels of tensors that agree elsewhere."""
    axis = axis_of(g, x)
    parts = [x, *(g.like(x, channel=axis) for _ in range(g.one(1, 1, 2)))]
    total = sum(channels(g, p, axis) for p in parts)
    if total > 2 * WIDEST:
        return unary(g, x)
    shape = list(g.shapes[x])
    shape[axis] = total
    written = axis if g.one(True, False) else axis - len(shape)
    return g.add(f"Concat<axis={written}>({', '.join(parts)})", *shape)


def split(g: Sketch, x: str) -> str:
    """In two or three parts, of which some meet again."""
    axis = axis_of(g, x)
    width = channels(g, x, axis)
    if width < 4:
        return concat(g, x)
    first = width // 2 if g.one(True, True, False) else g.one(1, width // 3 + 1)
    shapes = [(*g.shapes[x][:axis], size, *g.shapes[x][axis + 1 :]) for size in (first, width - first)]
    even = 2 * first == width
    if even and g.one(True, False):
        a, b = g.several(g.halves(x, axis), *shapes)
    else:
        a, b = g.several(f"Split<axis={axis}>({x}, {g.ints(first, width - first)})", *shapes)
    if even:
        return g.same(f"{g.one('Mul', 'Add')}({a}, {g.same(f'Sigmoid({b})', b)})", a)
    return g.same(f"Concat<axis={axis}>({b}, {g.same(f'Relu({a})', a)})", x) if g.one(True, False) else b


def part(g: Sketch, x: str) -> str:
    """A slice of the channels, of every n-th, or backwards."""
    axis = axis_of(g, x)
    width = channels(g, x, axis)
    if width < 4:
        return concat(g, x)
    start, end = g.one((0, width), (1, width), (1, width - 1), (0, width // 2))
    step = g.one(1, 1, 2)
    bounds = [start, end, axis, step]
    size = len(range(start, end, step))
    if g.rarely():
        bounds, size = [width - 1, -(2**62), axis, -1], width
    elif end == width and g.one(True, False):
        bounds[1] = 2**62
    shape = (*g.shapes[x][:axis], size, *g.shapes[x][axis + 1 :])
    return g.add(f"Slice({x}, {', '.join(g.ints(b) for b in bounds)})", *shape)


def picked(g: Sketch, x: str) -> str:
    """Channels by number: in another order, some of them, or some twice."""
    axis = axis_of(g, x)
    width = channels(g, x, axis)
    rng = np.random.default_rng(g.one(0, 1, 2))
    numbers = g.one(rng.permutation(width), rng.permutation(width)[: max(2, width // 2)], rng.integers(0, width, width))
    shape = (*g.shapes[x][:axis], len(numbers), *g.shapes[x][axis + 1 :])
    return g.add(f"Gather<axis={axis}>({x}, {g.ints(*numbers.tolist())})", *shape)


ON_ANY: list[Step] = [unary, unary, unary, swish, join, join, join, chosen, concat, split, split, part, picked]
