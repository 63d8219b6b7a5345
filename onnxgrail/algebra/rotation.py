"""Bases of channels in which the first carry the most.

Residual streams: SliceGPT (Ashkboos et al. 2024, arXiv 2401.15024). Inside attention heads: MoDeGPT (Lin et al. 2024,
arXiv 2408.09632) factorizes queries and keys, and values and outputs, in the same spirit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from onnxgrail.core import Floats, Ints, Stats

TINY = float(np.finfo(np.float64).tiny)
UNREAD = 1e-3  # square of what counts of a direction that nothing reads, as a share of the mean: keeps rounding small
FLOOR = 1e-5  # least second moment of a direction, as a share of the mean


class Moments:
    """Second moments of a stream, of which all count alike, added up one by one: each may be large.

    The basis they give is that of the eigenvectors of their sum, in falling order of the eigenvalues; for channels
    without their mean, it has the direction of the mean before these, and all numbers of its first column are 1 / √d.
    """

    def __init__(self, *, beside_mean: bool = False) -> None:
        self._beside_mean = beside_mean
        self._rest: Floats | None = None
        self._total: Floats = np.zeros(())

    def add(self, gram: Floats) -> None:
        """Add the (d, d) sum z zᵀ over the rows of one normalization, z divided by its root mean square."""
        if self._beside_mean:
            if self._rest is None:
                self._rest = np.linalg.svd(self._mean(len(gram)).T)[2][1:].T
            gram = self._rest.T @ gram @ self._rest
        self._total = self._total + gram / max(float(np.trace(gram)), TINY)

    def basis(self) -> Floats:
        """Return a (d, d) orthogonal matrix; the largest number of each column is positive."""
        _, vectors = np.linalg.eigh(np.asarray(self._total, np.float64))
        vectors = vectors[:, ::-1]
        largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
        vectors = np.ascontiguousarray(vectors * np.where(largest < 0, -1.0, 1.0))
        return vectors if self._rest is None else np.hstack([self._mean(len(self._rest)), self._rest @ vectors])

    @staticmethod
    def _mean(width: int) -> Floats:
        return np.full((width, 1), width**-0.5)


def basis_of(moments: Iterable[Floats], *, beside_mean: bool = False) -> Floats:
    """Return the basis that (d, d) second moments give, as `Moments` does."""
    total = Moments(beside_mean=beside_mean)
    for gram in moments:
        total.add(gram)
    return total.basis()


def basis_of_layers(moments: Sequence[Floats], products: Sequence[Floats]) -> Floats:
    """Return the basis in which layers that read a linear stream lose least with its last channels.

    With one reader W, the stream x B, B = (W Wᵀ)^½ U, has uncorrelated channels in falling order of size, and an error
    of a channel is as large in the reader's output: without the last channels, the output has its best low rank. All
    tensors that are read count alike, relative to what is made of them.

    Args:
        moments: (d, d) sums x xᵀ over rows, one per tensor that layers read.
        products: (d, d) products W Wᵀ of the weights that read each of them.

    Returns:
        (d, d) invertible matrix B.
    """
    sizes = [max(float(np.trace(gram)), TINY) for gram in moments]
    first = np.asarray(sum(gram / size for gram, size in zip(moments, sizes, strict=True)))
    outputs = [max(float(np.sum(gram * product)), TINY) for gram, product in zip(moments, products, strict=True)]
    second = np.asarray(sum(product * size / out for product, size, out in zip(products, sizes, outputs, strict=True)))
    root, _ = _roots(second + UNREAD * np.trace(second) / len(second) * np.eye(len(second)))
    _, vectors = np.linalg.eigh(root @ first @ root)
    return np.asarray(root @ vectors[:, ::-1])


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


def basis_of_queries(queries: Sequence[Sequence[Stats]], keys: Sequence[Sequence[Stats]]) -> Floats:
    """Return the (groups, d, d) bases in which queries lose least with their last channels.

    The mean of keys adds the same to all scores of a query, so it does not count.

    Args:
        queries: per group of heads, sums over the rows of each query head.
        keys: per group of heads, sums over the rows of each key head.
    """
    spread = [sum(_moments(sums) - _square_of_mean(sums) for sums in heads) for heads in keys]
    pairs = zip(queries, spread, strict=True)
    return np.stack([balanced(np.asarray(sum(map(_moments, heads))), np.asarray(other)) for heads, other in pairs])


def with_biases(heads: Sequence[Sequence[Stats]], biases: Floats | None) -> list[list[Stats]]:
    """Return sums as if biases were added to the rows of every head.

    Args:
        heads: per group of heads, sums over the rows of each head.
        biases: (groups, heads, d); None for zeros.
    """
    if biases is None:
        return [list(group) for group in heads]
    groups = zip(heads, biases, strict=True)
    return [[_shifted(sums, bias) for sums, bias in zip(*group, strict=True)] for group in groups]


def _shifted(sums: Stats, bias: Floats) -> Stats:
    cross = np.outer(sums.total, bias)
    gram = sums.gram + cross + cross.T + sums.count * np.outer(bias, bias)
    return Stats(gram=gram, total=sums.total + sums.count * bias, count=sums.count)


def of_unit_size(heads: Sequence[Sequence[Stats]]) -> list[list[Stats]]:
    """Return sums as if the rows of every head had the root mean square 1.

    Args:
        heads: per group of heads, sums over the rows of each head.
    """
    return [[_divided(sums, float(np.sqrt(max(_energies(sums).mean(), TINY)))) for sums in group] for group in heads]


def _divided(sums: Stats, size: float) -> Stats:
    return Stats(gram=sums.gram / size**2, total=sums.total / size, count=sums.count)


def order_of_pairs(
    queries: Sequence[Sequence[Stats]],
    keys: Sequence[Sequence[Stats]],
    turned: Sequence[Stats],
    units: Ints,
    *,
    normed: bool = False,
) -> Floats:
    """Return the numbers of units, the one whose part of the scores varies most first.

    A rotation by position turns the channels of a unit, a pair, together. Over many distances between query and key,
    the part q R k of a pair in the scores has the mean square |q|² |k|² / 2, and parts of different pairs do not
    correlate. What the rotation leaves of the mean of keys adds the same to all scores of a query, so it does not
    count. It leaves much of it in pairs that hardly turn: as much as of the mean over all heads.

    Args:
        queries: per group of heads, squares over the rows of each query head, sorted by unit.
        keys: per group of heads, squares over the rows of each key head, sorted by unit.
        turned: of queries and of keys after the rotation, sums over the rows of all heads.
        units: (width,) unit of every channel after the rotation.
        normed: between them, queries or keys are normalized: what `turned` adds to the energy of a unit, over all
            heads, counts in every head.
    """
    size = np.bincount(units)
    starts = np.cumsum(size) - size
    before, after, gains = np.zeros(len(size)), np.zeros(len(size)), np.ones(len(size))
    for side, rotated in zip((queries, keys), turned, strict=True):
        heads = [sums for group in side for sums in group]
        before += np.add.reduceat(np.mean([_mean(sums) for sums in heads], axis=0) ** 2, starts)
        energy = np.add.reduceat(np.mean([_energies(sums) for sums in heads], axis=0), starts)
        scale = np.bincount(units, _energies(rotated)) / np.maximum(energy, TINY)  # the scores' scale may be in it
        after += np.bincount(units, _mean(rotated) ** 2) / np.maximum(scale, TINY)
        gains *= scale if normed else 1.0
    still = np.minimum(after / np.maximum(before, TINY), 1.0)
    harms = np.zeros(len(size))
    for group, shared in zip(queries, keys, strict=True):
        moving = [_energies(sums) - np.repeat(still, size) * _mean(sums) ** 2 for sums in shared]
        harms += np.add.reduceat(sum(map(_energies, group)), starts) * np.add.reduceat(sum(moving), starts) / size
    return np.argsort(-harms * gains, kind="stable").astype(np.float64)


def basis_of_values(values: Sequence[Sequence[Sequence[Stats]]], products: Floats) -> Floats:
    """Return the (groups, d, d) bases in which values lose least with their last channels.

    Args:
        values: per layer that reads them and group of heads, sums over the rows of each head.
        products: (groups, d, d) products W Wᵀ of the weights that read them.
    """
    groups = zip(*values, strict=True)
    moments = [sum(_moments(sums) for heads in layers for sums in heads) for layers in groups]
    return np.stack([balanced(np.asarray(one), other) for one, other in zip(moments, products, strict=True)])


def _moments(sums: Stats) -> Floats:
    return np.asarray(sums.gram / max(sums.count, 1))


def _energies(sums: Stats) -> Floats:
    return np.asarray(sums.squares / max(sums.count, 1))


def _mean(sums: Stats) -> Floats:
    return np.asarray(sums.total / max(sums.count, 1))


def _square_of_mean(sums: Stats) -> Floats:
    return np.outer(_mean(sums), _mean(sums))


def balanced(first: Floats, second: Floats) -> Floats:
    """Return the basis in which two sets of vectors have equal second moments, in falling order of their sizes.

    A product x yᵀ stays the same if the first set is multiplied by the basis B, and the second by its inverse,
    transposed. Without its last channels, it then differs least in the mean square, if both sets are independent.

    Args:
        first: (d, d) second moments of x.
        second: (d, d) second moments of y.

    Returns:
        (d, d) matrix A^-½ U S^½, with A and C the moments and U S Vᵀ the singular values of A^½ C^½.
    """
    root, inverse = _roots(first)
    left, sizes, _ = np.linalg.svd(root @ _roots(second)[0])
    return np.asarray(inverse @ left * np.sqrt(np.maximum(sizes, np.finfo(np.float64).tiny)))


def _roots(moments: Floats) -> tuple[Floats, Floats]:
    """Return the square root of a matrix of second moments and its inverse; no direction counts as empty."""
    values, vectors = np.linalg.eigh((moments + moments.T) / 2)
    floor = FLOOR * max(float(np.trace(moments)) / len(moments), float(np.finfo(np.float32).tiny))
    roots = np.sqrt(np.maximum(values, floor))
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T
