"""A random graph as it grows: node lines, weights in several spellings, the shape of all that may be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from hypothesis import strategies as st

from onnxgrail.core import Array
from tests.tiny import ints

T = TypeVar("T")
Dim = int | str  # a symbol, "N" or "S", where the size follows the input; "N*3" for a symbol that was merged
Shape = tuple[Dim, ...]

SIDE = 4  # of feature maps at the start
TOKENS = 5  # of a sequence of fixed length; "S" stands for as many in the first feed
WIDEST = 16  # channels, beyond which steps stop to add more


@dataclass(frozen=True)
class Sketch:
    """A graph so far.

    Attributes:
        draw: of Hypothesis, through which every choice goes.
        opset: of the model.
        lines: nodes as ONNX text.
        weights: constants: arrays, or shapes of arrays that are drawn.
        shapes: of everything that may be read, batch included.
        symbols: name of the input of token ids -> its shape; it is no activation.
        used: names of the steps that were taken.
    """

    draw: st.DrawFn
    opset: int = 20
    lines: list[str] = field(default_factory=list)
    weights: dict[str, tuple[int, ...] | Array] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    symbols: dict[str, Shape] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    # ---- choices
    def one(self, *options: T) -> T:
        """One of these."""
        return self.draw(st.sampled_from(options))

    def rarely(self) -> bool:
        """True in one of six."""
        return self.one(False, False, False, False, False, True)

    def shuffled(self, *names: str) -> str:
        """Operands in any order."""
        return ", ".join(self.draw(st.permutations(names)))

    def width(self) -> int:
        """A number of channels."""
        return self.draw(st.integers(2, 8))

    def divisor(self, number: int) -> int:
        """Of a number, 1 and itself included."""
        return self.one(*[d for d in range(1, number + 1) if number % d == 0])

    def like(self, x: str, *, channel: int | None = None) -> str:
        """Anything of the same shape; with `channel`, of the same shape but for that axis."""
        whole = self.shapes[x]
        fits = [n for n, s in self.shapes.items() if _without(s, channel) == _without(whole, channel)]
        return self.one(*fits)

    # ---- nodes
    def add(self, text: str, *shape: Dim) -> str:
        """A node with one output."""
        return self.several(text, shape)[0]

    def several(self, text: str, *shapes: Shape) -> list[str]:
        """A node with several outputs."""
        names = [f"t{len(self.lines)}{'abc'[k] if k else ''}" for k in range(len(shapes))]
        self.lines.append(f"{', '.join(names)} = {text}")
        self.shapes.update(zip(names, shapes, strict=True))
        return names

    def same(self, text: str, x: str) -> str:
        """A node whose output has the shape of x."""
        return self.add(text, *self.shapes[x])

    def hidden(self, text: str) -> str:
        """A node of arithmetic on sizes, which no step reads as an activation."""
        name = f"i{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    # ---- constants
    def constant(self, value: tuple[int, ...] | Array) -> str:
        """An initializer of its own."""
        name = f"w{len(self.weights)}"
        self.weights[name] = value
        return name

    def ints(self, *values: int) -> str:
        """A shape or index."""
        return self.constant(ints(*values))

    def weight(self, *shape: int) -> str:
        """A weight: mostly its own, sometimes one that another node reads too."""
        known = [n for n, w in self.weights.items() if isinstance(w, tuple) and w == shape] if self.rarely() else []
        return self.one(*known) if known else self.constant(shape)

    def matrix(self, *shape: int) -> str:
        """A weight that may be the output of a node: renamed, transposed, or kept as integers with scales."""
        spelling = self.one("plain", "plain", "plain", "plain", "Identity", "Transpose", "integers")
        if spelling == "Identity":
            return self.hidden(f"Identity({self.weight(*shape)})")
        if spelling == "Transpose" and len(shape) == 2:
            return self.hidden(f"Transpose({self.weight(*shape[::-1])})")
        if spelling == "integers" and len(shape) > 1:
            return self._integers(shape)
        return self.weight(*shape)

    def _integers(self, shape: tuple[int, ...]) -> str:
        rng = np.random.default_rng(len(self.weights))
        axis = self.one(*range(len(shape)))
        numbers = self.constant(rng.integers(-90, 90, shape).astype(np.int8))
        fan = int(np.prod(shape)) // max(shape)
        scales = self.constant((rng.uniform(0.5, 1.5, shape[axis]) / 60 / np.sqrt(fan)).astype(np.float32))
        zero = f", {self.constant(rng.integers(-9, 9, shape[axis]).astype(np.int8))}" if self.rarely() else ""
        return self.hidden(f"DequantizeLinear<axis={axis}>({numbers}, {scales}{zero})")

    # ---- spellings that depend on the opset
    def reduce(self, op: str, x: str, *axes: int, keep: bool) -> str:
        """Text of a reduction, whose axes are an operand or an attribute."""
        keepdims = f"keepdims={int(keep)}"
        if self.opset < 18 and op != "ReduceSum":
            return f"{op}<{keepdims}, axes=[{', '.join(map(str, axes))}]>({x})"
        return f"{op}<{keepdims}>({x}, {self.ints(*axes)})"

    def halves(self, x: str, axis: int) -> str:
        """Text of a Split in two."""
        count = ", num_outputs=2" if self.opset >= 18 else ""
        return f"Split<axis={axis}{count}>({x})"

    # ---- computed shapes
    def reshape(self, x: str, *dims: Dim) -> str:
        """Reshape by a constant, or by sizes that the graph computes."""
        return self.add(f"Reshape({x}, {self.target(x, dims)})", *dims)

    def target(self, x: str, dims: Sequence[Dim]) -> str:
        """A target shape in one of the spellings that exporters use."""
        open_ = [d for d in dims if isinstance(d, str)]
        copied = [d == s for d, s in zip(dims, self.shapes[x], strict=False)] + [False] * len(dims)
        left = [d for d, c in zip(dims, copied, strict=False) if isinstance(d, str) and not c]
        ways = ["computed", "computed"]
        if len(open_) <= 1:
            ways += ["inferred"] * 2
        if not left:
            ways += ["copied"] * 2
        way = self.one(*ways)
        if way == "inferred":
            free = dims.index(open_[0]) if open_ else self.one(*range(len(dims)))
            return self.ints(*[-1 if k == free else int(d) for k, d in enumerate(dims)])
        if way == "copied":
            values = [
                0 if c and (isinstance(d, str) or self.one(True, False)) else d
                for d, c in zip(dims, copied, strict=False)
            ]
            free = self.one(None, *[k for k, d in enumerate(dims) if isinstance(d, int)])
            return self.ints(*[-1 if k == free else int(d) for k, d in enumerate(values)])
        free = self.one(None, None, *range(len(dims)))
        pieces = [self.ints(-1) if k == free else self.size(d) for k, d in enumerate(dims)]
        return self.hidden(f"Concat<axis=0>({', '.join(pieces)})")

    def sizes(self, dims: Sequence[Dim]) -> str:
        """A computed shape without -1."""
        return self.hidden(f"Concat<axis=0>({', '.join(self.size(d) for d in dims)})")

    def size(self, dim: Dim) -> str:
        """One size, as a tensor of one element: a constant, or taken from the shape of something."""
        places = [(n, k) for n, s in (self.shapes | self.symbols).items() for k, d in enumerate(s) if d == dim]
        if isinstance(dim, int):
            way = self.one("constant", "constant", "measured", "product")
            if way == "constant" or (way == "measured" and not places):
                return self.ints(dim)
            if way == "product":
                return self._product(dim)
        elif "*" in dim:
            symbol, factor = dim.split("*")
            pair = self.size(symbol), self.size(int(factor) if factor.isdigit() else factor)
            return self.hidden(f"Mul({self.shuffled(*pair)})")
        name, axis = self.one(*places)
        return self.measured(name, axis)

    def _product(self, dim: int) -> str:
        """A size out of others: the width of a tensor over its heads, or the other way round."""
        wider = [
            (n, k, d) for n, s in self.shapes.items() for k, d in enumerate(s) if isinstance(d, int) and d % dim == 0
        ]
        if wider and self.one(True, False):
            name, axis, size = self.one(*wider)
            return self.hidden(f"Div({self.measured(name, axis)}, {self.ints(size // dim)})")
        factor = self.divisor(dim)
        return self.hidden(f"Mul({self.size(factor)}, {self.ints(dim // factor)})")

    def measured(self, x: str, axis: int) -> str:
        """The size of one axis of a tensor."""
        if self.one(True, False):
            return self.hidden(f"Shape<start={axis}, end={axis + 1}>({x})")
        shape = self.hidden(f"Shape({x})")
        if self.one(True, False):
            return self.hidden(f"Slice({shape}, {self.ints(axis)}, {self.ints(axis + 1)})")
        scalar = self.hidden(f"Gather({shape}, {self.constant(np.array(axis))})")
        return self.hidden(f"Unsqueeze({scalar}, {self.ints(0)})")


Step = Callable[[Sketch, str], str]


def channels(g: Sketch, x: str, axis: int) -> int:
    """Size of a channel axis, which is always a number."""
    size = g.shapes[x][axis]
    assert isinstance(size, int)
    return size


def _without(shape: Shape, axis: int | None) -> tuple[Dim, ...]:
    return shape if axis is None else (*shape[:axis], "?", *shape[axis % len(shape) + 1 :])
