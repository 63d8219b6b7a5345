"""Sizes for open dimensions: equal names get equal sizes, and formulas of names are computed."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from onnxgrail.calibration.feeds.signature import Input, Signature
from onnxgrail.errors import DataError, UsageError

PAST = 5
IMAGE = 64
CHANNELS = 3
# Distinct, so that different dimensions never get equal lengths by chance.
LENGTHS = (16, 12, 20, 24, 10, 28)

OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sized:
    """The shapes chosen for a signature.

    Attributes:
        shapes: concrete shape per input.
        past: length of the key-value cache, 0 if the model has none.
        sizes: of open axes, by the name of the dimension, or as `input[axis]`.
    """

    shapes: Shapes
    past: int
    sizes: Mapping[str, int]


def is_past(entry: Input) -> bool:
    """Return True if an input is a key or value cache."""
    return entry.shape is not None and len(entry.shape) >= 3 and "past" in entry.name.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Usual:
    """Default sizes.

    Lengths are `scale` times those of LENGTHS, images have `image` pixels per side, and caches hold `past` positions.

    Attributes:
        scale: factor of sequence lengths.
        image: pixels per side.
        past: cached positions.
        batch: samples per feed, also if an input has another fixed first axis; None: as requested, or as that axis.
        joined: the open second axis of an input whose first axis is fixed counts samples, as in recurrent states.
        whole_mask: the mask covers cached and new tokens, whatever the name of its axis.
        alike: all sequence lengths are equal, whatever the names of their axes.
    """

    scale: float = 1.0
    image: int = IMAGE
    past: int = PAST
    batch: int | None = None
    joined: bool = False
    whole_mask: bool = False
    alike: bool = False


def choose(
    signature: Signature, *, batch: int, input_shapes: Shapes, sizes: Mapping[str, int], usual: Usual | None = None
) -> Sized:
    """Choose concrete shapes for all inputs.

    Args:
        signature: the model's inputs.
        batch: size of a dimension that counts samples.
        input_shapes: full shapes that the user gave for some inputs; the names of their dimensions keep these sizes in
            other inputs.
        sizes: sizes of named dimensions.
        usual: sizes of the others.

    Raises:
        UsageError: a given shape names no input or contradicts the model.
        DataError: an input has no declared rank and no shape was given.
    """
    usual = usual or Usual()
    known = dict(sizes) | _given(signature, input_shapes)
    fixed = {e.shape[0] for e in signature if e.shape and isinstance(e.shape[0], int)}
    if usual.batch is not None:
        batch = usual.batch
    elif len(fixed) == 1:
        batch = fixed.pop()
    has_past = any(is_past(entry) for entry in signature)
    lengths = _Lengths(known=known, batch=batch, has_past=has_past, usual=usual, signature=signature)
    for entry in signature:  # plain names first: formulas need them
        if entry.shape is not None and entry.name not in input_shapes:
            for axis, dim in enumerate(entry.shape):
                if isinstance(dim, str) and dim.isidentifier() and "total" not in dim.lower():
                    lengths.plain(entry, axis, dim)
    shapes = {e.name: tuple(input_shapes[e.name]) if e.name in input_shapes else lengths.shape(e) for e in signature}
    return Sized(shapes=shapes, past=lengths.past if has_past else 0, sizes=lengths.known)


def check_names(signature: Signature, input_shapes: Iterable[str]) -> None:
    """Check that inputs whose shapes the user gave are there.

    Raises:
        UsageError: one is not.
    """
    names = [entry.name for entry in signature]
    for name in input_shapes:
        if name not in names:
            raise UsageError(f"input shape for {name!r}: no such input", hint=f"The model takes {', '.join(names)}")


def _given(signature: Signature, input_shapes: Shapes) -> dict[str, int]:
    """Return the sizes of named dimensions from the shapes that the user gave."""
    check_names(signature, input_shapes)
    entries, known = {e.name: e for e in signature}, {}
    for name, shape in input_shapes.items():
        entry = entries[name]
        if entry.shape is None:
            continue
        fits = len(shape) == len(entry.shape) and all(
            not isinstance(d, int) or d == s for d, s in zip(entry.shape, shape, strict=True)
        )
        if not fits:
            raise UsageError(
                f"input shape {name}:{','.join(map(str, shape))} does not fit", hint=f"The model takes: {entry}"
            )
        known.update({d: s for d, s in zip(entry.shape, shape, strict=True) if isinstance(d, str)})
    return known


@dataclass(slots=True)
class _Lengths:
    """The sizes assigned so far."""

    known: dict[str, int]
    batch: int
    has_past: bool
    usual: Usual
    signature: Signature
    taken: int = 0

    @property
    def past(self) -> int:
        given = (size for name, size in self.known.items() if _means(name, "past") and not _means(name, "total"))
        return next(given, self.usual.past)

    def length(self, key: str) -> int:
        """Return the length stored under a key; if there is none, store the next unused sequence length."""
        if key not in self.known:
            self.known[key] = max(1, int(LENGTHS[self.taken % len(LENGTHS)] * self.usual.scale))
            self.taken += not self.usual.alike
        return self.known[key]

    def plain(self, entry: Input, axis: int, name: str) -> int:
        """Return the size of a dimension with a plain name."""
        if name not in self.known:
            opaque_past = is_past(entry) and axis == len(entry.shape or ()) - 2 and not _sequential(name)
            if opaque_past or _means(name, "past") or (_means(name, "cache") and not _means(name, "dim")):
                self.known[name] = self.past
            elif _means(name, "batch") or (axis == 0 and not _sequential(name)) or self.counts_samples(entry, axis):
                self.known[name] = self.batch
            else:
                self.known[name] = self.by_place(entry, axis, name)
        return self.known[name]

    def counts_samples(self, entry: Input, axis: int) -> bool:
        """Return True if an axis is taken as the batch of a state, such as (layers, batch, width)."""
        shape = entry.shape or ()
        return self.usual.joined and axis == 1 and len(shape) >= 3 and isinstance(shape[0], int)

    def by_place(self, entry: Input, axis: int, key: str) -> int:
        """Return the size of a dimension from its position, because its name says nothing."""
        if entry.shape is not None and len(entry.shape) == 4 and entry.dtype.kind == "f" and not is_past(entry):
            return CHANNELS if axis == 1 else self.usual.image
        if _means(key, "height") or _means(key, "width"):
            return self.usual.image
        return self.length(key)

    def shape(self, entry: Input) -> tuple[int, ...]:
        """Return the concrete shape of an input."""
        if entry.shape is None:
            raise DataError(
                f"input {entry.name!r} declares no shape", hint=f"Give --input-shapes {entry.name}:... or --data"
            )
        return tuple(self.size(entry, axis, dim) for axis, dim in enumerate(entry.shape))

    def size(self, entry: Input, axis: int, dim: int | str | None) -> int:
        """Return the concrete size of an axis."""
        if isinstance(dim, int):
            return dim
        if isinstance(dim, str) and dim:
            return self.named(entry, axis, dim)
        if axis == 0 or self.counts_samples(entry, axis):
            return self.batch
        if is_past(entry):
            return self.past
        rank = len(entry.shape or ())
        if self.has_past and _is_mask_length(entry, axis):
            return self.total()
        # Unnamed axes: two-dimensional inputs of a model are tokens and share their length.
        return self.by_place(entry, axis, "sequence" if axis == 1 and rank == 2 else f"{entry.name}[{axis}]")

    def named(self, entry: Input, axis: int, name: str) -> int:
        """Return the size of a dimension with a name or a formula."""
        if self.usual.whole_mask and _is_mask_length(entry, axis):
            return self.total()
        if name in self.known:
            return self.known[name]
        value = self.total() if _means(name, "total") else self.computed(name)
        return value if value is not None else self.plain(entry, axis, name)

    def total(self) -> int:
        """Return the length of the attention mask: cached plus new tokens."""
        past = self.past if self.has_past else 0
        tokens = next((e for e in self.signature if _holds_tokens(e)), None)
        if tokens is not None and tokens.shape is not None:
            return past + self.size(tokens, 1, tokens.shape[1])
        fed = next((s for n, s in self.known.items() if _sequential(n) and not _means(n, "past")), None)
        return past + (fed if fed is not None else self.length("sequence"))

    def computed(self, text: str) -> int | None:
        """Return the value of a sum or product of names and numbers, such as `past_sequence_length + 1`; else None."""
        if not re.search(r"[+*/-]", text):
            return None
        try:
            return self._evaluate(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):  # the last two: by parse
            return None

    def _evaluate(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            if node.id in self.known:
                return self.known[node.id]
            self.known[node.id] = self.past if _means(node.id, "past") else self.length(node.id)
            return self.known[node.id]
        if isinstance(node, ast.BinOp):
            left, right = self._evaluate(node.left), self._evaluate(node.right)
            if type(node.op) in OPERATIONS:
                return OPERATIONS[type(node.op)](left, right)
        raise ValueError(ast.dump(node))


def _is_mask_length(entry: Input, axis: int) -> bool:
    """Return True for the last axis of a mask."""
    return _means(entry.name, "mask") and axis == len(entry.shape or ()) - 1


def _holds_tokens(entry: Input) -> bool:
    """Return True for inputs of new tokens: ids (samples, tokens) or embeddings (samples, tokens, width)."""
    rank = len(entry.shape or ())
    return rank in (2, 3) and not is_past(entry) and not _means(entry.name, "mask")


def _means(name: str, word: str) -> bool:
    return word in name.lower()


def _sequential(name: str) -> bool:
    return any(_means(name, word) for word in ("seq", "len", "token", "time", "frame"))
