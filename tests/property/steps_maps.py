"""Steps on feature maps (batch, channels, height, width)."""

from __future__ import annotations

import numpy as np

from tests.property.sketch import SIDE, WIDEST, Dim, Sketch, Step, channels
from tests.tiny import batch_norm, scalar


def _map(g: Sketch, x: str) -> tuple[int, int, int]:
    _, c, h, w = g.shapes[x]
    assert isinstance(c, int)
    assert isinstance(h, int)
    assert isinstance(w, int)
    return c, h, w


def conv(g: Sketch, x: str) -> str:
    c, h, w = _map(g, x)
    out, kernel, stride = g.width(), g.one(1, 1, 3), g.one(1, 1, 1, 2)
    pad = kernel // 2
    bias = f", {g.weight(out)}" if g.one(True, False) else ""
    settings = f"strides=[{stride},{stride}], pads=[{pad},{pad},{pad},{pad}]"
    text = f"Conv<{settings}>({x}, {g.matrix(out, c, kernel, kernel)}{bias})"
    return g.add(text, "N", out, -(-h // stride), -(-w // stride))


def depthwise(g: Sketch, x: str) -> str:
    """Each channel alone, or each made into two."""
    c, h, w = _map(g, x)
    out = c * g.one(1, 1, 2)
    text = f"Conv<group={c}, pads=[1,1,1,1]>({x}, {g.matrix(out, 1, 3, 3)}, {g.weight(out)})"
    return g.add(text, "N", out, h, w)


def grouped(g: Sketch, x: str) -> str:
    c, h, w = _map(g, x)
    groups = g.divisor(c)
    out = groups * g.one(1, 2, 3)
    if out > 2 * WIDEST:
        return conv(g, x)
    return g.add(f"Conv<group={groups}>({x}, {g.matrix(out, c // groups, 1, 1)})", "N", out, h, w)


def transposed(g: Sketch, x: str) -> str:
    """ConvTranspose, plain or in groups."""
    c, h, w = _map(g, x)
    groups = g.divisor(c)
    out, grow = g.one(1, 2, 4), g.one(1, 2) if h <= SIDE else 1
    bias = f", {g.weight(out * groups)}" if g.one(True, False) else ""
    if out * groups > 2 * WIDEST:
        return conv(g, x)
    text = f"ConvTranspose<group={groups}, strides=[{grow},{grow}]>({x}, {g.matrix(c, out, grow, grow)}{bias})"
    return g.add(text, "N", out * groups, h * grow, w * grow)


def norm_by_batch(g: Sketch, x: str) -> str:
    names = f"bnmv{len(g.lines)}"
    g.weights.update(batch_norm(names, _map(g, x)[0]))
    return g.same(f"BatchNormalization({x}, {', '.join(c + names[4:] for c in names[:4])})", x)


def norm_by_group(g: Sketch, x: str) -> str:
    """As one op."""
    c, _, _ = _map(g, x)
    if g.opset < 18:
        return norm_by_group_written_out(g, x)
    groups = g.divisor(c)
    size = c if g.opset >= 21 else groups
    return g.same(f"GroupNormalization<num_groups={groups}, epsilon=0.01>({x}, {g.weight(size)}, {g.weight(size)})", x)


def norm_by_group_written_out(g: Sketch, x: str) -> str:
    """As exporters spell it: an instance norm of whole groups, then scale and bias per channel."""
    c, h, w = _map(g, x)
    groups = g.divisor(c)
    rows = g.reshape(x, "N", groups, c // groups * h * w)
    ones, zeros = (g.constant(np.full(groups, v, dtype=np.float32)) for v in (1, 0))
    normal = g.same(f"InstanceNormalization<epsilon=0.01>({rows}, {ones}, {zeros})", rows)
    back = g.reshape(normal, "N", c, h, w)
    scaled = g.same(f"Mul({back}, {g.weight(c, 1, 1)})", x)
    return g.same(f"Add({scaled}, {g.weight(c, 1, 1)})", x)


def norm_by_instance(g: Sketch, x: str) -> str:
    c, _, _ = _map(g, x)
    return g.same(f"InstanceNormalization<epsilon=0.01>({x}, {g.weight(c)}, {g.weight(c)})", x)


def norm_by_layer(g: Sketch, x: str) -> str:
    """Over the channels, after one Transpose and before another."""
    c, h, w = _map(g, x)
    last = g.add(f"Transpose<perm=[0,2,3,1]>({x})", "N", h, w, c)
    normal = g.same(f"LayerNormalization<epsilon=0.01>({last}, {g.weight(c)}, {g.weight(c)})", last)
    if g.one(True, False):
        out = g.width()
        normal = g.add(f"MatMul({normal}, {g.matrix(c, out)})", "N", h, w, out)
        c = out
    return g.add(f"Transpose<perm=[0,3,1,2]>({normal})", "N", c, h, w)


def affine(g: Sketch, x: str) -> str:
    """A constant per channel, per place, per cell, or for all."""
    c, h, w = _map(g, x)
    shape = g.one((c, 1, 1), (c, 1, 1), (1, c, 1, 1), (1, h, w), (c, h, w), (1,), ())
    known = g.constant(scalar(0.7)) if shape == () else g.weight(*shape)
    op = g.one("Add", "Mul", "Sub", "PRelu", "Max")
    return g.same(f"{op}({x}, {known})", x)


def pool(g: Sketch, x: str) -> str:
    c, h, w = _map(g, x)
    op, shrink = g.one("MaxPool", "AveragePool", "LpPool"), h % 2 == w % 2 == 0 and g.one(True, False)
    settings = "kernel_shape=[2,2], strides=[2,2]" if shrink else "kernel_shape=[3,3], pads=[1,1,1,1]"
    return g.add(f"{op}<{settings}>({x})", "N", c, h // 2 if shrink else h, w // 2 if shrink else w)


def blur(g: Sketch, x: str) -> str:
    """Local response: no channel goes alone."""
    return g.same(f"LRN<size=3>({x})", x)


def pad(g: Sketch, x: str) -> str:
    c, h, w = _map(g, x)
    more = 1 if g.rarely() and c < WIDEST else 0
    mode = "constant" if more or min(h, w) < 2 else g.one("constant", "reflect", "edge")
    bounds = g.ints(0, more, 1, 0, 0, 0, 0, 1)
    return g.add(f'Pad<mode="{mode}">({x}, {bounds})', "N", c + more, h + 1, w + 1) if h <= SIDE else conv(g, x)


def resize(g: Sketch, x: str) -> str:
    """By scales, by sizes of two axes, or by four sizes that are computed."""
    c, h, w = _map(g, x)
    if h > SIDE:
        return pool(g, x)
    way = g.one("scales", "axes", "sizes") if g.opset >= 18 else g.one("scales", "sizes")
    if way == "scales":
        scales = g.constant(np.array([1, 1, 2, 2], dtype=np.float32))
        return g.add(f'Resize<mode="nearest">({x}, , {scales})', "N", c, 2 * h, 2 * w)
    if way == "axes":
        return g.add(f'Resize<axes=[2,3], mode="linear">({x}, , , {g.ints(h + 1, w)})', "N", c, h + 1, w)
    return g.add(f'Resize<mode="nearest">({x}, , , {g.sizes(("N", c, h + 1, w))})', "N", c, h + 1, w)


def depth_to_space(g: Sketch, x: str) -> str:
    c, h, w = _map(g, x)
    if c % 4 or h > SIDE:
        return conv(g, x)
    return g.add(f'DepthToSpace<blocksize=2, mode="{g.one("CRD", "DCR")}">({x})', "N", c // 4, 2 * h, 2 * w)


def space_to_depth(g: Sketch, x: str) -> str:
    c, h, w = _map(g, x)
    if h % 2 or w % 2 or 4 * c > WIDEST:
        return pool(g, x)
    return g.add(f"SpaceToDepth<blocksize=2>({x})", "N", 4 * c, h // 2, w // 2)


def gate(g: Sketch, x: str) -> str:
    """Squeeze and excitation."""
    c, _, _ = _map(g, x)
    mean = g.one(f"GlobalAveragePool({x})", g.reduce("ReduceMean", x, 2, 3, keep=True), f"GlobalMaxPool({x})")
    pooled = g.add(mean, "N", c, 1, 1)
    squeezed = g.add(f"Conv({pooled}, {g.weight(3, c, 1, 1)})", "N", 3, 1, 1)
    turned_on = g.add(f"Relu({squeezed})", "N", 3, 1, 1)
    grown = g.add(f"Conv({turned_on}, {g.weight(c, 3, 1, 1)})", "N", c, 1, 1)
    opened = g.add(f"{g.one('Sigmoid', 'HardSigmoid')}({grown})", "N", c, 1, 1)
    return g.same(f"Mul({x}, {opened})", x)


def shuffle(g: Sketch, x: str) -> str:
    c, h, w = _map(g, x)
    groups = g.divisor(c)
    apart = g.reshape(x, "N", groups, c // groups, h, w)
    turned = g.add(f"Transpose<perm=[0,2,1,3,4]>({apart})", "N", c // groups, groups, h, w)
    return g.reshape(turned, "N", c, h, w)


def softmax(g: Sketch, x: str) -> str:
    axis = g.one(1, 2)
    return g.same(f"Softmax<axis={axis}>({x})", x)


def through_einsum(g: Sketch, x: str) -> str:
    c, h, w = _map(g, x)
    out = g.width()
    return g.add(f'Einsum<equation="bchw,cd->bdhw">({x}, {g.weight(c, out)})', "N", out, h, w)


def five_axes(g: Sketch, x: str) -> str:
    """A detour over an axis of size one."""
    c, h, w = _map(g, x)
    axis = g.one(1, 2)
    dims: list[Dim] = ["N", c, h, w]
    dims.insert(axis, 1)
    raised = g.add(f"Unsqueeze({x}, {g.ints(axis)})", *dims)
    changed = g.same(f"Tanh({raised})", raised)
    return g.same(
        f"Squeeze({changed}{g.one('', ', ' + g.ints(axis)) if c > 1 and h > 1 and w > 1 else ', ' + g.ints(axis)})", x
    )


def tile(g: Sketch, x: str) -> str:
    """Copies along channels or places."""
    c, h, w = _map(g, x)
    if 2 * c > WIDEST or h > SIDE:
        return conv(g, x)
    across = g.one(True, False)
    times = g.ints(1, 2, 1, 1) if across else g.ints(1, 1, 1, 2)
    return g.add(f"Tile({x}, {times})", "N", *((2 * c, h, w) if across else (c, h, 2 * w)))


def pooled(g: Sketch, x: str) -> str:
    """To vectors, one number per channel."""
    c, _, _ = _map(g, x)
    if g.one(True, False):
        return g.add(g.reduce(g.one("ReduceMean", "ReduceMax"), x, 2, 3, keep=False), "N", c)
    return g.add(f"Flatten({g.add(f'GlobalAveragePool({x})', 'N', c, 1, 1)})", "N", c)


def flattened(g: Sketch, x: str) -> str:
    """To vectors, one number per cell."""
    c, h, w = _map(g, x)
    if c * h * w > 8 * WIDEST:
        return pooled(g, x)
    flat = g.add(f"Flatten({x})", "N", c * h * w) if g.one(True, False) else g.reshape(x, "N", c * h * w)
    out = g.width()
    return g.add(f"Gemm({flat}, {g.matrix(c * h * w, out)})", "N", out)


def patches(g: Sketch, x: str) -> str:
    """To tokens, one per place."""
    c, h, w = _map(g, x)
    rows = g.reshape(x, "N", c, h * w)
    return g.add(f"Transpose<perm=[0,2,1]>({rows})", "N", h * w, c)


def plus_vector(g: Sketch, x: str) -> str:
    """A vector, as of a time step, added to every place."""
    c, _, _ = _map(g, x)
    vector = g.one(*[n for n, s in g.shapes.items() if len(s) == 2 and s[0] == "N"] or [pooled(g, x)])
    made = g.add(f"Gemm({vector}, {g.matrix(channels(g, vector, 1), c)}, {g.weight(c)})", "N", c)
    raised = g.add(f"Unsqueeze({made}, {g.ints(2, 3)})", "N", c, 1, 1)
    return g.same(f"{g.one('Add', 'Mul')}({x}, {raised})", x)


ON_MAPS: list[Step] = [
    conv, conv, conv, depthwise, grouped, transposed, norm_by_batch, norm_by_group, norm_by_group_written_out,
    norm_by_instance, norm_by_layer, affine, affine, pool, blur, pad, resize, depth_to_space, space_to_depth, gate,
    shuffle, softmax, through_einsum, five_axes, tile, pooled, flattened, patches, plus_vector,
]  # fmt: skip
