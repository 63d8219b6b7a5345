"""A matrix as the product of two narrow ones: how many of its singular directions stay, and which.

A weight is W (m, n) as in y = x W, W = U diag(s) V with U (m, q), V (q, n), q = min(m, n).  With k directions kept it
becomes `down` (m, k) times `up` (k, n).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from onnxgrail.core import Array, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Spectrum:
    """Singular values, the largest first, with their directions: left (m, q), right (q, n)."""

    left: Floats
    values: Floats
    right: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two matrices in place of one, and the share of its squared norm that they do not have."""

    down: Floats
    up: Floats
    lost: float


def rank_of(inputs: int, outputs: int, retain: float) -> int:
    """k: with k (m + n) numbers a share `retain` of the m n parameters stays, rounded down, but never none.

    References:
        Liu et al. 2024 (GRASP), arXiv:2501.00339: its table of overall ratios counts parameters, not components.
    """
    return max(1, int(inputs * outputs * retain / (inputs + outputs) + 1e-9))


def saving(inputs: int, outputs: int, rank: int) -> int:
    """Parameters that go; not above 0 where a pair would be no smaller."""
    return inputs * outputs - rank * (inputs + outputs)


def removed(shapes: Iterable[tuple[int, int]], retain: float) -> int:
    """Parameters that go when all matrices of these shapes are replaced."""
    return sum(max(saving(m, n, rank_of(m, n, retain)), 0) for m, n in shapes)


def spectrum(weight: Array) -> Spectrum:
    """The singular values of a matrix, in float64."""
    wide = np.asarray(weight, dtype=np.float64)
    try:
        found = scipy.linalg.svd(wide, full_matrices=False)
    except np.linalg.LinAlgError:  # the faster driver does not always converge
        found = scipy.linalg.svd(wide, full_matrices=False, lapack_driver="gesvd")
    return Spectrum(*found)


def slope(found: Spectrum, gradient: Array) -> Floats:
    """(q,) dL/ds = uT (dL/dW) v of every singular value, from the gradient (m, n) of a loss.

    References:
        Liu et al. 2024 (GRASP), arXiv:2501.00339, appendix A.1.
    """
    product: Floats = np.einsum("mq,qm->q", found.left, found.right @ np.asarray(gradient, dtype=np.float64).T)
    return product


def taylor(found: Spectrum, gradient: Array) -> Floats:
    """(q,) |s dL/ds|: the first-order change of a loss when each singular value goes, either way.

    `gradient` is that at W, summed over all batches: signs cancel before the absolute value is taken.

    References:
        Liu et al. 2024 (GRASP), arXiv:2501.00339, equation 6.
    """
    scores: Floats = np.abs(found.values * slope(found, gradient))
    return scores


def attribution(found: Spectrum, gradient: Array) -> Floats:
    """(q,) - s dL/ds: how far each singular value takes a loss down on the way from none of the matrix to all of it.

    `gradient` is that at W / 2: by the midpoint rule the scores of all values add up to what the whole matrix does for
    the loss.  At W itself a trained network has hardly any gradient, and what there is says nothing about a place as
    far away as a tenth of the parameters.

    References:
        Sundararajan et al. 2017, integrated gradients, arXiv:1703.01365, with one step in the middle of the path.
    """
    return -found.values * slope(found, gradient)


def best(scores: Floats, rank: int) -> Ints:
    """The `rank` directions with the highest scores, ascending; of equal ones the first, which are larger."""
    return np.sort(np.argsort(-scores, kind="stable")[:rank])


def pair(found: Spectrum, kept: Ints) -> Pair:
    """The kept directions, each singular value shared between the two matrices so that both are of one size."""
    root = np.sqrt(found.values[kept])
    energy = float(np.square(found.values).sum())
    share = 1.0 - float(np.square(found.values[kept]).sum()) / energy if energy else 0.0
    return Pair(down=found.left[:, kept] * root, up=root[:, None] * found.right[kept], lost=max(share, 0.0))
