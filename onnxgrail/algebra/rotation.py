"""The basis of a residual stream in which the first channels carry the most (SliceGPT, Ashkboos et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxgrail.core import Floats, Stats


def basis_of(moments: Sequence[Floats]) -> Floats:
    """Return the eigenvectors of the averaged second moments of a stream, in falling order of their eigenvalues.

    Args:
        moments: (d, d) sums z zᵀ over rows, one per normalization that reads the stream, z divided by its root mean
            square. Every normalization counts alike.

    Returns:
        (d, d) orthogonal matrix; its columns are the eigenvectors, the largest number of each is positive.
    """
    total = sum(gram / max(float(np.trace(gram)), np.finfo(np.float64).tiny) for gram in moments)
    _, vectors = np.linalg.eigh(np.asarray(total))
    vectors = vectors[:, ::-1]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    return np.ascontiguousarray(vectors * np.where(largest < 0, -1.0, 1.0))


def unnormed(sums: Stats, gain: Floats | None, shift: Floats | None) -> Floats:
    """Return sums z zᵀ (d, d) from those of y = z * gain + shift; channels without gain count as zero.

    Args:
        sums: of y over rows.
        gain: (d,) of the normalization; None for ones.
        shift: (d,) of the normalization; None for zeros.
    """
    gram = sums.gram
    if shift is not None:
        cross = np.outer(sums.total, shift)
        gram = gram - cross - cross.T + sums.count * np.outer(shift, shift)
    if gain is None:
        return gram
    inverse = np.divide(1.0, gain, out=np.zeros_like(gain), where=gain != 0)
    return np.asarray(gram * np.outer(inverse, inverse))
