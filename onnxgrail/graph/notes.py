"""Notes that exporters leave at nodes, such as stack traces: no runtime reads them, and they take bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir

SCOPES = "pkg.torch.onnx.name_scopes"  # the module of a node, from which blocks get their names
PACKAGES, NAMESPACE = "pkg.", "namespace"  # keys of torch and onnxscript
FIELDS = 6  # bytes of the fields around a key and a text, at least


def without_notes(model: ir.Model) -> None:
    """Remove the notes of exporters from nodes, their outputs and graphs, in place; names of modules stay."""
    for held in _holders(model):
        for key in list(_notes(held.metadata_props)):
            del held.metadata_props[key]
        if isinstance(held, ir.Node):
            held.doc_string = None


def note_bytes(model: ir.Model) -> int:
    """Return about how many bytes `without_notes` saves in a file; not more."""
    total = 0
    for held in _holders(model):
        for key, text in _notes(held.metadata_props).items():
            total += FIELDS + len(key.encode()) + len(text.encode())
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
