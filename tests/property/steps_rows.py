"""Steps on token sequences (batch, tokens, channels) and on vectors (batch, channels)."""

from __future__ import annotations

import numpy as np

from tests.property.sketch import TOKENS, WIDEST, Dim, Sketch, Step, channels
from tests.tiny import VOCABULARY


def _rows(g: Sketch, x: str) -> tuple[Dim, int]:
    return g.shapes[x][1], channels(g, x, 2)


def _last(g: Sketch, x: str, size: int) -> tuple[Dim, ...]:
    return (*g.shapes[x][:-1], size)


def linear(g: Sketch, x: str, out: int = 0) -> str:
    """A matrix, with a bias on either side of the Add or none."""
    out = out or g.width()
    made = g.add(f"MatMul({x}, {g.matrix(channels(g, x, -1), out)})", *_last(g, x, out))
    if g.one(True, False):
        return made
    return g.same(f"Add({g.shuffled(made, g.weight(out))})", made)


def gemm(g: Sketch, x: str) -> str:
    """On vectors; on tokens after a Reshape that puts them under each other."""
    width, out = channels(g, x, -1), g.width()
    flat = x
    if len(g.shapes[x]) == 3:
        tokens = g.shapes[x][1]
        flat = g.reshape(x, f"N*{tokens}", width)
    turned = g.one(0, 1)
    weight = g.matrix(out, width) if turned else g.matrix(width, out)
    bias = g.one("", f", {g.weight(out)}", f", {g.weight(1, out)}")
    made = g.add(f"Gemm<transB={turned}, alpha=0.8>({flat}, {weight}{bias})", g.shapes[flat][0], out)
    if flat == x:
        return made
    if g.one(True, False):
        made = g.same(f"Relu({made})", made)
    return g.reshape(made, *_last(g, x, out))


def constants(g: Sketch, x: str) -> str:
    """A constant per channel, per token, per cell, or one for all."""
    width = channels(g, x, -1)
    shapes: list[tuple[int, ...]] = [(width,), (width,), (1, width), (1,)]
    if len(g.shapes[x]) == 3 and g.shapes[x][1] != "S":
        tokens = channels(g, x, 1)
        shapes += [(tokens, 1), (tokens, width), (1, tokens, width)]
    return g.same(f"{g.one('Add', 'Mul', 'Sub', 'PRelu')}({x}, {g.weight(*g.one(*shapes))})", x)


def norm(g: Sketch, x: str) -> str:
    width = channels(g, x, -1)
    bias = g.one("", f", {g.weight(width)}")
    return g.same(f"LayerNormalization<epsilon=0.01>({x}, {g.weight(width)}{bias})", x)


def root_mean_square(g: Sketch, x: str) -> str:
    """Written out."""
    two, eps = (g.constant(np.array(v, dtype=np.float32)) for v in (2, 0.01))
    mean = g.hidden(g.reduce("ReduceMean", g.hidden(f"Pow({x}, {two})"), -1, keep=True))
    root = g.hidden(f"Sqrt({g.hidden(f'Add({mean}, {eps})')})")
    scaled = (
        g.same(f"Div({x}, {root})", x)
        if g.one(True, False)
        else g.same(f"Mul({x}, {g.hidden(f'Reciprocal({root})')})", x)
    )
    return g.same(f"Mul({g.weight(channels(g, x, -1))}, {scaled})", x)


def softmax(g: Sketch, x: str) -> str:
    axis = g.one(-1, 1)
    return g.same(f"{g.one('Softmax', 'LogSoftmax')}<axis={axis}>({x})", x)


def gated(g: Sketch, x: str) -> str:
    """A packed pair of hidden layers of which one gates the other, and the way back to the stream."""
    width, hidden = channels(g, x, -1), g.width()
    both = g.add(f"MatMul({x}, {g.matrix(width, 2 * hidden)})", *_last(g, x, 2 * hidden))
    half = _last(g, x, hidden)
    if g.one(True, False):
        a, b = g.several(g.halves(both, -1), half, half)
    else:
        middle = g.ints(hidden)
        if g.one(True, False):  # the legacy spelling: half of what Shape says
            last = len(half) - 1
            measured = g.hidden(f"Gather({g.hidden(f'Shape({both})')}, {g.ints(last)})")
            middle = g.hidden(f"Div({g.hidden(f'Add({measured}, {g.ints(1)})')}, {g.ints(2)})")
        a = g.add(f"Slice({both}, {g.ints(0)}, {middle}, {g.ints(-1)})", *half)
        b = g.add(f"Slice({both}, {middle}, {g.ints(2**62)}, {g.ints(-1)})", *half)
    op = g.one("Softplus", "Sigmoid", "Tanh")
    mixed = g.same(f"Mul({g.same(f'{op}({a})', a)}, {b})", a)
    back = g.add(f"MatMul({mixed}, {g.matrix(hidden, width)})", *_last(g, x, width))
    return g.same(f"Add({x}, {back})", x)


def perceptron(g: Sketch, x: str) -> str:
    """Two layers and the residual connection around them."""
    first = linear(g, x)
    hidden = g.same(f"Relu({first})", first)
    return g.same(f"Add({linear(g, hidden, channels(g, x, -1))}, {x})", x)


def over_tokens(g: Sketch, x: str) -> str:
    """A layer that mixes tokens, where their number is fixed."""
    tokens, width = _rows(g, x)
    if isinstance(tokens, str):
        return perceptron(g, x)
    out = g.one(tokens, g.width())
    turned = g.add(f"Transpose<perm=[0,2,1]>({x})", "N", width, tokens)
    mixed = g.add(f"MatMul({turned}, {g.weight(tokens, out)})", "N", width, out)
    return g.add(f"Transpose<perm=[0,2,1]>({mixed})", "N", out, width)


def from_the_left(g: Sketch, x: str) -> str:
    """The same with the weight as the left operand."""
    tokens, width = _rows(g, x)
    if isinstance(tokens, str):
        return linear(g, x)
    return g.add(f"MatMul({g.weight(3, tokens)}, {x})", "N", 3, width)


def recurrent(g: Sketch, x: str) -> str:
    tokens, width = _rows(g, x)
    hidden, ways = g.one(2, 3, 4), g.one(1, 2)
    op, gates = g.one(("LSTM", 4), ("GRU", 3), ("RNN", 1))
    turned = g.add(f"Transpose<perm=[1,0,2]>({x})", tokens, "N", width)
    w, r = g.weight(ways, gates * hidden, width), g.weight(ways, gates * hidden, hidden)
    b = g.one("", f", {g.weight(ways, 2 * gates * hidden)}")
    direction = "bidirectional" if ways == 2 else "forward"
    text = f'{op}<hidden_size={hidden}, direction="{direction}">({turned}, {w}, {r}{b})'
    states = g.add(text, tokens, ways, "N", hidden)
    if ways == 1:
        single = g.add(f"Squeeze({states}, {g.ints(1)})", tokens, "N", hidden)
        return g.add(f"Transpose<perm=[1,0,2]>({single})", "N", tokens, hidden)
    turned = g.add(f"Transpose<perm=[2,0,1,3]>({states})", "N", tokens, ways, hidden)
    return g.reshape(turned, "N", tokens, ways * hidden)


def pooled(g: Sketch, x: str) -> str:
    """To vectors: the mean, the largest or one token."""
    _, width = _rows(g, x)
    text = g.one(
        g.reduce("ReduceMean", x, 1, keep=False),
        g.reduce("ReduceMax", x, 1, keep=False),
        f"Gather<axis=1>({x}, {g.constant(np.array(g.one(0, -1)))})",
    )
    return g.add(text, "N", width)


def as_map(g: Sketch, x: str) -> str:
    """To feature maps of one column, where the number of tokens is fixed."""
    tokens, width = _rows(g, x)
    if isinstance(tokens, str) or tokens * width > 8 * WIDEST:
        return linear(g, x)
    turned = g.add(f"Transpose<perm=[0,2,1]>({x})", "N", width, tokens)
    return g.reshape(turned, "N", width, tokens, 1)


def cumulative(g: Sketch, x: str) -> str:
    return g.same(f"CumSum({x}, {g.constant(np.array(g.one(1, 1, 2)))})", x)


def einsum(g: Sketch, x: str) -> str:
    tokens, width = _rows(g, x)
    out = g.width()
    return g.add(f'Einsum<equation="bsc,cd->bsd">({x}, {g.weight(width, out)})', "N", tokens, out)


def plus_table(g: Sketch, x: str) -> str:
    """Embeddings of the token ids, where the model has them as an input."""
    _, width = _rows(g, x)
    if g.symbols.get("ids", ())[1:] != (g.shapes[x][1],):
        return gated(g, x)
    looked_up = g.same(f"Gather({g.matrix(VOCABULARY, width)}, ids)", x)
    return g.same(f"Add({x}, {looked_up})", x)


def spread(g: Sketch, x: str) -> str:
    """Vectors to tokens: all get the same."""
    tokens: Dim = "S" if any("S" in s for s in g.shapes.values()) else TOKENS
    width = channels(g, x, 1)
    raised = g.add(f"Unsqueeze({x}, {g.ints(1)})", "N", 1, width)
    full = (g.one("N", 1), tokens, g.one(width, 1))
    return g.add(f"Expand({raised}, {g.sizes(full)})", "N", tokens, width)


def outer(g: Sketch, x: str) -> str:
    """Vectors to feature maps of one place."""
    width = channels(g, x, 1)
    if g.one(True, False):
        return g.reshape(x, "N", width, 1, 1)
    return g.add(f"Unsqueeze({x}, {g.ints(2, 3)})", "N", width, 1, 1)


ON_VECTORS: list[Step] = [
    gemm,
    gemm,
    linear,
    perceptron,
    gated,
    constants,
    norm,
    root_mean_square,
    softmax,
    spread,
    outer,
]
ON_ROWS: list[Step] = [
    linear, linear, gemm, constants, constants, norm, root_mean_square, softmax, gated, gated, perceptron, over_tokens,
    from_the_left, recurrent, pooled, as_map, cumulative, einsum, plus_table,
]  # fmt: skip
