"""Narrowed inputs and outputs of a model: kept positions, cutting of arrays, and the provenance note in the file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Bools
from onnxgrail.graph.trace.survey import Survey

NOTE = "onnxgrail.interface"
LARGEST = 2**31  # more than the size of any axis


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """A narrowed axis of an input or output.

    Attributes:
        name: of the input or output; axis: the axis.
        before, after: its size.
        kept: the positions that are kept.
    """

    name: str
    axis: int
    before: int
    after: int
    kept: tuple[int, ...]


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
    for port in ports:
        shape = np.shape(found.get(port.name, ()))
        if port.axis < len(shape) and all(k < shape[port.axis] for k in port.kept):
            found[port.name] = np.ascontiguousarray(np.take(found[port.name], port.kept, axis=port.axis))
    return found


def note(model: ir.Model, ports: Sequence[Port]) -> None:
    """Write a note into a model: which positions of the original interface it still has."""
    if not ports:
        return
    known = {(p.name, p.axis): p for p in noted(model)}
    for port in ports:
        old = known.get((port.name, port.axis))
        known[port.name, port.axis] = port if old is None else _after(old, port)
    model.metadata_props[NOTE] = json.dumps([asdict(p) for p in known.values()])


def _after(first: Port, second: Port) -> Port:
    """Combine two cuts into one, with positions of the first original."""
    kept = tuple(first.kept[k] for k in second.kept)
    return Port(name=second.name, axis=second.axis, before=first.before, after=second.after, kept=kept)


def noted(model: ir.Model) -> tuple[Port, ...]:
    """Return the ports in a model's note; empty if it has no note written by onnxgrail."""
    try:
        entries = json.loads(model.metadata_props.get(NOTE, "[]"))
        ports = tuple(Port(**{**entry, "kept": tuple(entry["kept"])}) for entry in entries)
        return ports if all(_is_sound(port) for port in ports) else ()
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()


def _is_sound(port: Port) -> bool:
    """Return True if the kept positions exist and are strictly ascending."""
    numbers = (port.axis, port.before, *port.kept)
    if not isinstance(port.name, str) or not all(type(number) is int and 0 <= number < LARGEST for number in numbers):
        return False
    ordered = all(a < b for a, b in itertools.pairwise((*port.kept, port.before)))
    return ordered and len(port.kept) == port.after > 0


def between(wide: ir.Model, narrow: ir.Model) -> tuple[Port, ...]:
    """Return how arrays of one model's interface are cut to another's, from the notes in both."""
    known = {(p.name, p.axis): p.kept for p in noted(wide)}
    found = []
    for port in noted(narrow):
        there = known.get((port.name, port.axis), range(port.before))
        kept = tuple(there.index(k) for k in port.kept if k in there)
        found.append(Port(name=port.name, axis=port.axis, before=len(there), after=len(kept), kept=kept))
    return tuple(p for p in found if p.after < p.before)
