"""Inputs and outputs of a model that lose positions: which stay, how arrays are cut alike, and a note in the file."""

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
LARGEST = 2**31  # more than any axis has


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """One axis of one input or output: its size before and after, and the positions that are kept."""

    name: str
    axis: int
    before: int
    after: int
    kept: tuple[int, ...]


def changed(model: ir.Model, survey: Survey, dead: Bools) -> tuple[Port, ...]:
    """What of a traced model's interface goes when units go."""
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
    """Arrays of the wide interface, cut to the narrow one; one that a port does not speak of stays as it is."""
    found = dict(arrays)
    for port in ports:
        shape = np.shape(found.get(port.name, ()))
        if port.axis < len(shape) and all(k < shape[port.axis] for k in port.kept):
            found[port.name] = np.ascontiguousarray(np.take(found[port.name], port.kept, axis=port.axis))
    return found


def note(model: ir.Model, ports: Sequence[Port]) -> None:
    """Write into a model which positions of the original interface it still has."""
    if not ports:
        return
    known = {(p.name, p.axis): p for p in noted(model)}
    for port in ports:
        old = known.get((port.name, port.axis))
        known[port.name, port.axis] = port if old is None else _after(old, port)
    model.metadata_props[NOTE] = json.dumps([asdict(p) for p in known.values()])


def _after(first: Port, second: Port) -> Port:
    """Two cuts as one: positions are counted in the first original."""
    kept = tuple(first.kept[k] for k in second.kept)
    return Port(name=second.name, axis=second.axis, before=first.before, after=second.after, kept=kept)


def noted(model: ir.Model) -> tuple[Port, ...]:
    """What a model's own note says; nothing where there is none, or where it is none of ours."""
    try:
        entries = json.loads(model.metadata_props.get(NOTE, "[]"))
        ports = tuple(Port(**{**entry, "kept": tuple(entry["kept"])}) for entry in entries)
        return ports if all(_is_sound(port) for port in ports) else ()
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()


def _is_sound(port: Port) -> bool:
    """Whether the positions that are kept are there, each once and in order."""
    numbers = (port.axis, port.before, *port.kept)
    if not isinstance(port.name, str) or not all(type(number) is int and 0 <= number < LARGEST for number in numbers):
        return False
    ordered = all(a < b for a, b in itertools.pairwise((*port.kept, port.before)))
    return ordered and len(port.kept) == port.after > 0


def between(wide: ir.Model, narrow: ir.Model) -> tuple[Port, ...]:
    """How arrays of one model's interface are cut to another's, from the notes in both."""
    known = {(p.name, p.axis): p.kept for p in noted(wide)}
    found = []
    for port in noted(narrow):
        there = known.get((port.name, port.axis), range(port.before))
        kept = tuple(there.index(k) for k in port.kept if k in there)
        found.append(Port(name=port.name, axis=port.axis, before=len(there), after=len(kept), kept=kept))
    return tuple(p for p in found if p.after < p.before)
