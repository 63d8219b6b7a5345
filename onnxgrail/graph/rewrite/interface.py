"""Narrowed inputs and outputs of a model: kept positions, cutting of arrays, and the provenance note in the file."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Bools, Floats
from onnxgrail.graph.trace.survey import Survey

NOTE = "onnxgrail.interface"
LARGEST = 2**31  # more than the size of any axis
HALF, CLOSE = 0.5, 1e-4  # of a number in a matrix that picks positions, and of rounding
NUMBERS = np.dtype("<f4")  # of a basis in the note


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Basis:
    """The basis of the channels of heads in a cache.

    Attributes:
        axis: with the heads.
        matrices: (heads, before, after); the vectors of a head are multiplied by its matrix.
    """

    axis: int
    matrices: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """A narrowed axis of an input or output.

    Attributes:
        name: of the input or output; axis: the axis.
        before, after: its size.
        kept: the positions that are kept; with a basis, those in the basis.
        basis: of the channels on this axis; None if they are positions of the original.
    """

    name: str
    axis: int
    before: int
    after: int
    kept: tuple[int, ...]
    basis: Basis | None = None

    def entry(self) -> dict[str, Any]:
        """Return the port for a report, without the numbers of its basis."""
        return {**self._told(), "own_basis": self.basis is not None}

    def noted(self) -> dict[str, Any]:
        """Return the port for the note in a file."""
        if self.basis is None:
            return self._told()
        numbers = base64.b64encode(self.basis.matrices.astype(NUMBERS).tobytes()).decode()
        return {**self._told(), "heads": [self.basis.axis, len(self.basis.matrices)], "basis": numbers}

    def _told(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "axis", "before", "after", "kept")}


def changed(model: ir.Model, survey: Survey, dead: Bools) -> tuple[Port, ...]:
    """Return the axes of a model's inputs and outputs that lose positions.

    Args:
        model: the traced model.
        survey: its trace.
        dead: (ids,) mask of removed units.
    """
    found = []
    for value in (*model.graph.inputs, *model.graph.outputs):
        for mark in survey.marks.get(value.name or "", ()):
            stays = ~dead[mark.labels]
            if not stays.all():
                kept = tuple(np.flatnonzero(stays).tolist())
                port = Port(name=value.name or "", axis=mark.axes[0], before=len(stays), after=len(kept), kept=kept)
                found.append(port)
    return tuple(found)


def fit(arrays: Mapping[str, Array], ports: Iterable[Port]) -> dict[str, Array]:
    """Cut arrays of the wide interface to the narrow one; arrays without a port are unchanged."""
    found = dict(arrays)
    for port in sorted(ports, key=lambda port: port.basis is not None):  # bases are those of the heads that are left
        shape = np.shape(found.get(port.name, ()))
        if port.basis is not None:
            found |= _turned(found, port, port.basis)
        elif port.axis < len(shape) and all(k < shape[port.axis] for k in port.kept):
            found[port.name] = np.ascontiguousarray(np.take(found[port.name], port.kept, axis=port.axis))
    return found


def _turned(arrays: Mapping[str, Array], port: Port, basis: Basis) -> dict[str, Array]:
    """Return the array of a port in its basis; nothing if it has other sizes."""
    array = arrays.get(port.name)
    shape, sizes = np.shape(() if array is None else array), basis.matrices.shape
    axes = basis.axis, port.axis
    if array is None or max(axes) >= len(shape) or [shape[axis] for axis in axes] != [*sizes[:2]]:
        return {}
    wide = np.result_type(array, np.float32)
    front = np.moveaxis(array.astype(wide), axes, (0, -1))
    rows = front.reshape(len(front), -1, sizes[1]) @ basis.matrices.astype(wide)
    turned = np.moveaxis(rows.reshape(*front.shape[:-1], sizes[2]), (0, -1), axes)
    return {port.name: np.ascontiguousarray(turned.astype(array.dtype))}


def note(model: ir.Model, ports: Sequence[Port]) -> None:
    """Write a note into a model: which positions of the original interface it still has."""
    if not ports:
        return
    known = {(p.name, p.axis): p for p in noted(model)}
    for port in ports:
        old = known.get((port.name, port.axis))
        known[port.name, port.axis] = port if old is None else _after(old, port)
        known |= {place: _without(other, port) for place, other in known.items() if place != (port.name, port.axis)}
    entries = [port.noted() for port in known.values()]
    first: dict[str, int] = {}
    for place, entry in enumerate(entries):
        if "basis" in entry and first.setdefault(entry["basis"], place) != place:
            entry["basis"] = first[entry["basis"]]  # past and present of a cache have one basis: it is stored once
    model.metadata_props[NOTE] = json.dumps(entries)


def _after(first: Port, second: Port) -> Port:
    """Combine two cuts into one, with positions of the first original."""
    if first.basis is None and second.basis is None:
        kept = tuple(first.kept[k] for k in second.kept)
        return replace(second, before=first.before, kept=kept)
    basis = second.basis or first.basis
    assert basis is not None
    product = _matrices(first, len(basis.matrices)) @ _matrices(second, len(basis.matrices))
    return replace(second, before=first.before, basis=replace(basis, matrices=product))


def _without(port: Port, cut: Port) -> Port:
    """Return a port without the bases of heads that a cut of another axis removes."""
    if port.basis is None or cut.basis is not None or (port.name, port.basis.axis) != (cut.name, cut.axis):
        return port
    return replace(port, basis=replace(port.basis, matrices=port.basis.matrices[list(cut.kept)]))


def _matrices(port: Port, heads: int) -> Floats:
    """Return the (heads, before, after) matrices by which the vectors of heads are multiplied."""
    if port.basis is not None:
        return port.basis.matrices
    return np.tile(np.eye(port.before)[:, list(port.kept)], (heads, 1, 1))


def noted(model: ir.Model) -> tuple[Port, ...]:
    """Return the ports in a model's note; empty if it has no note written by onnxgrail."""
    try:
        entries = json.loads(model.metadata_props.get(NOTE, "[]"))
        for entry in (entry for entry in entries if isinstance(entry.get("basis"), int)):
            entry["basis"] = entries[entry["basis"]]["basis"]
        ports = tuple(map(_port, entries))
        return ports if all(_is_sound(port) for port in ports) else ()
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return ()


def _port(entry: Mapping[str, Any]) -> Port:
    plain = {name: value for name, value in entry.items() if name not in ("heads", "basis")}
    port = Port(**{**plain, "kept": tuple(entry["kept"])})
    if "basis" not in entry:
        return port
    axis, count = entry["heads"]
    numbers = np.frombuffer(base64.b64decode(entry["basis"], validate=True), NUMBERS).astype(np.float64)
    return replace(port, basis=Basis(axis=axis, matrices=numbers.reshape(count, port.before, port.after)))


def _is_sound(port: Port) -> bool:
    """Return True if the kept positions exist and are strictly ascending, and the basis is finite."""
    axes = () if port.basis is None else (port.basis.axis,)
    numbers = (port.axis, port.before, *port.kept, *axes)
    if not isinstance(port.name, str) or not all(type(number) is int and 0 <= number < LARGEST for number in numbers):
        return False
    ordered = all(a < b for a, b in itertools.pairwise((*port.kept, port.before)))
    basis = port.basis
    apart = basis is None or (basis.axis != port.axis and len(basis.matrices) > 0)
    finite = basis is None or bool(np.isfinite(basis.matrices).all())
    return ordered and apart and finite and len(port.kept) == port.after > 0


def between(wide: ir.Model, narrow: ir.Model) -> tuple[Port, ...]:
    """Return how arrays of one model's interface are cut to another's, from the notes in both."""
    first, second = ({(p.name, p.axis): p for p in noted(model)} for model in (wide, narrow))
    found = []
    for place, port in second.items():
        heads = (port.name, -1 if port.basis is None else port.basis.axis)
        left = [some[heads].kept if heads in some else None for some in (first, second)]
        found.append(_relative(port, first.get(place), *left))
    return tuple(p for p in found if p.after < p.before or p.basis is not None)


def _relative(
    port: Port, there: Port | None, heads: Sequence[int] | None = None, left: Sequence[int] | None = None
) -> Port:
    """Return a port of a narrow model for arrays of a wide one, in which it is already another one or None.

    Args:
        port: of the narrow model.
        there: of the wide one.
        heads: those that the wide model has, if it lost some.
        left: those that the narrow model has, if it lost some.
    """
    if there is None:
        return port
    if port.basis is None and there.basis is None:
        kept = tuple(there.kept.index(k) for k in port.kept if k in there.kept)
        return replace(port, before=len(there.kept), after=len(kept), kept=kept)
    basis = port.basis or there.basis
    assert basis is not None
    before = _matrices(there, len(basis.matrices))
    if left is not None and there.basis is not None:
        before = before[[k if heads is None else heads.index(k) for k in left]]
    return positional(replace(port, before=there.after), np.linalg.pinv(before) @ _matrices(port, len(before)))


def positional(port: Port, matrices: Floats) -> Port:
    """Return a port with a basis, or with positions if the (heads, before, after) matrices pick the same of all heads.

    Args:
        port: whose basis has the axis of the heads.
        matrices: by which the vectors of heads are multiplied.
    """
    picks = np.abs(matrices[0]) > HALF
    if np.allclose(matrices, picks, atol=CLOSE) and (picks.sum(axis=0) == 1).all():
        return replace(port, kept=tuple(picks.argmax(axis=0).tolist()), basis=None)
    axis = 0 if port.basis is None else port.basis.axis
    return replace(port, kept=tuple(range(port.after)), basis=Basis(axis=axis, matrices=matrices))
