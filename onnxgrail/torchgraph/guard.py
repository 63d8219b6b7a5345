"""Comparison of a torch program's outputs with ONNX Runtime's, before its gradients are used."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from onnxgrail.core import Array
from onnxgrail.errors import ModelError
from onnxgrail.torchgraph.call import Tensor, as_array
from onnxgrail.torchgraph.program import Program, tensors

LIMIT = {2: 3e-2, 4: 1e-3, 8: 1e-6}  # by bytes per element of the model's dtype


def check(found: Mapping[str, Tensor], expected: Mapping[str, Array], name: str) -> float:
    """Check that torch and ONNX Runtime agree; return the largest relative difference over all values.

    Raises:
        ModelError: torch and ONNX Runtime disagree.
    """
    worst = 0.0
    for value, wanted in expected.items():
        got = as_array(found[value], np.dtype(np.float64))
        if got.shape != wanted.shape:
            raise _differ(name, value, f"shapes {list(got.shape)} and {list(wanted.shape)}")
        gap = distance(got, wanted.astype(np.float64))
        worst = max(worst, gap)
        limit = LIMIT.get(wanted.dtype.itemsize, 0.0) if wanted.dtype.kind in "fV" else 0.0
        if not gap <= limit:
            raise _differ(name, value, f"a relative difference of {gap:.1e}")
    return worst


def agree(program: Program, inputs: Mapping[str, Array], expected: Mapping[str, Array], name: str) -> None:
    """Run a program on inputs, and check its values.

    Raises:
        ModelError: torch and ONNX Runtime disagree.
    """
    with torch.no_grad():
        check(program.run(tensors(inputs, program.floats), list(expected)), expected, name)


def distance(got: Array, wanted: Array) -> float:
    """Return the norm of the difference relative to the norm of `wanted`; infinities of equal sign agree."""
    same = np.equal(got, wanted) | (np.isnan(got) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        wrong = np.where(same, 0.0, got - wanted)
    norm = float(np.linalg.norm(np.where(np.isfinite(wanted), wanted, 0.0).ravel()))
    error = float(np.linalg.norm(wrong.ravel()))
    return error / norm if norm else error


def _differ(name: str, value: str, what: str) -> ModelError:
    return ModelError(
        f"{name}: torch and ONNX Runtime disagree on {value!r} ({what})",
        hint="No gradients are taken from such a part; please report the model",
    )
