"""Valid graphs of which nobody thinks: sequences as outputs, sizes of zero, outputs that are inputs or weights.

Or standard operators by the name `ai.onnx`, which stands for the empty one.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

import onnxgrail
from onnxgrail.calibration.runtime.session import open_session
from tests.tiny import tiny

BODY = """
    a = MatMul(x, w0)
    b = Relu(a)
    c = MatMul(b, w1)
    d = Relu(c)
    y = MatMul(d, w2)
"""
WEIGHTS = {"w0": (6, 16), "w1": (16, 16), "w2": (16, 4)}
CHOICES = {
    "default": {},
    "fold": {"reducer": "fold"},
    "norms": {"norms": "all"},
    "int8": {"quantize": "int8"},
    "fp16": {"quantize": "fp16"},
}


def plain(**weights):
    return ir.to_proto(tiny("float[N,6] x => float[N,4] y", BODY, {**WEIGHTS, **weights}))


def with_sequence(*, alone):
    model = plain()
    model.graph.node.append(helper.make_node("SplitToSequence", ["y"], ["pieces"], axis=-1))
    port = helper.make_tensor_sequence_value_info("pieces", 1, None)
    if alone:
        del model.graph.output[:]
    model.graph.output.append(port)
    return model


def with_outputs(*names):
    model = plain()
    known = {value.name: value for value in (*model.graph.input, *model.graph.output)}
    known["w0"] = helper.make_tensor_value_info("w0", 1, [6, 16])
    model.graph.output.extend(known[name] for name in names)
    return model


def with_long_name():
    """A model with an operator of a later version, which has to be found."""
    model = plain()
    for place in (1, 3):
        node = model.graph.node[place]
        node.CopyFrom(helper.make_node("MeanVarianceNormalization", node.input, node.output, axes=[0]))
    model.opset_import[0].domain = "ai.onnx"
    return model


MODELS = {
    "a sequence beside a tensor": with_sequence(alone=False),
    "a sequence alone": with_sequence(alone=True),
    "an input as output": with_outputs("x"),
    "a weight as output": with_outputs("w0"),
    "an output twice": with_outputs("y"),
    "nothing in the middle": plain(w1=(16, 0), w2=(0, 4)),
    "nothing at the end": plain(w2=(16, 0)),
    "standard operators by their long name": with_long_name(),
}
PAIRS = [
    *((name, choice) for name in list(MODELS)[:2] for choice in ("default", "int8", "fp16")),
    *((name, choice) for name in list(MODELS)[2:5] for choice in ("default", "fp16")),
    *((name, choice) for name in list(MODELS)[5:] for choice in ("default", "fold", "norms")),
]


@pytest.mark.parametrize(("name", "choice"), PAIRS)
def test_they_are_narrowed_and_run(name, choice, tmp_path):
    target = tmp_path / "o.onnx"
    words = {"unit_ratio": 0.5, "round_to": 1, "samples": 16, "check": choice == "default"}
    result = onnxgrail.compress(MODELS[name], target, **words, **CHOICES[choice])
    assert result.report.data["model"]["params_after"] < result.report.data["model"]["params_before"]
    with open_session(target) as session:
        found = session.run({"x": np.ones((3, 6), np.float32)})
    assert list(found) == list(dict.fromkeys(value.name for value in MODELS[name].graph.output))
