"""Statements of a file beside its nodes and weights, for models that a tool has rewritten."""

from __future__ import annotations

import onnx_ir as ir


def like(made: ir.Model, model: ir.Model) -> ir.Model:
    """Let a rewritten model state what the one that it was made from states, in place, and return it.

    These are the sizes and notes of inputs and outputs, the producer, versions and notes of the model. Domains that
    only the tool had added, and no node is of, are removed.

    Args:
        made: has inputs and outputs of the same names and types.
        model: is not changed.
    """
    known = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    for value in (*made.graph.inputs, *made.graph.outputs):
        if (old := known.get(value.name)) is not None:
            value.shape = None if old.shape is None else old.shape.copy()
            value.doc_string = old.doc_string
    made.graph.doc_string = model.graph.doc_string
    for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        setattr(made, name, getattr(model, name))
    used = {node.domain for node in made.graph.all_nodes()} | model.opset_imports.keys()
    for domain in made.opset_imports.keys() - used:
        del made.opset_imports[domain]
    return made
