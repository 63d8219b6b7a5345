"""Write a model in the form that ONNX Runtime's tool for static quantization needs."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from onnxgrail.calibration.runtime.session import Setup, open_session, write_optimised
from onnxgrail.errors import NothingToCompressError
from onnxgrail.graph.attributes import BIAS, BIASED
from onnxgrail.graph.rewrite.unique import free_name, names_kept

LARGER = 1.05  # size of the optimized file, as a share of its source, from which constants are not folded
FOLDING = "ConstantFolding"


def prepare(source: Path, target: Path) -> None:
    """Write the model with normalizations folded into convolutions, shapes, and a name for every node.

    Without the folding, tensors between a convolution and its normalization would be rounded, too.

    Raises:
        NothingToCompressError: folding leaves constants only.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process

    folded = target.with_name("folded.onnx")
    _optimise(source, folded)
    quant_pre_process(folded, target, skip_optimization=True, skip_symbolic_shape=True)
    proto: onnx.ModelProto = onnx.load(target)
    if not proto.graph.node:
        text = "--quantize int8: the outputs do not depend on the inputs, and ONNX Runtime replaces them by constants"
        raise NothingToCompressError(text, hint="Check the exported model")
    proto = _own_names(proto, onnx.load(source, load_external_data=False))
    name_nodes(proto.graph)
    _own_biases(proto.graph)
    if _flatten_biases(proto.graph):
        del proto.graph.value_info[:]
    declare_types(proto)
    onnx.save(proto, target)


def _own_names(proto: onnx.ModelProto, source: onnx.ModelProto) -> onnx.ModelProto:
    """Rename the tensors that ONNX Runtime added to the source.

    It gives the same names again when it optimizes the result, and then rejects the model because they exist.
    """
    known = {value.name for value in _made(ir.from_proto(source).graph)}
    model = ir.from_proto(proto)
    with names_kept(model.graph):
        for value in _made(model.graph):
            if value.name and value.name not in known:
                value.name = free_name(model.graph, f"folded/{value.name}")
    return ir.to_proto(model)


def _made(graph: ir.Graph) -> list[ir.Value]:
    """Return the weights and all computed values of a graph."""
    return [*graph.initializers.values(), *(value for node in graph.all_nodes() for value in node.outputs)]


def declare_types(proto: onnx.ModelProto) -> None:
    """Declare which computed tensors are float where shape inference does not know: after operators of ONNX Runtime.

    The tools leave tensors of an unknown type in float, or fail.
    """
    inferred = onnx.shape_inference.infer_shapes(proto).graph
    known = {value.name for value in (*inferred.value_info, *inferred.input, *inferred.output)}
    missing = [name for node in proto.graph.node for name in node.output if name and name not in known]
    if not missing:
        return
    probe = onnx.ModelProto()
    probe.CopyFrom(proto)
    for name in missing:
        probe.graph.output.add().name = name
    with open_session(probe.SerializeToString(), Setup.as_is()) as session:
        floats = [name for name in missing if session.types[name] == "tensor(float)"]
    proto.graph.value_info.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in floats)


def _optimise(source: Path, target: Path) -> None:
    """Write the model as ONNX Runtime folds it; constants stay as they are if folding stores repetitions of them."""
    for skipped in ((), (FOLDING,)):
        write_optimised(source, target, Setup(extended=False), without=skipped)
        if target.stat().st_size <= LARGER * source.stat().st_size:
            return


def name_nodes(graph: onnx.GraphProto) -> None:
    """Give every node a name: the tools leave out nodes by name, and one without would leave out all such nodes."""
    taken = {node.name for node in graph.node}
    for index, node in enumerate(graph.node):
        if not node.name:
            wanted = next(filter(None, node.output), node.op_type)
            node.name = wanted if wanted not in taken else f"{wanted}/{node.op_type}_{index}"
            taken.add(node.name)


def _own_biases(graph: onnx.GraphProto) -> None:
    """Give every layer a bias of its own: the tool names copies of a shared one like tensors that may exist."""
    layers = [node for node in graph.node if node.op_type in BIASED and len(node.input) > BIAS and node.input[BIAS]]
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    seen: set[str] = set()
    for node in layers:
        name = node.input[BIAS]
        if name in seen and name in tensors:
            copy = graph.initializer.add()
            copy.CopyFrom(tensors[name])
            copy.name = node.input[BIAS] = f"{name}/{node.name}"
        seen.add(name)


def _flatten_biases(graph: onnx.GraphProto) -> bool:
    """Reshape Gemm biases (1, n) to (n,): skl2onnx writes two axes, and the tool takes the first as channels."""
    biases = {node.input[BIAS] for node in graph.node if node.op_type == "Gemm" and len(node.input) > BIAS}
    biases -= {name for n in graph.node for name in (n.input[:BIAS] if n.op_type == "Gemm" else n.input)}
    rows = [t for t in graph.initializer if t.name in biases and len(t.dims) == 2 and t.dims[0] == 1]
    for tensor in rows:
        del tensor.dims[0]
    return bool(rows)
