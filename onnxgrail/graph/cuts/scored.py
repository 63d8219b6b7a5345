"""Show the scores of a model that gives only the labels which it chose by them."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from onnxgrail.graph.attributes import LAYOUTS, given, moved_from
from onnxgrail.graph.io.model_file import copy

MOVES = LAYOUTS | {"Cast"}
NAMES = {"LabelEncoder": 0, "ArrayFeatureExtractor": 1, "Gather": 1}  # nodes that name a class, and their input with it


def scored(model: ir.Model) -> ir.Model | None:
    """Return a copy of a model that gives scores instead of labels; weights are shared.

    Labels are only counted, and few samples say little about a count. The scores change with every sample.

    Returns:
        None unless every output is a label that an `ArgMax` chose.
    """
    if not model.graph.outputs or any(_scores(value) is None for value in model.graph.outputs):
        return None
    made = copy(model)
    shown = []
    for label in made.graph.outputs:
        scores = _scores(label)
        assert scores is not None
        to = ir.AttrInt64("to", ir.DataType.FLOAT)  # an output needs a type, and that of the scores may be unknown
        node = ir.Node("", "Cast", [scores], [to])
        node.outputs[0].name, node.outputs[0].type = f"logits of {label.name}", ir.TensorType(ir.DataType.FLOAT)
        made.graph.append(node)
        shown.append(node.outputs[0])
    made.graph.outputs.clear()
    made.graph.outputs.extend(shown)
    return made


def chosen_by(shown: ir.Value) -> str:
    """Return the name of the tensor that an output of `scored` shows."""
    node = shown.producer()
    assert node is not None
    return given(node, 0).name or ""


def _scores(label: ir.Value) -> ir.Value | None:
    """Return the scores by which a label was chosen."""
    node = moved_from(label, MOVES).producer()
    while node is not None and (place := NAMES.get(node.op_type)) is not None:
        names, classes = node.inputs[0], node.inputs[place]
        if names is None or classes is None or (place and get_const_tensor(names) is None):
            return None
        node = moved_from(classes, MOVES).producer()
    if node is None or node.op_type != "ArgMax" or node.graph is not label.graph:
        return None
    scores = node.inputs[0]
    return scores if scores is not None and scores.producer() is not None else None
