"""Attention over token sequences, in the spellings of exporters."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tests.property.sketch import Dim, Sketch, Step, channels
from tests.property.steps_rows import root_mean_square


@dataclass(frozen=True)
class Heads:
    """Sizes of one attention layer: query heads, key-value heads, numbers per head, tokens."""

    count: int
    groups: int
    size: int
    tokens: Dim


def attention(g: Sketch, x: str) -> str:
    """Projections, perhaps rotated; scores, perhaps masked; heads side by side again."""
    count = g.one(1, 2, 3, 4)
    groups = count if g.one(True, False) else g.divisor(count)
    plan = Heads(count, groups, g.one(2, 2, 4, 1), g.shapes[x][1])
    query, key, value = projections(g, x, plan)
    if plan.size % 2 == 0 and g.one(True, False):
        query, key = rotated(g, query), rotated(g, key)
    if g.opset >= 23 and g.one(True, False):
        mixed = g.same(f"Attention({query}, {key}, {value})", query)
    else:
        way = g.one(by_products, by_products, by_batch, by_einsum)
        mixed = way(g, query, repeated(g, key, plan), repeated(g, value, plan), plan)
    merged = merge(g, mixed, plan)
    width = channels(g, x, 2)
    if g.one(True, True, False):
        back = g.add(f"MatMul({merged}, {g.matrix(plan.count * plan.size, width)})", *g.shapes[x])
        return g.same(f"Add({x}, {back})", x)
    return merged


def projections(g: Sketch, x: str, plan: Heads) -> tuple[str, str, str]:
    """Query, key and value as (batch, heads, tokens, size)."""
    way = g.one("separate", "separate", "split", "slices", "stacked", "interleaved")
    counts = (plan.count, plan.groups, plan.groups)
    widths = [c * plan.size for c in counts]
    if way == "separate":
        other = g.like(x) if g.rarely() else x  # attention to another sequence
        rows = [_linear(g, source, width) for source, width in zip((x, other, other), widths, strict=True)]
    elif way in ("stacked", "interleaved") and plan.count == plan.groups:
        return _stacked(g, x, plan, inner=way == "interleaved")
    else:
        packed = _linear(g, x, sum(widths))
        shapes = [("N", plan.tokens, width) for width in widths]
        if way == "slices":
            starts = [0, widths[0], widths[0] + widths[1], sum(widths)]
            texts = [f"Slice({packed}, {g.ints(a)}, {g.ints(b)}, {g.ints(2)})" for a, b in pairwise(starts)]
            rows = [g.add(t, *s) for t, s in zip(texts, shapes, strict=True)]
        else:
            rows = g.several(f"Split<axis=2>({packed}, {g.ints(*widths)})", *shapes)
    a, b, c = (apart(g, row, n, plan) for row, n in zip(rows, counts, strict=True))
    return a, b, c


def _linear(g: Sketch, x: str, out: int) -> str:
    made = g.add(f"MatMul({x}, {g.matrix(channels(g, x, 2), out)})", *g.shapes[x][:2], out)
    return g.same(f"Add({made}, {g.weight(out)})", made) if g.one(True, False) else made


def _stacked(g: Sketch, x: str, plan: Heads, *, inner: bool) -> tuple[str, str, str]:
    """One Reshape for all three, which are picked by number on an axis of their own."""
    packed = _linear(g, x, 3 * plan.count * plan.size)
    if inner:
        cells = g.reshape(packed, "N", plan.tokens, plan.count, 3, plan.size)
        turned = g.add(f"Transpose<perm=[3,0,2,1,4]>({cells})", 3, "N", plan.count, plan.tokens, plan.size)
    else:
        cells = g.reshape(packed, "N", plan.tokens, 3, plan.count, plan.size)
        turned = g.add(f"Transpose<perm=[2,0,3,1,4]>({cells})", 3, "N", plan.count, plan.tokens, plan.size)
    numbers = [g.constant(np.array(k)) for k in range(3)]
    a, b, c = (g.add(f"Gather<axis=0>({turned}, {n})", "N", plan.count, plan.tokens, plan.size) for n in numbers)
    return a, b, c


def apart(g: Sketch, row: str, count: int, plan: Heads) -> str:
    cells = g.reshape(row, "N", plan.tokens, count, plan.size)
    if g.rarely():  # a norm of every head, with a scale that heads share
        cells = root_mean_square(g, cells)
    elif g.rarely():
        cells = g.same(f"LayerNormalization<epsilon=0.01>({cells}, {g.weight(plan.size)})", cells)
    return g.add(f"Transpose<perm=[0,2,1,3]>({cells})", "N", count, plan.tokens, plan.size)


def rotated(g: Sketch, x: str) -> str:
    """Rotary embedding, written out: halves change places."""
    size = channels(g, x, 3)
    half = (*g.shapes[x][:3], size // 2)
    cosine, sine = g.weight(size), g.weight(size)
    middle = g.ints(size // 2)
    if g.rarely():
        middle = g.hidden(f"Div({g.measured(x, 3)}, {g.ints(2)})")
    first = g.add(f"Slice({x}, {g.ints(0)}, {middle}, {g.ints(3)})", *half)
    second = g.add(f"Slice({x}, {middle}, {g.ints(2**62)}, {g.ints(3)})", *half)
    turned = g.same(f"Concat<axis=-1>({g.same(f'Neg({second})', second)}, {first})", x)
    return g.same(f"Add({g.same(f'Mul({x}, {cosine})', x)}, {g.same(f'Mul({turned}, {sine})', x)})", x)


def repeated(g: Sketch, x: str, plan: Heads) -> str:
    """Every key-value head as often as query heads read it."""
    if plan.groups == plan.count:
        return x
    times = plan.count // plan.groups
    raised = g.add(f"Unsqueeze({x}, {g.ints(2)})", "N", plan.groups, 1, plan.tokens, plan.size)
    full: tuple[Dim, ...] = ("N", plan.groups, times, plan.tokens, plan.size)
    dims = g.one(full, full, (1, 1, times, 1, 1))
    copies = g.add(f"Expand({raised}, {g.sizes(dims)})", *full)
    return g.reshape(copies, "N", plan.count, plan.tokens, plan.size)


def masked(g: Sketch, scores: str, plan: Heads) -> str:
    """Scores with a mask: causal and constant, per head, or computed from the input."""
    tokens, rank = plan.tokens, len(g.shapes[scores])
    ways = ["none", "none"]
    if isinstance(tokens, int):
        ways += ["causal", "bias"]
    if rank == 4 and len(g.shapes.get("x", ())) == 3 and g.shapes["x"][1] == tokens:
        ways.append("input")
    way = g.one(*ways)
    if way == "none":
        return scores
    if way == "input":
        return _masked_by_input(g, scores, plan)
    assert isinstance(tokens, int)
    if way == "bias" and rank == 4:
        return g.same(f"Add({scores}, {g.weight(g.one(1, plan.count), tokens, tokens)})", scores)
    hidden = np.triu(np.full((tokens, tokens), -9, dtype=np.float32), 1)
    return g.same(f"Add({scores}, {g.constant(hidden)})", scores)


def _masked_by_input(g: Sketch, scores: str, plan: Heads) -> str:
    """Keys whose input is small on average are not looked at."""
    mean = g.hidden(g.reduce("ReduceMean", "x", 2, keep=False))
    seen = g.hidden(f"Greater({mean}, {g.constant(np.array(-0.5, dtype=np.float32))})")
    raised = g.hidden(f"Unsqueeze({seen}, {g.ints(1, 2)})")
    dims = g.one(
        ("N", 1, 1, plan.tokens), ("N", 1, plan.tokens, plan.tokens), ("N", plan.count, plan.tokens, plan.tokens)
    )
    wide = g.hidden(f"Expand({raised}, {g.sizes(dims)})")
    return g.same(f"Where({wide}, {scores}, {g.constant(np.array(-9, dtype=np.float32))})", scores)


def by_products(g: Sketch, query: str, key: str, value: str, plan: Heads) -> str:
    """Softmax(query keyᵀ) value."""
    turned = g.add(f"Transpose<perm=[0,1,3,2]>({key})", "N", plan.count, plan.size, plan.tokens)
    scores = g.add(f"MatMul({query}, {turned})", "N", plan.count, plan.tokens, plan.tokens)
    if g.one(True, False):
        scores = g.same(f"Mul({scores}, {g.constant(np.array(plan.size**-0.5, dtype=np.float32))})", scores)
    weights = g.same(f"Softmax<axis=-1>({masked(g, scores, plan)})", scores)
    return g.same(f"MatMul({weights}, {value})", query)


def by_batch(g: Sketch, query: str, key: str, value: str, plan: Heads) -> str:
    """The same with heads merged into the batch."""
    rows = f"N*{plan.count}"
    query, key, value = (g.reshape(t, rows, plan.tokens, plan.size) for t in (query, key, value))
    turned = g.add(f"Transpose<perm=[0,2,1]>({key})", rows, plan.size, plan.tokens)
    scores = g.add(f"MatMul({query}, {turned})", rows, plan.tokens, plan.tokens)
    weights = g.same(f"Softmax<axis=-1>({masked(g, scores, plan)})", scores)
    mixed = g.same(f"MatMul({weights}, {value})", query)
    return g.reshape(mixed, "N", plan.count, plan.tokens, plan.size)


def by_einsum(g: Sketch, query: str, key: str, value: str, plan: Heads) -> str:
    text = f'Einsum<equation="bhqd,bhkd->bhqk">({query}, {key})'
    scores = g.add(text, "N", plan.count, plan.tokens, plan.tokens)
    weights = g.same(f"Softmax<axis=-1>({masked(g, scores, plan)})", scores)
    return g.same(f'Einsum<equation="bhqk,bhkd->bhqd">({weights}, {value})', query)


def merge(g: Sketch, x: str, plan: Heads) -> str:
    """Heads side by side."""
    turned = g.add(f"Transpose<perm=[0,2,1,3]>({x})", "N", plan.tokens, plan.count, plan.size)
    return g.reshape(turned, "N", plan.tokens, plan.count * plan.size)


HEADS: list[Step] = [attention, attention, attention, attention]
