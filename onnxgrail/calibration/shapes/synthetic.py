"""Random inputs that fit a model, for users without data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.reading import ALL, Sampling
from onnxgrail.calibration.feeds.signature import Input, Signature, signature_of
from onnxgrail.calibration.shapes.dims import Shapes, Sized, Usual, choose, is_past
from onnxgrail.calibration.shapes.ids import table_rows
from onnxgrail.core import Array, Feed
from onnxgrail.errors import DataError, UsageError
from onnxgrail.graph.attributes import integer
from onnxgrail.graph.slots import is_float

SLOTS = {"GroupQueryAttention": (3, 4), "MultiHeadAttention": (6, 7)}  # input positions of the cache


SAMPLES, MOST = 64, 1_000_000
COST = (
    "no --data: calibrated on random inputs; expect clearly worse outputs on real ones, and no check can tell how much"
)
OTHERS = "The inputs are random: give --data or --input-shapes if the model needs others"
LARGEST = 2**31  # maximum bytes of a random input
RANK = 64  # maximum number of axes in numpy
RESERVED = 3  # low ids are usually padding, start and end tokens

SAMPLE_RATE = 16_000
_RATE = re.compile(r"(^|_)(sr|(sample|sampling)_?rate)$")

Fill = Literal["normal", "ids", "ones", "zeros", "positions", "rate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """The shape and kind of values of one random input; `rows` bounds ids, `start` is the first position."""

    entry: Input
    shape: tuple[int, ...]
    fill: Fill
    rows: int = 0
    start: int = 0


def synthetic(
    model: ir.Model,
    sampling: Sampling = ALL,
    *,
    input_shapes: Shapes | None = None,
    sizes: Mapping[str, int] | None = None,
    usual: Usual | None = None,
) -> Batches:
    """Make random feeds: uniform ids within the embedding table, masks of ones, running positions, else normal values.

    Integer inputs that index no constant table, and token types, are zero; a sampling rate is 16,000.  Open dimensions
    get small sizes (sequences 16, images 64x64); equal names get equal sizes.  The same seed gives the same values.

    Args:
        model: the model that is fed; its graph shows which tables integer inputs index.
        sampling: how many samples, 64 by default, in which batches.
        input_shapes: full shapes for some inputs, batch size included.
        sizes: sizes of named open dimensions.
        usual: sizes of the others.

    Raises:
        DataError: an input holds strings or declares no rank.
        UsageError: a given shape does not fit, or too many samples are requested.
    """
    signature, wanted = signature_of(model), sampling.samples or SAMPLES
    if wanted > MOST:
        raise UsageError(f"{wanted} random samples are too many, at most {MOST}", hint="64 to 512 say as much")
    shapes, batch = input_shapes or {}, min(sampling.batch_size, wanted)
    known = {**head_widths(model), **(sizes or {})}
    sized = choose(signature, batch=batch, input_shapes=shapes, sizes=known, usual=usual)
    short = _short(model, signature, sized)
    if short:
        sized = choose(signature, batch=batch, input_shapes=shapes, sizes={**short, **known}, usual=usual)
    draws = tuple(_plan(model, entry, sized) for entry in signature)
    firsts = {shape[0] for shape in sized.shapes.values() if shape}
    batch = firsts.pop() if len(firsts) == 1 and all(sized.shapes.values()) else 1
    count = -(-wanted // max(1, batch))
    return Batches(
        feeds=tuple(partial(_feed, draws, sampling.seed, number) for number in range(count)),
        samples=count * max(1, batch),
        source="synthetic",
        notes=(COST,),
        synthetic=True,
        hint=_hint(signature, sized.shapes),
    )


def _hint(signature: Signature, shapes: Shapes) -> str:
    """Return a hint with --input-shapes for the inputs that leave more open than the batch, in their current shapes."""
    left = [e for e in signature if e.shape is not None and any(not isinstance(d, int) for d in e.shape[1:])]
    if not left:
        return OTHERS
    drawn = " ".join(f"--input-shapes {e.name}:{','.join(map(str, shapes[e.name]))}" for e in left[:2])
    return f"{OTHERS}; these are {drawn}{' ...' if len(left) > 2 else ''}"


def _short(model: ir.Model, signature: Signature, sized: Sized) -> dict[str, int]:
    """Return smaller sizes for named dimensions that exceed the rows of the model's position table."""
    found: dict[str, int] = {}
    for entry in signature:
        last = entry.shape[-1] if entry.shape else None
        rows = table_rows(model, entry.name) if "position" in entry.name.lower() and isinstance(last, str) else None
        room = rows - sized.past if rows else 0
        if isinstance(last, str) and 0 < room < sized.shapes[entry.name][-1]:
            found[last] = min(room, found.get(last, room))
    return found


def _plan(model: ir.Model, entry: Input, sized: Sized) -> Draw:
    shape, name = sized.shapes[entry.name], entry.name.lower()
    _check_size(entry, shape)
    if entry.dtype.kind not in "biuf" and not is_float(entry.dtype):
        kind = "text" if entry.dtype.kind in "OSU" else f"{entry.dtype} values"
        raise DataError(f"input {entry.name!r} holds {kind}, which cannot be random", hint="Give --data")
    if entry.dtype.kind == "b" or "mask" in name:
        return Draw(entry=entry, shape=shape, fill="ones")
    if is_float(entry.dtype) or is_past(entry):
        return Draw(entry=entry, shape=shape, fill="normal")
    if _RATE.search(name) and prod(shape) == 1:
        return Draw(entry=entry, shape=shape, fill="rate")
    if "position" in name:
        return Draw(entry=entry, shape=shape, fill="positions", start=sized.past)
    if "token_type" in name or "segment" in name:
        return Draw(entry=entry, shape=shape, fill="zeros")
    rows = table_rows(model, entry.name)
    return (
        Draw(entry=entry, shape=shape, fill="ids", rows=rows) if rows else Draw(entry=entry, shape=shape, fill="zeros")
    )


def _check_size(entry: Input, shape: tuple[int, ...]) -> None:
    """Check that a random input is not too large: a file may declare any size.

    Raises:
        DataError: the shape is impossible or too large.
    """
    hint = f"Give --input-shapes {entry.name}:... or --data"
    if any(size < 0 for size in shape) or len(shape) > RANK:
        raise DataError(f"input {entry.name!r} cannot have the shape {list(shape)[:8]}", hint=hint)
    size = prod(shape) * max(entry.dtype.itemsize, 1)
    if size > LARGEST:
        raise DataError(f"input {entry.name!r} would take {size / 2**30:.3g} GiB ({entry})", hint=hint)


def _feed(draws: tuple[Draw, ...], seed: int, number: int) -> Feed:
    rng = np.random.default_rng((seed, number))
    return {draw.entry.name: _values(draw, rng) for draw in draws}


def _values(draw: Draw, rng: np.random.Generator) -> Array:
    dtype = draw.entry.dtype
    if draw.fill == "normal":
        return np.asarray(rng.standard_normal(draw.shape)).astype(dtype)
    if draw.fill == "ids" and draw.entry.kept:
        return rng.choice(np.array(draw.entry.kept), draw.shape).astype(dtype)
    if draw.fill == "ids":
        # A small vocabulary may have no reserved ids.
        low = RESERVED if draw.rows > 8 * RESERVED else 0
        return np.asarray(rng.integers(low, min(draw.rows, _top(dtype)), draw.shape)).astype(dtype)
    if draw.fill == "positions":
        last = draw.shape[-1] if draw.shape else 1
        row = np.arange(draw.start, draw.start + last).reshape(draw.shape and (last,))
        return np.ascontiguousarray(np.broadcast_to(row, draw.shape)).astype(dtype).reshape(draw.shape)
    return np.full(draw.shape, {"ones": 1, "rate": SAMPLE_RATE}.get(draw.fill, 0), dtype=dtype)


def _top(dtype: np.dtype[Any]) -> int:
    """Return one more than the largest value of an integer dtype."""
    return int(np.iinfo(dtype).max) + 1 if dtype.kind in "iu" else 2


def head_widths(model: ir.Model) -> dict[str, int]:
    """Return the sizes of named last dimensions of caches, as far as shapes recorded in the file determine them."""
    found: dict[str, int] = {}
    for value in model.graph.inputs:
        name = _open(value)
        if name is not None and "past" in (value.name or "").lower():
            sizes = [size for node, slot in value.uses() if (size := _told(node, slot))]
            if sizes:
                found[name] = sizes[0]
    return found


def _open(value: ir.Value) -> str | None:
    """Return the name of the last dimension of a cache; None if its size is fixed."""
    last = value.shape[-1] if value.shape is not None and len(value.shape) == 4 else None
    return last.value if isinstance(last, ir.SymbolicDim) and isinstance(last.value, str) else None


def _told(node: ir.Node, slot: int) -> int | None:
    """Return the head width that a node requires of the cache; None if the node does not determine it."""
    if slot in SLOTS.get(node.op_type, ()):
        query, heads = _last(node.inputs[0]), integer(node, "num_heads")
        packed = len(node.inputs) < 2 or node.inputs[1] is None
        parts = heads + 2 * integer(node, "kv_num_heads", heads) if packed else heads
        return query // parts if query is not None and parts else None
    others = (_last(v) for v in node.inputs if v is not node.inputs[slot]) if node.op_type == "Concat" else ()
    return next((size for size in others if size is not None), None)


def _last(value: ir.Value | None) -> int | None:
    """Return the size of the last axis; None if it is not recorded."""
    size = value.shape[-1] if value is not None and value.shape is not None and len(value.shape) else None
    return size if isinstance(size, int) else None
