"""Calibration batches from `--data`, checked against the model's inputs before anything runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.held_out import chosen_of, positions, share_of, spare, spare_feeds
from onnxgrail.calibration.feeds.kinds import read_parts
from onnxgrail.calibration.feeds.kinds.feeds import from_feeds
from onnxgrail.calibration.feeds.matching import from_mapping
from onnxgrail.calibration.feeds.parts import Part, Rows
from onnxgrail.calibration.feeds.reading import ALL, Reading, Sampling
from onnxgrail.calibration.feeds.signature import (
    Signature,
    bad_values,
    check_array,
    check_integers,
    check_shown,
    count_bad,
    describe,
    is_whole,
    takes_vectors,
)
from onnxgrail.calibration.feeds.taking import Take, gathered, rows_in, samples_in, unstacked
from onnxgrail.core import Array, Feed, Ints
from onnxgrail.errors import DataError
from onnxgrail.machine.group.sums import SOLO, Group, shard_of

SHORTER = "If the texts are too long for the model, --sequence-length N cuts them shorter"
BLOCK = 64  # samples checked at a time: bounds memory for mapped files
Source = str | os.PathLike[str] | Mapping[str, Any] | Array | Iterable[Feed]


def read_apart(
    source: Source,
    signature: Signature,
    apart: int | None,
    sampling: Sampling = ALL,
    *,
    reading: Reading | None = None,
    group: Group = SOLO,
) -> tuple[Batches, Batches | None]:
    """Read batches from a path of any kind in `kinds.KINDS`, from arrays by name, or from ready feeds.

    The first axis counts samples.  A model with a fixed batch size gets batches of that size, and a last short batch is
    dropped with a note; otherwise the last batch may be shorter.  Numbers without axes are shared by all samples.
    Arrays with different first axes form one ready feed, which is passed as it is; so is every item of an iterable and
    every test_data_set, and every row of arrays that all have one axis more than their inputs.

    `apart` random samples, spread evenly over the data, are in batches of their own.  If a number of samples is asked
    for, those held back come in addition.  Ready feeds are held back whole.  With `apart` None, a fifth is held back,
    or nothing if there are too few samples (see `held_out.spare`).

    Args:
        source: the data.
        signature: the model's inputs.
        apart: number of samples to hold back.
        sampling: how many samples to take: one random sample from each of that many equal stretches of the data, which
            suits data sorted by class or cycling through classes.
        reading: settings for files that do not contain them.
        group: processes that share the work; each checks only the values of its own batches.

    Returns:
        The batches to fit to, and the batches held back, None if there are none.

    Raises:
        DataError: names, dtypes, ranks or fixed dimensions differ, values are NaN or infinite, there are no data, or
            none would be left.
    """
    reading = reading or Reading()
    fixed = fixed_batch(signature) or 1
    seed, samples = sampling.seed, None if sampling.samples is None else max(sampling.samples, fixed)
    limit = None if samples is None else samples + (share_of(samples, fixed) if apart is None else apart)
    label, given = _parts(source, signature, limit, reading)
    parts = tuple(feed for part in given for feed in unstacked(part, signature))
    notes = [note for part in parts for note in part.notes]
    for part in parts:
        for entry in signature:
            notes.extend(check_array(part.arrays[entry.name], entry, part.source, batch_axis=True))
    notes.extend(note for part in parts for note in _disagreement(part, signature))
    if any(_is_ready(part, signature) for part in parts):
        return _ready_apart(_ready(parts, signature, limit, label, notes), apart, samples, seed)
    total = sum(rows_in(part, signature) for part in parts)
    held = spare(total, samples, fixed) if apart is None else apart
    wanted = None if samples is None else samples + held
    if wanted is not None and samples is not None and (samples if apart is None else wanted) > total:
        also = f" and {apart} to hold out" if apart else ""
        notes.append(f"{label}: {samples} samples{also} asked for, {total} are there")
    chosen = chosen_of(total, wanted, seed)
    hint = "" if reading.tokenizer is None else SHORTER
    if group.size == 1:
        _scan(parts, signature, chosen)
    pile = _Pile(parts=parts, signature=signature, label=label, hint=hint, group=group)
    cut = partial(_cut, pile, sampling)
    if not held:
        return cut(chosen, notes=notes), None
    if apart is None and fixed > 1 and not _stackable(parts, signature):  # samples of several files may not fill it
        return _ready_apart(cut(chosen, notes=notes), None, samples, seed)
    refusal = f"{label}: {held} samples are to be held out and {len(chosen)} are there"
    others = positions(len(chosen), held, seed, refusal)
    return cut(np.delete(chosen, others), notes=notes), cut(chosen[others], notes=[])


def _ready_apart(batches: Batches, apart: int | None, asked: int | None, seed: int) -> tuple[Batches, Batches | None]:
    """Hold back whole feeds with about `apart` samples."""
    feeds = [feed for feed in batches.feeds if isinstance(feed, Take)]
    if apart is None:
        some = spare_feeds([feed.samples for feed in feeds], asked)
    else:
        some = -(-apart * len(feeds) // max(batches.samples, 1))
    if not some:
        return batches, None
    wrong = f"{batches.source}: {apart} samples are to be held out of {batches.samples} in {len(feeds)} feeds"
    held = set(positions(len(feeds), some, seed, wrong).tolist())
    sides = [[feed for n, feed in enumerate(feeds) if (n in held) is side] for side in (False, True)]
    rest, other = (replace(batches, feeds=tuple(side), samples=sum(f.samples for f in side)) for side in sides)
    return rest, replace(other, notes=())


def fixed_batch(signature: Signature) -> int | None:
    """Return the batch size that the model prescribes; None if it is open, there is none, or inputs disagree."""
    if takes_vectors(entry.shape for entry in signature):
        return None
    sizes = {entry.shape[0] for entry in signature if entry.shape}
    numbers = {size for size in sizes if isinstance(size, int)}
    return numbers.pop() if len(numbers) == 1 else None


def _parts(source: Source, signature: Signature, samples: int | None, reading: Reading) -> tuple[str, tuple[Part, ...]]:
    """Return what messages call the data, and their parts."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source), read_parts(os.fspath(source), signature, samples, reading)
    reading.unused(frozenset(), "arrays and feeds")
    if isinstance(source, np.ndarray):
        if len(signature) != 1:
            raise DataError(f"got one array, the model takes {len(signature)} inputs", hint=describe(signature))
        return "array", (Part(source="array", arrays={signature[0].name: source}),)
    if isinstance(source, Mapping):
        return "arrays", (from_mapping(source, signature, "arrays"),)
    if isinstance(source, Iterable):
        return "feeds", from_feeds(source, signature, "feeds", samples)
    raise DataError(
        f"calibration data of type {type(source).__name__} are not known",
        hint="Give a path, arrays by name, or feeds one by one, such as a list of the items of a data set",
    )


def _is_ready(part: Part, signature: Signature) -> bool:
    """Return True if a part must be passed as it is, because no axis counts samples in all its arrays.

    Numbers without axes are shared by all samples, but a number that counts the samples belongs to the whole.
    """
    arrays = [part.arrays[entry.name] for entry in signature]
    lengths = {array.shape[0] for array in arrays if array.ndim}
    if part.ready or len(lengths) != 1 or is_whole(part.arrays, signature):
        return True
    counted = any(np.asarray(array).item() in lengths for array in arrays if not array.ndim)
    prescribed = {entry.shape[0] for entry in signature if entry.shape and isinstance(entry.shape[0], int)}
    return counted or len(prescribed) > 1


def _disagreement(part: Part, signature: Signature) -> tuple[str, ...]:
    """Return a note if arrays of a file differ in length although the model gives their first axes the same name."""
    first = [(e.shape[0], part.arrays[e.name].shape[0], e.name) for e in signature if e.shape]
    counts = {(dim, count): name for dim, count, name in reversed(first) if isinstance(dim, str)}
    if part.ready or len(counts) == len({dim for dim, _ in counts}):
        return ()
    found = ", ".join(f"{name!r} {count}" for (_, count), name in reversed(counts.items()))
    return (f"{part.source}: arrays hold different numbers of samples ({found}), passed at once as they are",)


def _check_even(part: Part, signature: Signature) -> None:
    """Check that arrays are equally long if they hold more samples than the model takes at once."""
    counts = {entry.name: part.arrays[entry.name].shape[0] for entry in signature if entry.shape}
    fixed = fixed_batch(signature)
    if fixed is not None and fixed not in counts.values() and len(set(counts.values())) > 1:
        found = ", ".join(f"{name!r} {count}" for name, count in counts.items())
        raise DataError(
            f"{part.source}: arrays hold different numbers of samples ({found}); the model takes {fixed} at once",
            hint="Give every input as many",
        )


def _ready(parts: tuple[Part, ...], signature: Signature, samples: int | None, label: str, notes: list[str]) -> Batches:
    feeds: list[Callable[[], Feed]] = []
    total = 0
    for part in parts:
        if samples is not None and total >= samples:
            break
        _check_even(part, signature)
        for entry in signature:
            array = np.asarray(part.arrays[entry.name])
            check_array(array, entry, part.source, batch_axis=False)
            check_integers(array, entry, part.source)
            bad = count_bad(array, entry)
            if bad:
                raise bad_values(bad, array.size, entry, part.source)
        feeds.append(Take(parts=(part,), signature=signature))
        total += samples_in(part, signature)
    for entry in signature:
        check_shown(any(np.asarray(part.arrays[entry.name]).any() for part in parts), entry, label)
    if samples is not None and total > samples:
        notes.append(
            f"{label}: feeds are passed as they are, so {total} samples are used where {samples} were asked for"
        )
    hint = next(filter(None, (_one_feed(part, signature) for part in parts)), "")
    if hint and len(feeds) == 1 and _count_later(signature):
        notes.append(f"{label}: {hint}")
    return Batches(feeds=tuple(feeds), samples=total, source=label, notes=_unique(notes), hint=hint)


def _one_feed(part: Part, signature: Signature) -> str:
    """Return advice on arrays whose first axes differ: the model may not run on them, and they are one sample."""
    lengths = {name: array.shape[0] for name, array in part.arrays.items() if array.ndim}
    if part.ready or len(set(lengths.values())) < 2:
        return ""
    told = ", ".join(f"{entry.name!r} {lengths[entry.name]}" for entry in signature if entry.name in lengths)
    return (
        f"The first axes of the arrays differ ({told}), so they were passed as one feed. For several feeds, give every "
        "array one row per sample; for an input that has no axis of samples, stack arrays along a new one"
    )


def _count_later(signature: Signature) -> bool:
    """Return True if an input has its samples on a later axis, as the states of recurrent layers do."""
    first = {entry.shape[0] for entry in signature if entry.shape and isinstance(entry.shape[0], str)}
    return any(size in first for entry in signature for size in (entry.shape or ())[1:])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pile:
    """Data that are cut into batches; `hint` helps if the model rejects them, `group` shares their check."""

    parts: tuple[Part, ...]
    signature: Signature
    label: str
    hint: str
    group: Group


def _cut(pile: _Pile, sampling: Sampling, chosen: Ints, *, notes: list[str]) -> Batches:
    """Return the chosen samples in batches; notes are added to those given."""
    parts, signature, label, group = pile.parts, pile.signature, pile.label, pile.group
    fixed = fixed_batch(signature)
    size = fixed or min(sampling.batch_size, -(-len(chosen) // sampling.feeds))
    feeds: list[Take] = []
    dropped = 0
    for heap, rows in _heaps(parts, signature, chosen):
        for start in range(0, len(rows), size):
            piece = rows[start : start + size]
            if fixed and len(piece) < fixed:
                dropped += len(piece)
                continue
            feeds.append(Take(parts=heap, signature=signature, rows=piece))
    if not feeds:
        raise DataError(
            f"{label}: got {len(chosen)} samples, the model takes batches of exactly {fixed}",
            hint=f"Give at least {fixed}, or a model whose batch size is open",
        )
    if group.size > 1:
        for number in shard_of(group, len(feeds)).numbers:
            _scan(feeds[number].parts, signature, feeds[number].chosen)
    if dropped:
        notes.append(f"{label}: the last {dropped} samples do not fill a batch of {fixed} and were dropped")
    count = len(chosen) - dropped
    return Batches(feeds=tuple(feeds), samples=count, source=label, notes=_unique(notes), hint=pile.hint)


def _stackable(parts: tuple[Part, ...], signature: Signature) -> bool:
    """Return True if samples of different files fit in one batch.

    They have the same shapes after the first axis, the same dtypes, and the same numbers without axes.
    """
    return len({tuple(_kind(part.arrays[entry.name]) for entry in signature) for part in parts}) == 1


def _kind(array: Rows) -> tuple[object, ...]:
    return array.shape[1:], str(array.dtype), None if array.ndim else np.asarray(array).item()


def _heaps(parts: tuple[Part, ...], signature: Signature, chosen: Ints) -> Iterator[tuple[tuple[Part, ...], Ints]]:
    """Yield groups of parts whose samples fit in one batch, with the numbers of the chosen samples in each group."""
    offset = 0
    for heap in [parts] if _stackable(parts, signature) else [(part,) for part in parts]:
        length = sum(rows_in(part, signature) for part in heap)
        yield heap, chosen[(chosen >= offset) & (chosen < offset + length)] - offset
        offset += length


def _scan(parts: tuple[Part, ...], signature: Signature, chosen: Ints) -> None:
    """Check every value that will be used, once.

    Raises:
        DataError: values are NaN or infinite, counted over all samples, or ids are out of range.
    """
    for heap, rows in _heaps(parts, signature, chosen):
        names = heap[0].source if len(heap) == 1 else f"{heap[0].source} and {len(heap) - 1} more"
        for entry in signature:
            bad, size, shown = 0, 0, not len(rows)
            for start in range(0, len(rows), BLOCK):
                block = gathered(heap, entry, rows[start : start + BLOCK])
                check_integers(block, entry, names)
                bad, size, shown = bad + count_bad(block, entry), size + block.size, shown or bool(block.any())
            check_shown(shown, entry, names)
            if bad:
                raise bad_values(bad, size, entry, names)


def _unique(notes: list[str]) -> tuple[str, ...]:
    """Return one note for all sources of which the same is noted, such as the feeds of a generator."""
    alike: dict[str, list[str]] = {}
    for note in dict.fromkeys(notes):
        _, mark, said = note.partition(": ")
        alike.setdefault(said if mark else note, []).append(note)
    return tuple(
        some[0] if len(some) == 1 else some[0].replace(": ", f" and {len(some) - 1:,} more: ", 1)
        for some in alike.values()
    )
