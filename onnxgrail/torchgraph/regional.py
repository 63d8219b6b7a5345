"""Sensitivity of a region's output norm to each of its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import torch

from onnxgrail.core import Array, Bools, Floats
from onnxgrail.torchgraph.fit import shown
from onnxgrail.torchgraph.guard import check
from onnxgrail.torchgraph.program import tensors, trainable

Sample = tuple[Mapping[str, Array], Bools | None]


def gradient_sizes(
    piece: ir.Model, names: Sequence[str], samples: Iterable[Sample], expected: Mapping[str, Array]
) -> dict[str, Floats]:
    """Compute the root mean square over samples of the gradient of ||f(x)||_2, per weight element.

    Args:
        piece: computes the region's outputs from its inputs.
        names: weights to differentiate with respect to.
        samples: the region's inputs, one sample at a time, with the mask of real tokens.
        expected: ONNX Runtime's outputs for the first sample, to check that torch computes the same function.

    Raises:
        UnsupportedOpError: an operator without gradient.
        ModelError: torch and ONNX Runtime disagree.
    """
    program = trainable(piece)
    weights = {n: program.weights[n].detach().clone().requires_grad_() for n in names}
    sums = {n: torch.zeros_like(w, dtype=torch.float64) for n, w in weights.items()}
    count = 0
    for inputs, mask in samples:
        found = program.run(tensors(inputs, program.floats), list(expected), override=weights)
        if not count:
            check({n: y.detach() for n, y in found.items()}, expected, piece.graph.name or "the model")
        size = sum(shown(y, mask).double().square().sum() for y in found.values())
        size = torch.sqrt(size)
        if float(size.detach()) > 0 and bool(torch.isfinite(size)):  # the root is not differentiable at zero
            slopes = torch.autograd.grad(size, list(weights.values()), allow_unused=True)
            for name, slope in zip(weights, slopes, strict=True):
                if slope is not None:
                    sums[name] += torch.nan_to_num(slope.double(), nan=0.0, posinf=0.0, neginf=0.0).square()
        count += 1
    return {n: np.sqrt(total.numpy() / max(count, 1)) for n, total in sums.items()}
