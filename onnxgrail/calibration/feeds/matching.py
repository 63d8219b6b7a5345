"""Assignment of arrays to model inputs: by name, by unique fit, or filled in where that is safe."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from onnxgrail.calibration.feeds.parts import Column, Part, Rows
from onnxgrail.calibration.feeds.signature import Input, Signature, agrees, check_names, converts
from onnxgrail.calibration.shapes.dims import is_past
from onnxgrail.core import Array, Ints, Labels
from onnxgrail.fidelity.goals import UNKNOWN
from onnxgrail.graph.slots import is_float

LABELS = "labels"  # data sets contain them besides the inputs; no statistic reads them
Role = Literal["mask", "types", "positions"]
# Names of inputs that can be computed from the tokens; a prefix such as `decoder_` is allowed.
ROLES: Mapping[str, Role] = {
    "attention_mask": "mask",
    "input_mask": "mask",
    "token_type_ids": "types",
    "segment_ids": "types",
    "position_ids": "positions",
}
OF_ENCODER = ".encoder."  # part of the names of caches that hold what an encoder makes
FILLED: Mapping[Role, str] = {"mask": "ones", "types": "zeros", "positions": "running positions"}


def role_of(entry: Input) -> Role | None:
    """Return the role of a 2-D integer or boolean input whose known name relates it to the tokens; None otherwise."""
    table = entry.shape is not None and len(entry.shape) == 2 and entry.dtype.kind in "biu"
    found = next((role for name, role in ROLES.items() if entry.name.lower().endswith(name)), None)
    return found if table and (found == "mask" or entry.dtype.kind != "b") else None


def from_mapping(
    arrays: Mapping[str, Any], signature: Signature, source: str, *, ready: bool = False, spare: bool = False
) -> Part:
    """Make a part from arrays by input name.

    An array named `labels` is no input; integer labels are taken as the true classes.  An array of another name is
    taken if it fits exactly one input and no other array does.  Missing masks, token types, positions and key-value
    caches are filled in.  Each of these steps adds a note.

    Args:
        arrays: by name; a value is read only if its name matches or an input is missing.
        signature: the model's inputs.
        source: name of the data in messages.
        ready: True if the arrays are one feed already.
        spare: leave out arrays that match no input, such as columns of a data set, with a note.

    Raises:
        DataError: an input is missing or a name is unknown.
    """
    known = {entry.name for entry in signature}
    names = [str(name) for name in arrays]
    notes = []
    labeled = LABELS in names and LABELS not in known
    if labeled:
        names.remove(LABELS)
    found: dict[str, Rows] = {name: _rows(arrays[name]) for name in names if name in known}
    over = [name for name in names if name not in known]
    lacking = [entry for entry in signature if entry.name not in found]
    extra = {name: _rows(arrays[name]) for name in over} if lacking else {}
    for roles in (False, True):  # inputs that cannot be filled in come first
        if roles and spare:
            continue  # columns of a data set mean anything, and these inputs can be filled in
        for name, other in _only([e for e in lacking if roles or role_of(e) is None], extra):
            found[name] = extra.pop(other)
            over.remove(other)
            notes.append(f"{source}: array {other!r} feeds input {name!r}, the only one it fits")
        lacking = [entry for entry in signature if entry.name not in found]
    notes += _fill(found, lacking, signature, source)
    if spare and over:
        notes.append(f"{source}: {', '.join(map(repr, sorted(over)))} not used, the model has no such input")
        over = [] if set(found) == known else over
    check_names(set(found) | set(over), signature, source, extra)
    labels, use = _labels(arrays, found, signature) if labeled else (None, "")
    if labeled:
        notes.insert(0, f"{source}: array {LABELS!r} is not an input of the model and {use}")
    return Part(source=source, arrays=found, ready=ready, notes=tuple(notes), labels=labels)


def _labels(arrays: Mapping[str, Any], found: Mapping[str, Rows], signature: Signature) -> tuple[Labels | None, str]:
    """Return the labels if they are integers, one row per sample, and their use in words.

    Labels that are the tokens themselves, as training scripts give them, are the answers one position earlier.
    """
    values = np.zeros(())
    with contextlib.suppress(Exception):  # a damaged file or pickled objects
        values = np.asarray(arrays[LABELS])
    if values.dtype.kind not in "iu" or not values.ndim:
        return None, "was ignored"
    counts = {array.shape[0] for array in found.values() if array.ndim}
    if len(counts) == 1 and len(values) not in counts:
        return None, f"was ignored: it has {len(values)} rows, the inputs have {counts.pop()}"
    if not _hold(values, _tokens("", found, signature)):
        return Labels(values=values), "is taken for the right answers"
    shifted = np.full(values.shape, UNKNOWN, np.int64)
    shifted[:, :-1] = values[:, 1:]
    return Labels(values=shifted), "holds the tokens: each is taken for the right answer one position earlier"


def _hold(labels: Array, tokens: Rows | None) -> bool:
    """Return True if labels are the tokens, but for those that are left out."""
    if tokens is None or labels.ndim != 2 or tokens.shape != labels.shape:
        return False
    given = labels >= 0
    return bool(given.any()) and np.array_equal(labels[given], tokens[np.arange(len(labels))][given])


def _rows(value: Any) -> Rows:
    return value if isinstance(value, Column) else np.asarray(value)


def _only(wanted: Iterable[Input], extra: Mapping[str, Rows]) -> list[tuple[str, str]]:
    """Return pairs of an input and an array that fit each other and nothing else."""
    fitting = {entry.name: [name for name, array in extra.items() if _fits(array, entry)] for entry in wanted}
    several = [name for names in fitting.values() for name in names]
    return [(name, fit[0]) for name, fit in fitting.items() if len(fit) == 1 and several.count(fit[0]) == 1]


def _fits(array: Rows, entry: Input) -> bool:
    """Return True if dtype, rank and fixed sizes after the first axis agree."""
    if not converts(array.dtype, entry.dtype):
        return False
    if entry.shape is None:
        return True
    return array.ndim == len(entry.shape) and agrees(array.shape[1:], entry.shape[1:])


def _fill(found: dict[str, Rows], lacking: Iterable[Input], signature: Signature, source: str) -> list[str]:
    """Add the inputs that can be computed from the tokens; return notes."""
    caches = [found[e.name].shape for e in signature if is_past(e) and e.name in found]
    past = int(caches[0][-2]) if caches else 0
    notes = [] if caches else _no_past(found, lacking, signature, source)
    for entry in lacking:
        role = role_of(entry)
        prefix = next((entry.name[: -len(name)] for name in ROLES if entry.name.lower().endswith(name)), "")
        tokens = None if role is None else _tokens(prefix, found, signature)
        if role is None or tokens is None:
            continue
        mask = next((found[e.name] for e in signature if role_of(e) == "mask" and e.name in found), None)
        found[entry.name] = Filled(entry, role, tokens, mask=mask if role == "positions" else None, past=past)
        notes.append(f"{source}: no array for input {entry.name!r}, filled with {FILLED[role]}")
    return notes


def _no_past(found: dict[str, Rows], lacking: Iterable[Input], signature: Signature, source: str) -> list[str]:
    """Add empty key-value caches if the model leaves their length open; return notes."""
    missing = [entry for entry in lacking if is_past(entry) and is_float(entry.dtype)]
    if any(OF_ENCODER in entry.name for entry in missing):  # never empty: the decoder would see nothing of the encoder
        return []
    tokens = _tokens("", found, signature)
    shapes = [entry.shape[1:] for entry in missing if entry.shape is not None]
    if not missing or tokens is None or any(sum(not isinstance(d, int) for d in shape) != 1 for shape in shapes):
        return []
    for entry, shape in zip(missing, shapes, strict=True):
        sizes = (size if isinstance(size, int) else 0 for size in shape)
        found[entry.name] = np.zeros((tokens.shape[0], *sizes), entry.dtype)
    return [f"{source}: no arrays for {len(missing)} key-value caches, filled with caches of length 0"]


def _tokens(prefix: str, found: Mapping[str, Rows], signature: Signature) -> Rows | None:
    """Return the array with one entry per token; None if it is not clear which. Its name may begin with `prefix`."""
    for name in ("input_ids", "inputs_embeds"):
        if prefix + name in found:
            return found[prefix + name]
    tables = [e.name for e in signature if e.name in found and found[e.name].ndim == 2 and e.dtype.kind in "iu"]
    plain = [name for name in tables if not any(name.lower().endswith(role) for role in ROLES)]
    return found[plain[0]] if len(plain) == 1 else None


class Filled(Column):
    """A mask of ones, token types of zero or running positions, as long as the tokens of the same sample."""

    def __init__(self, entry: Input, role: Role, tokens: Rows, *, mask: Rows | None = None, past: int = 0) -> None:
        self.role, self.tokens, self.mask, self.past = role, tokens, mask, past
        count, length = int(tokens.shape[0]), int(tokens.shape[1])
        super().__init__((count, length + (past if role == "mask" else 0)), entry.dtype)

    def rows(self, numbers: Ints) -> Array:
        """Return the values for the tokens of these samples."""
        count, length = self.tokens[numbers].shape[:2]
        if self.role == "positions":
            return positions(length, count, self.dtype, self.past, None if self.mask is None else self.mask[numbers])
        if self.role == "types":
            return np.zeros((count, length), self.dtype)
        return np.ones((count, length + self.past), self.dtype)


def positions(length: int, count: int, dtype: np.dtype[Any], past: int = 0, mask: Array | None = None) -> Array:
    """Return positions (count, length) of tokens after `past` cached tokens.

    Args:
        length: tokens per sample.
        count: number of samples.
        dtype: dtype of the result.
        past: number of cached tokens.
        mask: (count, past + length) attention mask; left padding does not count, as exported models expect.
    """
    if mask is None:
        return np.broadcast_to(np.arange(past, past + length), (count, length)).astype(dtype)
    counted = np.maximum(np.cumsum(mask != 0, axis=1) - 1, 0)[:, -length:]
    return np.asarray(counted.astype(dtype))
