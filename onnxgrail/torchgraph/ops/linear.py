"""Matrix products."""

from __future__ import annotations

import torch

from onnxgrail.torchgraph.call import Call, Function, Tensor, plain


def gemm(call: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """Compute `alpha` times the product of two matrices plus `beta` times a third."""
    left = a.T if call.get("transA", 0) else a
    right = b.T if call.get("transB", 0) else b
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    product = left @ right if alpha == 1 else alpha * (left @ right)
    if c is None:
        return product
    return product + (c if beta == 1 else beta * c)


TABLE: dict[str, Function] = {
    "MatMul": plain(torch.matmul),
    "Gemm": gemm,
    "Einsum": lambda call, *inputs: torch.einsum(call.get("equation").replace(" ", ""), *inputs),
    "Det": plain(torch.det),
}
