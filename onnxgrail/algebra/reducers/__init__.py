"""Reducers by name. To add a reducer: one file with a frozen dataclass, and one line in `REDUCERS`."""

from __future__ import annotations

from onnxgrail.algebra.fold.kmeans import kmeans
from onnxgrail.algebra.reducers.factory import ReducerFactory, folds
from onnxgrail.algebra.reducers.fold import Fold
from onnxgrail.algebra.reducers.fold_gram import FoldGram
from onnxgrail.algebra.reducers.fold_random import FoldRandom
from onnxgrail.algebra.reducers.prune import Prune

__all__ = ["REDUCERS", "Fold", "Prune", "ReducerFactory", "folds"]

REDUCERS: dict[str, ReducerFactory] = {
    "prune": Prune(),
    "fold": Fold(),
    "fold-kmeans": Fold(cluster=kmeans),
    "fold-gram": FoldGram(),
    "fold-random": FoldRandom(),
}
