"""Module paths of nodes, from exporter metadata or node names."""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx_ir as ir

from onnxgrail.graph.notes import SCOPES
from onnxgrail.graph.trace.facts import key

QUOTED = re.compile(r"""'([^']*)'|"([^"]*)\"""")  # strings in a printed Python list, written by any tool


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
