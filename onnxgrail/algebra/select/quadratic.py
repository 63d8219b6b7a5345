"""The loss of selection by second moments: squared output error of consumers that lose input features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxgrail.algebra.fit.normal import columns_of, probe_number
from onnxgrail.core import Floats, Ints, View

DEAD = 1e-12  # a feature whose second moment is below this share of the mean counts as silent


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Quadratic:
    """All consumers of one probe, with their weights side by side as columns C (h, c).

    Keeping the features P costs min over C' of tr (C − SᵀC')ᵀ A (C − SᵀC'), with S the rows of I at P: the squared
    output error after an optimal refit of the kept weights, plus the ridge penalty.

    Attributes:
        matrix: A = G + λI (h, h), λ = α · mean(diag G), in squared activations summed over calibration rows.
        columns: C (h, c), zero if the feature was always silent.
        members: features per unit, h = u·m, unit by unit.
    """

    matrix: Floats
    columns: Floats
    members: int


def quadratics(view: View, alpha: float) -> list[Quadratic]:
    """Return one problem per probe that has consumers and a nonzero activation.

    Args:
        view: the block with its second moments.
        alpha: ridge parameter as a share of the mean second moment, α > 0.

    Raises:
        UsageError: the view carries no second moments.
    """
    consumers: dict[int, list[Floats]] = {}
    for slot, weight in view.of("consumer"):
        place = probe_number(view, slot)
        consumers.setdefault(place, []).append(columns_of(slot, weight, view.block.probes[place]))
    found = []
    for place, parts in consumers.items():
        gram = view.stats[place].gram
        lam = alpha * float(np.diagonal(gram).mean())
        if lam == 0.0:
            continue
        matrix = gram.astype(np.float64)
        matrix.flat[:: len(gram) + 1] += lam
        columns = np.concatenate(parts, axis=1)
        columns[np.diagonal(gram) <= DEAD * np.diagonal(gram).mean()] = 0.0
        found.append(Quadratic(matrix=matrix, columns=columns, members=len(gram) // view.block.units))
    return found


def features(units: Ints, members: int) -> Ints:
    """Return (k·m,) the positions of the m features of each of the given units (k,), unit by unit."""
    return np.asarray((units[:, None] * members + np.arange(members)).ravel())
