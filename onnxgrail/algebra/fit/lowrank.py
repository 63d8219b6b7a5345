"""Factorizes a matrix into two narrow ones: number and choice of the kept singular directions.

A weight is W (m, n) as in y = x W, W = U diag(s) V with U (m, q), V (q, n), q = min(m, n). With k directions kept it
becomes `down` (m, k) times `up` (k, n).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxgrail.core import Array, Floats, Ints

DAMPING = 1e-4  # of a Gram matrix, as a share of its mean diagonal


@dataclass(frozen=True, slots=True, eq=False)
class Spectrum:
    """A decomposition W = left diag(values) right, largest value first: left (m, q), values (q,), right (q, n).

    Rows of `right` are orthonormal. Columns of `left` are orthonormal, too, or orthonormal with respect to the inputs'
    second moments.
    """

    left: Floats
    values: Floats
    right: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """The two matrices that replace one, and the share of the squared singular values that they lose."""

    down: Floats
    up: Floats
    lost: float


def rank_of(inputs: int, outputs: int, retain: float) -> int:
    """Return the rank k at which k (m + n) parameters are the share `retain` of m n, rounded down, at least 1.

    References:
        Liu et al. 2024 (GRASP), arXiv:2501.00339: its table of overall ratios counts parameters, not components.
    """
    return max(1, int(inputs * outputs * retain / (inputs + outputs) + 1e-9))


def saving(inputs: int, outputs: int, rank: int) -> int:
    """Return the number of parameters that a pair saves; at most 0 if the pair is not smaller."""
    return inputs * outputs - rank * (inputs + outputs)


def spectrum(weight: Array) -> Spectrum:
    """Compute the singular value decomposition of a matrix (m, n), in float64."""
    return Spectrum(*_svd(np.asarray(weight, dtype=np.float64)))


def whitened(weight: Array, gram: Floats) -> Spectrum:
    """Compute the singular values of LT W, where L LT is the inputs' Gram matrix.

    The squared values that are dropped are the squared error of the outputs, not of the weight.

    Args:
        weight: (m, n).
        gram: (m, m).

    References:
        Wang et al. 2024, SVD-LLM, arXiv:2403.07378, with damping.
    """
    from scipy import linalg  # slow to import, and only factors need it

    level = DAMPING * max(float(np.trace(gram)) / len(gram), 1e-30)
    root = linalg.cholesky(gram + level * np.eye(len(gram)), lower=True)
    left, values, right = _svd(root.T @ np.asarray(weight, dtype=np.float64))
    return Spectrum(linalg.solve_triangular(root, left, lower=True, trans="T"), values, right)


def _svd(array: Floats) -> tuple[Floats, Floats, Floats]:
    from scipy import linalg  # slow to import

    try:
        found: tuple[Floats, Floats, Floats] = linalg.svd(array, full_matrices=False)
    except np.linalg.LinAlgError:  # the faster driver does not always converge
        found = linalg.svd(array, full_matrices=False, lapack_driver="gesvd")
    return found


def slope(found: Spectrum, gradient: Array) -> Floats:
    """Compute (q,) dL/ds = uT (dL/dW) v for every singular value, from the gradient (m, n) of a loss.

    References:
        Liu et al. 2024 (GRASP), arXiv:2501.00339, appendix A.1.
    """
    product: Floats = np.einsum("mq,qm->q", found.left, found.right @ np.asarray(gradient, dtype=np.float64).T)
    return product


def taylor(found: Spectrum, gradient: Array) -> Floats:
    """Compute (q,) |s dL/ds|: the first-order change of a loss, up or down, when each singular value is removed.

    Args:
        found: the decomposition of W.
        gradient: (m, n) at W, summed over all batches: signs cancel before the absolute value is taken.

    References:
        Liu et al. 2024 (GRASP), arXiv:2501.00339, equation 6.
    """
    scores: Floats = np.abs(found.values * slope(found, gradient))
    return scores


def attribution(found: Spectrum, gradient: Array) -> Floats:
    """Compute (q,) - s dL/ds: the decrease of a loss due to each singular value, as the matrix grows from zero to W.

    At W itself the gradient of a trained network is almost zero, and it says nothing about a point as far away as a
    tenth of the parameters.

    Args:
        found: the decomposition of W.
        gradient: (m, n) at W / 2: by the midpoint rule the scores of all values add up to the effect of the whole
            matrix.

    References:
        Sundararajan et al. 2017, integrated gradients, arXiv:1703.01365, with one step in the middle of the path.
    """
    return -found.values * slope(found, gradient)


def best(scores: Floats, rank: int) -> Ints:
    """Return (k,) the `rank` directions with the highest scores (q,), ascending; ties go to the lower index."""
    return np.sort(np.argsort(-scores, kind="stable")[:rank])


def pair(found: Spectrum, kept: Ints) -> Pair:
    """Return the pair of the kept directions (k,), with columns of `down` and rows of `up` scaled to equal norms."""
    left, values = found.left[:, kept], found.values[kept]
    norms = np.linalg.norm(left, axis=0)
    sizes = np.sqrt(values * norms)
    energy = float(np.square(found.values).sum())
    share = 1.0 - float(np.square(values).sum()) / energy if energy else 0.0
    down = left * (sizes / np.where(norms == 0, 1.0, norms))
    return Pair(down=down, up=sizes[:, None] * found.right[kept], lost=max(share, 0.0))
