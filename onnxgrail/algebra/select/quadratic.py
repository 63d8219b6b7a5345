"""The loss that selection by second moments minimises: squared output error of consumers whose inputs lose features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxgrail.algebra.fit.normal import columns_of, probe_number
from onnxgrail.core import Floats, Ints, View

DEAD = 1e-12  # a feature whose second moment is below this share of the mean put nothing out


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Quadratic:
    """All consumers behind one probe, their weights side by side as columns C (h, c).

    Keeping the features P costs min over C' of tr (C − SᵀC')ᵀ A (C − SᵀC'), with S the rows of I at P: the squared
    output error after an optimal refit of the kept weights, plus a little for moving weights at all.

    Attributes:
        matrix: A = G + λI (h, h), λ = α · mean(diag G), in squared activations summed over calibration rows.
        columns: C (h, c), zero where the feature was always silent.
        members: features per unit, h = u·m, unit by unit.
    """

    matrix: Floats
    columns: Floats
    members: int


def quadratics(view: View, alpha: float) -> list[Quadratic]:
    """One per probe that has consumers and saw anything but zeros.

    Args:
        view: the block with its second moments.
        alpha: ridge as a share of the mean second moment, α > 0.

    Raises:
        UsageError: if the view carries no second moments.
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
        matrix = gram.copy()
        matrix.flat[:: len(gram) + 1] += lam
        columns = np.concatenate(parts, axis=1)
        columns[np.diagonal(gram) <= DEAD * np.diagonal(gram).mean()] = 0.0
        found.append(Quadratic(matrix=matrix, columns=columns, members=len(gram) // view.block.units))
    return found


def features(units: Ints, members: int) -> Ints:
    """(k·m,) positions of the m features of each of some units (k,), unit by unit."""
    return np.asarray((units[:, None] * members + np.arange(members)).ravel())
