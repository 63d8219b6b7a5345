"""The number of channels per block in ONNX Runtime's convolutions on this machine."""

from __future__ import annotations

import functools

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxgrail.calibration.runtime.session import Setup, write_optimised
from onnxgrail.machine.files.temporary import scratch

OPSET, IR = 13, 8


@functools.cache
def channel_block() -> int:
    """Return the channels per block of a convolution on the CPU, 1 if they are not blocked.

    The runtime stores channels in blocks as wide as a vector register (MlasNchwcGetBlockSize: 16 with AVX-512, 8 with
    AVX) and pads incomplete blocks.  So a convolution to one channel is optimized, and the padded weight shows the
    size.
    """
    with scratch() as folder:
        path = folder / "optimised.onnx"
        write_optimised(_convolution().SerializeToString(), path, Setup(threads=1))
        graph = onnx.load(path).graph
    return max((int(weight.dims[0]) for weight in graph.initializer), default=1)


def _convolution() -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.ones((1, 3, 3, 3), np.float32), "w")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 6, 6])
    graph = helper.make_graph([helper.make_node("Conv", ["x", "w"], ["y"])], "convolution", [x], [y], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
