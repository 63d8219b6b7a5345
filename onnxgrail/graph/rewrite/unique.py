"""Names for new values and nodes that are unique in the graph, also after an earlier narrowing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir

_NARROWED = "/narrowed"
_TAKEN = "onnxgrail.names"
_BEFORE = "onnxgrail.name_before"


def free_name(graph: ir.Graph, name: str) -> str:
    """Return the name, with the first free number appended if it is taken."""
    known = graph.meta.get(_TAKEN)
    taken = _taken(graph) if known is None else known
    found, count = name, 0
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    taken.add(found)
    return found


def renamed(name: str) -> str:
    """Return the name of the constant that takes the place of one of this name, which nodes still read or hold."""
    return f"{name}{_NARROWED}"


def origin(name: str) -> str:
    """Return the name of a weight before narrowing, or before another basis, see `renamed`."""
    return name.split(_NARROWED, maxsplit=1)[0]


def take_place(old: ir.Value, new: ir.Value) -> None:
    """Give a new value the name, type, shape and readers of the one whose place it takes."""
    new.type, new.shape = old.type, old.shape
    old.name, new.name = None, old.name or new.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def hand_over(graph: ir.Graph, value: ir.Value, fresh: ir.Value) -> None:
    """Give the name of an output to the value that takes its place, if it does not stand there already."""
    name = value.name or ""
    for position, made in enumerate(graph.outputs):
        if made is value:
            graph.outputs[position] = fresh
    fresh.name, value.name, value.meta[_BEFORE] = name, free_name(graph, f"{name}/inner"), name


def name_before(value: ir.Value) -> str:
    """Return the name of a value, or the one that it handed over."""
    return str(value.meta.get(_BEFORE, value.name))


@contextmanager
def names_kept(graph: ir.Graph) -> Iterator[None]:
    """Collect the names once for all calls of `free_name` inside the context; all new names must come from it."""
    graph.meta[_TAKEN] = _taken(graph)
    try:
        yield
    finally:
        del graph.meta[_TAKEN]


def _taken(graph: ir.Graph) -> set[str]:
    names = {v.name for v in graph.inputs} | {v.name for node in graph for v in node.outputs} | set(graph.initializers)
    return {name for name in names | {node.name for node in graph} if name}
