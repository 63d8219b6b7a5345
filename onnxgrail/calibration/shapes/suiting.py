"""Search for input sizes that a model runs on, by trial, if the names of dimensions do not determine them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.signature import Signature, signature_of
from onnxgrail.calibration.observe import probe_feed
from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.calibration.runtime.wording import shapes_of
from onnxgrail.calibration.shapes.dims import Sized, Usual, choose, is_past
from onnxgrail.core import Feed
from onnxgrail.errors import DataError, ModelError
from onnxgrail.graph.io.serial import pack
from onnxgrail.graph.slots import is_float

RUNS = 48  # maximum number of runs of the model
TOLD = 6  # maximum number of shapes in a message

Changes = Mapping[str, Any]
# Equal lengths (exporters may name every axis apart), empty caches, single samples, states whose second axis
# is the batch, masks over cached and new tokens, fewer positions, images of the usual training size, and audio, which
# convolutions shorten several hundred times.
ALIKE, PAST, MASK = {"alike": True}, {"past": 0}, {"whole_mask": True}
JOINED, ONE = {"batch": 2, "joined": True}, {"batch": 1, "joined": True}
SIZES: tuple[Changes, ...] = ({"scale": 0.5}, {"scale": 0.25}, {"image": 224}, {"scale": 64}, {"scale": 32})

Draw = Callable[[Usual, Mapping[str, int]], Batches]
"""Makes random inputs of usual sizes, with the given sizes for named axes."""


def suited(model: ir.Model, draw: Draw, *, providers: Sequence[str]) -> tuple[Batches | None, tuple[str, ...]]:
    """Search for input sizes that a model runs on.

    Args:
        model: the model; it does not run on the usual sizes.
        draw: makes random inputs.
        providers: execution providers.

    Returns:
        The first random inputs that the model runs on, or None, and the shapes that were tried without success.

    Raises:
        ModelError: ONNX Runtime does not load the model.
    """
    signature = signature_of(model)
    tried: list[str] = []
    with open_session(pack(model), Setup(providers=providers, once=True)) as session:
        for batches, feed in itertools.islice(_distinct(_candidates(signature, draw), signature), RUNS):
            try:
                session.run(feed)
            except ModelError:
                tried.append(shapes_of(feed))
                continue
            return batches, tuple(tried)
    return None, tuple(tried)


def told(tried: Sequence[str]) -> str:
    """Return the tried shapes as text for a hint."""
    more = f"; and {len(tried) - TOLD} more" if len(tried) > TOLD else ""
    return "; ".join(tried[:TOLD]) + more


def _distinct(candidates: Iterator[Batches], signature: Signature) -> Iterator[tuple[Batches, Feed]]:
    """Yield candidates, each with a feed to try: two samples, then the whole first feed; skip shapes tried before."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for batches in candidates:
        try:
            first = batches.first()
        except DataError:  # all inputs are empty
            continue
        for feed in (probe_feed(first, signature), first):
            shapes = tuple(array.shape for array in feed.values())
            if shapes not in seen:
                seen.add(shapes)
                yield batches, feed


def _candidates(signature: Signature, draw: Draw) -> Iterator[Batches]:
    """Yield inputs of usual sizes with more and more changes; then set one open axis at a time to sizes of others."""
    profiles = list(_profiles(signature))
    for usual in profiles:
        yield draw(usual, {})
    for usual in (Usual(batch=2), Usual(batch=1, joined=True)):
        sized = choose(signature, batch=1, input_shapes={}, sizes={}, usual=usual)
        batch = next((shape[0] for shape in sized.shapes.values() if shape), 1)
        for name, size in sized.sizes.items():
            for other in _other_sizes(size, sized, batch):
                yield draw(usual, {name: other})


def _other_sizes(size: int, sized: Sized, batch: int) -> list[int]:
    """Return sizes that an axis may require: 0, 1, the batch size, that of another axis, or the sum of two axes."""
    others = sorted({*sized.sizes.values()} - {size})
    sums = [a + b for a, b in itertools.combinations(others, 2)] + [size + other for other in others]
    return [s for s in dict.fromkeys([batch, 1, 0, *others, *sums]) if s != size]


def _profiles(signature: Signature) -> Iterator[Usual]:
    """Yield usual sizes with changes that this signature makes likely, fewest changes first."""
    sounds = [e for e in signature if e.shape is not None and len(e.shape) == 2 and is_float(e.dtype)]
    tokens = [e for e in signature if e.dtype.kind in "iu" and e.shape and "mask" not in e.name.lower()]
    open_sizes = [s for s in SIZES if "scale" not in s or s["scale"] < 1 or (sounds and not tokens)]
    caches = any(is_past(entry) for entry in signature)
    masks = caches and any("mask" in entry.name.lower() for entry in signature)
    states = any(e.shape and len(e.shape) >= 3 and isinstance(e.shape[0], int) for e in signature)
    kinds: list[Changes] = [*([PAST] if caches else []), *([MASK] if masks else []), *([JOINED] if states else []), ONE]
    several: list[tuple[Changes, ...]] = [
        some for number in (1, 2, 3) for some in itertools.combinations(kinds, number)
    ]
    for some in [(ALIKE,), *several, *((size, *kind) for size in open_sizes for kind in ((), *((k,) for k in kinds)))]:
        usual = Usual()
        for changes in some:
            usual = replace(usual, **changes)
        yield usual
