"""`--method grasp`: redundant layers get low-rank matrices."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.core import Applied, Progress, Recipe
from onnxgrail.graph.survey import Ledger
from onnxgrail.preparation import Prepared


def needs_torch(recipe: Recipe) -> bool:
    """Whether singular values are ranked by gradients."""
    return recipe.grasp_rank == "attribution"


def replace_layers(prepared: Prepared, recipe: Recipe, ledger: Ledger, slim: ir.Model, progress: Progress) -> Applied:
    """Replace the matrices of redundant layers by pairs of narrow ones."""
    raise NotImplementedError
