"""Every operator against the test suite that ships with ONNX."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

pytest.importorskip("torch")

from onnxgrail.torchgraph.call import as_array
from onnxgrail.torchgraph.ops import OPS
from onnxgrail.torchgraph.program import program_of, tensors

# Of the types that torch computes in: its unsigned integers of more than eight bits cannot be added, and floats of
# eight bits, integers of less and strings are never weights that gradients could reach.
TYPES = frozenset({"float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"})

EXCEPTIONS = {
    "test_training_dropout_default": "draws at random",
    "test_training_dropout_default_mask": "draws at random",
    "test_training_dropout": "draws at random",
    "test_training_dropout_mask": "draws at random",
    "test_maxpool_with_argmax_2d_precomputed_pads": "indices of maxima are not returned",
    "test_maxpool_with_argmax_2d_precomputed_strides": "indices of maxima are not returned",
    "test_batchnorm_epsilon_training_mode": "moves running statistics",
    "test_batchnorm_example_training_mode": "moves running statistics",
    "test_resize_downsample_scales_linear_align_corners": "follows ONNX Runtime, which rounds the size first",
    "test_resize_downsample_scales_cubic_align_corners": "follows ONNX Runtime, which rounds the size first",
}


def _cases() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        return collect_testcases("")


def _known(case: Any) -> bool:
    """Return True if every operator is in the table and every tensor of a type that torch computes in."""
    model = case.model
    if "_expanded" in case.name or any((n.domain, n.op_type) not in OPS for n in model.graph.node):
        return False
    values = [*model.graph.input, *model.graph.output]
    if any(not v.type.HasField("tensor_type") for v in values):
        return False
    codes = {v.type.tensor_type.elem_type for v in values}
    return all(str(onnx.helper.tensor_dtype_to_np_dtype(code)) in TYPES for code in codes)


CASES = [case for case in _cases() if _known(case)]


@pytest.mark.parametrize("case", [c for c in CASES if c.name not in EXCEPTIONS], ids=lambda case: case.name)
def test_node(case: Any) -> None:
    program = program_of(ir.from_proto(case.model))
    names = [value.name for value in case.model.graph.input]
    for inputs, outputs in case.data_sets:
        found = program.run(tensors(dict(zip(names, map(_array, inputs), strict=False))))
        for got, wanted in zip(found.values(), map(_array, outputs), strict=True):
            array = as_array(got, wanted.dtype)
            assert array.shape == wanted.shape
            half = wanted.dtype.kind in "fV" and wanted.dtype.itemsize == 2
            exact = [a.astype(np.float64) if a.dtype.kind in "fV" else a for a in (array, wanted)]
            np.testing.assert_allclose(*exact, rtol=2e-2 if half else case.rtol, atol=1e-2 if half else 1e-6)


def _array(value: Any) -> Any:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def test_exceptions_are_of_the_suite() -> None:
    assert set(EXCEPTIONS) <= {case.name for case in CASES}


def test_most_of_the_suite_is_run() -> None:
    assert len(CASES) > 800
