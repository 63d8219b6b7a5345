"""Notes that exporters leave at nodes: module paths, which name blocks, and stack traces, which only take bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from onnxgrail.graph.trace.facts import key

QUOTED = re.compile(r"""'([^']*)'|"([^"]*)\"""")  # strings in a printed Python list, written by any tool


SCOPES = "pkg.torch.onnx.name_scopes"  # the module of a node, from which blocks get their names
PACKAGES, NAMESPACE = "pkg.", "namespace"  # keys of torch and onnxscript
FIELDS = 6  # bytes of the fields around a key and a text, at least


def without_notes(model: ir.Model) -> None:
    """Remove the notes of exporters from nodes, their outputs and graphs, in place; names of modules stay."""
    for held in _holders(model):
        for name in list(_notes(held.metadata_props)):
            del held.metadata_props[name]
        if isinstance(held, ir.Node):
            held.doc_string = None


def note_bytes(model: ir.Model) -> int:
    """Return about how many bytes `without_notes` saves in a file; not more."""
    total = 0
    for held in _holders(model):
        for name, text in _notes(held.metadata_props).items():
            total += FIELDS + len(name.encode()) + len(text.encode())
        total += len((held.doc_string or "").encode()) if isinstance(held, ir.Node) else 0
    return total


def _holders(model: ir.Model) -> Iterator[ir.Graph | ir.Node | ir.Value]:
    """Yield what has metadata: graphs, their nodes, and what these compute."""
    yield from model.graphs()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        yield node
        yield from node.outputs


def _notes(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the notes in metadata."""
    return {k: v for k, v in metadata.items() if k == NAMESPACE or (k.startswith(PACKAGES) and k != SCOPES)}


def scope(node: ir.Node) -> str:
    """Return the module path of a node (`encoder.layer.0.intermediate.dense`), or its own name."""
    scopes = node.metadata_props.get(SCOPES, "")
    path = [part for quoted in QUOTED.findall(scopes) for part in quoted if part]
    if len(path) > 1:
        return str(path[-2])
    name = node.name or key(node)
    parts = [p for p in name.split("/") if p]
    return ".".join(parts[:-1]) if len(parts) > 1 else name


def common_scope(nodes: Sequence[ir.Node]) -> str:
    """Return the deepest module path common to all nodes; the first node's path if they share none."""
    paths = [scope(n).split(".") for n in nodes]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) if shared else ".".join(paths[0])
