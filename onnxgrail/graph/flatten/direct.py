"""Bring what layers read to one form: weights are initializers, no inputs, and nothing is read through a copy.

The legacy exporter of torch ties and deduplicates weights with Identity nodes, and others write one in place of each
dropout; exporters of PaddlePaddle write weights as Constant nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxgrail.graph.attributes import BIAS, BIASED, input_of, is_read, number, written
from onnxgrail.graph.flatten.known import NO_ARRAYS, LeftOut, compute_known

FREE = 4  # first IR version in which an initializer need not be an input
MANY = 0.01  # share of all parameters from which on those that nothing reads are worth a word
FEW = 8  # the most inputs with a default value that count as intended


def listed(model: ir.Model) -> tuple[ir.Value, ...]:
    """Return the initializers of a model that are also graph inputs."""
    return tuple(value for value in model.graph.inputs if value.name in model.graph.initializers)


def settings(model: ir.Model) -> tuple[ir.Value, ...]:
    """Return the listed initializers that are inputs on purpose: a few, in a model with more other constants.

    If a model lists many of its constants, or all biases of its layers (Brevitas: their weights are no floats), its
    exporter listed all that it could; before IR version 4 it had to.
    """
    found = listed(model)
    biases = {input_of(node, BIAS) for node in model.graph if node.op_type in BIASED} - {None}
    if len(biases) > 1 and biases <= set(found):
        return ()
    constants = len(model.graph.initializers) + sum(node.op_type == "Constant" for node in model.graph)
    few = len(found) <= FEW and 2 * len(found) < constants
    return found if few and model.ir_version >= FREE else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlisted:
    """The changes that `direct` made to the stored arrays of a model.

    Attributes:
        names: the weights that were inputs.
        ir_version: the previous IR version.
        left_out: arrays that are removed, because only their shape was read.
    """

    names: tuple[str, ...]
    ir_version: int
    left_out: LeftOut = NO_ARRAYS

    @property
    def overridable(self) -> bool:
        """Return True if ONNX Runtime had to expect other values for these weights."""
        return bool(self.names) and self.ir_version >= FREE


NOTHING = Unlisted(names=(), ir_version=FREE)


def unlist(model: ir.Model) -> Unlisted:
    """Remove the weights from the inputs of a model, in place; `settings` stay inputs."""
    done = Unlisted(names=tuple(value.name or "" for value in _wholesale(model)), ir_version=model.ir_version)
    for value in _wholesale(model):
        model.graph.inputs.remove(value)
    if done.names:
        model.ir_version = max(model.ir_version, FREE)
    return done


def relisted(model: ir.Model, done: Unlisted) -> ir.Model:
    """Return a copy of a model with the changes of `unlist` undone."""
    if not done.names:
        return model
    whole = model.clone()
    whole.meta.update(model.meta)
    held = whole.graph.initializers
    whole.graph.inputs.extend(held[name] for name in done.names if name in held)
    whole.ir_version = done.ir_version
    return whole


def _wholesale(model: ir.Model) -> list[ir.Value]:
    kept = settings(model)
    return [value for value in listed(model) if value not in kept]


def unlisted_text(done: Unlisted) -> str:
    """Return a note about weights that are removed from the inputs; empty if there are none."""
    if not done.names:
        return ""
    what = f"{_count(len(done.names))} also graph inputs"
    if done.overridable:
        what += ", which keeps ONNX Runtime from folding them and fusing the nodes that read them"
    return f"{what}; the result has them as constants (--keep-initializer-inputs leaves them inputs)"


def shapes_text(done: Unlisted) -> str:
    """Return a note about arrays that are left out; empty if there are none."""
    if not done.left_out.arrays:
        return ""
    what = f"{_count(done.left_out.arrays)} left out ({done.left_out.numbers:,} parameters)"
    return f"{what}: the graph computes with the shape alone, which is now a constant"


def listed_text(model: ir.Model) -> str:
    """Return a note about weights that stay inputs; empty if there are none or it costs nothing."""
    count = len(_wholesale(model))
    if not count or model.ir_version < FREE:
        return ""
    return f"{_count(count)} still graph inputs, which keeps ONNX Runtime from folding and fusing them"


def unread_text(model: ir.Model) -> str:
    """Return a note about weights that no node reads; empty if they are few. They stay: the user gave them."""
    sizes = {
        value: 0 if value.const_value is None else value.const_value.size for value in model.graph.initializers.values()
    }
    unread = [value for value in sizes if not is_read(value) and not value.is_graph_input()]
    count = sum(sizes[value] for value in unread)
    if count <= MANY * sum(sizes.values()):
        return ""
    return f"{_count(len(unread))} read by no node ({count:,} parameters): --simplify leaves them out"


def _count(number: int) -> str:
    return "1 weight is" if number == 1 else f"{number} weights are"


FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def direct(model: ir.Model, *, keep_inputs: bool = False) -> Unlisted:
    """Remove Identity nodes, make Constant nodes of several floats initializers, and compute known sizes, in place.

    A Gemm without a bias loses the factor of its bias (tf2onnx writes 0), so that it can get one. Outputs of the model
    stay what nodes compute.

    Args:
        model: changed in place.
        keep_inputs: weights that are also inputs stay inputs.

    Returns:
        The weights that are inputs no more, and those that are left out.
    """
    unlisted, graph = NOTHING if keep_inputs else unlist(model), model.graph
    for node in list(graph):
        if node.op_type == "Gemm" and not node.domain and input_of(node, 2) is None and number(node, "beta", 1.0) != 1:
            del node.attributes["beta"]
        if node.domain or len(node.outputs) != 1 or node.outputs[0].is_graph_output():
            continue
        out = node.outputs[0]
        tensor = written(node)
        if tensor is not None and tensor.dtype in FLOATS and tensor.size > 1:
            weight = ir.Value(
                name=out.name,
                shape=ir.Shape(tensor.shape.numpy()),
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
            out.replace_all_uses_with(weight)
            graph.remove(node, safe=True)
            graph.initializers[weight.name or ""] = weight
            model.ir_version = max(model.ir_version, FREE)
        elif node.op_type == "Identity" and node.inputs[0] is not None:
            out.replace_all_uses_with(node.inputs[0])
            graph.remove(node, safe=True)
    return replace(unlisted, left_out=compute_known(model))
