"""Make a feed from the samples that were chosen for it, when it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxgrail.calibration.feeds.parts import Part
from onnxgrail.calibration.feeds.signature import Input, Signature, agrees, convert, samples_of
from onnxgrail.core import Array, Feed, Ints, Labels


def samples_in(part: Part, signature: Signature) -> int:
    """Return the number of samples in a ready feed, at least 1; see `samples_of`."""
    return max(1, samples_of({entry.name: part.arrays[entry.name] for entry in signature}, signature))


def rows_in(part: Part, signature: Signature) -> int:
    """Return the length of the first axis of a part: that of any array that has axes."""
    return next(int(a.shape[0]) for a in (part.arrays[entry.name] for entry in signature) if a.ndim)


def gathered(parts: tuple[Part, ...], entry: Input, rows: Ints) -> Array:
    """Return rows of the concatenated parts, or the number that all samples share (a threshold, a sample rate)."""
    pieces, offset = [], 0
    for part in parts:
        array = part.arrays[entry.name]
        if not array.ndim:
            return np.asarray(array)
        here = rows[(rows >= offset) & (rows < offset + len(array))] - offset
        if len(here):
            pieces.append(array[here])
        offset += len(array)
    return np.asarray(pieces[0]) if len(pieces) == 1 else np.concatenate(pieces)


def unstacked(part: Part, signature: Signature) -> tuple[Part, ...]:
    """Return the feeds of a part if arrays have one axis more than their inputs; any other part as it is.

    Models with states, whose axes hold no samples, get their feeds in this way.  Arrays of other inputs, whose first
    axis counts samples, give one row to each feed.
    """
    if part.ready:
        return (part,)
    given, part = part, _with_settings(part, signature)
    arrays = {entry.name: part.arrays[entry.name] for entry in signature}
    more = {entry.name for entry in signature if _fits(arrays[entry.name].shape, entry, ())}
    rows = all(entry.name in more or _fits(arrays[entry.name].shape, entry, (1,)) for entry in signature)
    if not more or not rows or len({array.shape[0] for array in arrays.values()}) != 1:
        return (given,)
    count, labels = rows_in(part, signature), part.labels
    labels = labels if labels is not None and len(labels.values) == count else None
    who = "all arrays have" if len(more) == len(arrays) else f"{', '.join(map(repr, sorted(more)))} of the arrays have"
    note = f"{part.source}: {who} one axis more than the inputs, so the first one counts {count} feeds"
    notes = part.notes if part is not given else (*part.notes, note)
    whole = {name: np.asarray(array) for name, array in arrays.items()}
    return tuple(
        replace(
            part,
            arrays={name: array[k] if name in more else array[k : k + 1] for name, array in whole.items()},
            ready=True,
            notes=() if k else notes,
            labels=replace(labels, values=labels.values[k : k + 1]) if labels is not None else None,
        )
        for k in range(count)
    )


def _with_settings(part: Part, signature: Signature) -> Part:
    """Return a part in which a vector that all samples share, such as a threshold, has a row for each.

    That is an array of the size of its input, or a number for an input of one, while the arrays of all other inputs,
    which take one sample at a time, have a row per sample.
    """
    arrays = {entry.name: part.arrays[entry.name] for entry in signature}
    shared = [entry for entry in signature if _is_setting(arrays[entry.name].shape, entry)]
    others = [entry for entry in signature if entry not in shared]
    single = all(_fits(arrays[e.name].shape, e, (1,)) and e.shape is not None and e.shape[0] == 1 for e in others)
    counts = {arrays[entry.name].shape[0] for entry in others} if single else set()
    if not any(entry.shape for entry in shared) or len(counts) != 1 or counts == {1}:
        return part
    (count,) = counts
    rows: dict[str, Array] = {}
    for entry in shared:
        vector = np.asarray(arrays[entry.name])
        vector = np.atleast_1d(vector) if entry.shape else vector
        rows[entry.name] = np.broadcast_to(vector, (count, *vector.shape))
    note = f"{part.source}: {', '.join(map(repr, rows))} shared by all {count:,} samples"
    return replace(part, arrays={**part.arrays, **rows}, notes=(*part.notes, note))


def _is_setting(shape: Sequence[int], entry: Input) -> bool:
    """Return True if an array is what an input of a fixed size takes, or a number for an input of one."""
    return tuple(shape) in (entry.shape, ()) and entry.shape in ((), (1,), tuple(shape))


def _fits(shape: Sequence[int], entry: Input, first: tuple[int, ...]) -> bool:
    """Return True if an array fits an input once its first axis is replaced by other sizes."""
    return bool(shape) and entry.shape is not None and agrees((*first, *shape[1:]), entry.shape)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Take:
    """A function that makes one feed: the given rows of the concatenated parts, or a whole part."""

    parts: tuple[Part, ...]
    signature: Signature
    rows: Ints | None = None

    @property
    def chosen(self) -> Ints:
        """Return the rows; empty for a whole part."""
        return np.arange(0) if self.rows is None else self.rows

    @property
    def samples(self) -> int:
        """Return the number of samples in the feed."""
        return samples_in(self.parts[0], self.signature) if self.rows is None else len(self.rows)

    def __call__(self) -> Feed:
        """Return the feed."""
        feed = {}
        for part in self.parts:
            part.check()
        for entry in self.signature:
            array = self.parts[0].arrays[entry.name] if self.rows is None else gathered(self.parts, entry, self.rows)
            feed[entry.name] = convert(np.asarray(array), entry)
        for part in self.parts:
            part.check()
        return feed

    def labels(self) -> Labels | None:
        """Return the true classes of these samples; None unless all parts have labels."""
        given = [part.labels for part in self.parts if part.labels is not None]
        if len(given) < len(self.parts):
            return None
        if self.rows is None:
            return given[0]
        if any(len(one.values) != rows_in(part, self.signature) for one, part in zip(given, self.parts, strict=True)):
            return None
        if len({one.values.shape[1:] for one in given}) > 1:
            return None
        whole = given[0].values if len(given) == 1 else np.concatenate([one.values for one in given])
        return Labels(values=np.asarray(whole[self.rows]), classes=given[0].classes)
