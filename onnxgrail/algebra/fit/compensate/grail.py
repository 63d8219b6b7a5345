"""Ridge compensation of a block's consumers from second moments alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxgrail.algebra.fit.normal import Normal, block_error, normals
from onnxgrail.algebra.fit.row_space import RowSpace
from onnxgrail.algebra.narrow import plain_weights
from onnxgrail.core import BlockError, Change, Floats, Outcome, Reducer, View
from onnxgrail.errors import UsageError

DEAD = 1e-12  # a channel whose second moment is below this share of the mean counts as silent
SLACK = 1e-12  # errors that differ by less than this share of the output are equal


@dataclass(frozen=True, slots=True)
class Grail:
    """Ridge regression from narrowed features to old outputs: C' = (R G Rᵀ + λI)⁻¹ R G C, λ = α · mean(diag(R G Rᵀ)).

    That is C' = Bᵀ C with B = G Rᵀ (R G Rᵀ + λI)⁻¹, solved for the weights without forming B. R acts on features: R ⊗ I
    over the members of a unit, or R at every position of a pooled probe. Producers and passengers follow R as without
    compensation.

    The result is never worse than no compensation on the calibration rows: a consumer that would be worse keeps its
    plain weights, and so do kept channels that were silent on all calibration rows.

    Attributes:
        alpha: ridge parameter as a share of the mean second moment of the narrowed features, α ≥ 0. The result does not
            depend on the scale of the activations or the number of rows.

    References:
        Tang et al. 2026 (GRAIL), arXiv:2602.23795, section 3.1.
    """

    alpha: float = 1e-3
    needs_data: ClassVar[bool] = True
    consumers_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the ridge parameter."""
        if not 0.0 <= self.alpha < np.inf:
            raise UsageError(f"the ridge must be a finite number from 0 up, got {self.alpha}")

    def __call__(self, view: View, reducer: Reducer) -> Change:
        """Compute the decision for `view.block`.

        Raises:
            UsageError: the view carries no second moments.
        """
        if not view.stats:
            raise UsageError(
                f"compensation of block {view.block.name!r} needs activation statistics",
                hint="Give calibration data, or choose compensate none.",
            )
        weights = plain_weights(view, reducer)
        if fault := _fault(view):
            return _change(view, reducer, weights, Outcome(status="plain", reason=fault), BlockError())
        systems = normals(view, reducer)
        fits = [fit(system, self.alpha) for system in systems]
        for system, one in zip(systems, fits, strict=True):
            for number, part in system.parts:
                if number in one.better:
                    shape = (len(reducer.kept), *view.weights[number].shape[1:])
                    weights[number] = one.weights[:, part].reshape(shape)
        outcome = _outcome(fits, sum(len(system.parts) for system in systems))
        return _change(view, reducer, weights, outcome, block_error(systems, [one.after for one in fits]))

    def error(self, view: View, reducer: Reducer) -> BlockError:
        """Compute the errors alone, from some outputs of the consumers."""
        if not view.stats or _fault(view):
            return BlockError()
        systems = normals(view, reducer, brief=True)
        return block_error(systems, [fit(system, self.alpha).after for system in systems])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fit:
    """Weights for all consumers of one probe.

    Attributes:
        weights: C' (h', c), plain columns if compensation does not help.
        better: slot numbers of the consumers that got compensated columns.
        damped: True if a larger ridge than requested was needed.
        after: (c,) squared errors of the columns of `weights`, in squared output units.
    """

    weights: Floats
    better: frozenset[int]
    damped: bool
    after: Floats


def fit(normal: Normal | RowSpace, alpha: float) -> Fit:
    """Compute the compensated weights of the consumers of one probe; none of them gets worse than plain.

    Args:
        normal: their normal equations.
        alpha: ridge parameter as a share of the mean diagonal, α ≥ 0.
    """
    diagonal = normal.diagonal
    alive = diagonal > DEAD * diagonal.mean()
    weights = normal.plain.copy()
    if not alive.any():
        return Fit(weights=weights, better=frozenset(), damped=False, after=normal.lost)
    lam = alpha * float(diagonal.mean())
    step, used, after = normal.solution(alive, lam)
    better = set()
    for number, part in normal.parts:
        # Written so that NaN counts as worse.
        if after[part].sum() <= normal.lost[part].sum() + SLACK * normal.energy[part].sum():
            better.add(number)
            weights[:, part] += step[:, part]
        else:
            after[part] = normal.lost[part]
    return Fit(weights=weights, better=frozenset(better), damped=bool(better) and used > lam, after=after)


def _fault(view: View) -> str:
    """Return the reason if second moments cannot be used, else ''.

    Checking their diagonals suffices: no product of two features is larger than the larger of their squares.
    """
    squares = [stats.squares for stats in view.stats]
    if not all(np.isfinite(some).all() for some in squares):
        return "second moments hold NaN or infinity"
    if not any(some.any() for some in squares):
        return "the consumers saw nothing but zeros on the calibration rows"
    return ""


def _outcome(fits: list[Fit], consumers: int) -> Outcome:
    """Summarize the fits of a block for the report."""
    better = sum(len(one.better) for one in fits)
    if not better:
        return Outcome(status="plain", reason="compensation does not lower the error on the calibration rows")
    kept = f"{consumers - better} of {consumers} consumers keep plain weights" if better < consumers else ""
    if any(one.damped for one in fits):
        grown = "second moments are singular, a larger ridge was used"
        return Outcome(status="damped", reason="; ".join(filter(None, (grown, kept))))
    return Outcome(status="ok", reason=kept)


def _change(view: View, reducer: Reducer, weights: dict[int, Floats], outcome: Outcome, error: BlockError) -> Change:
    """Return the change, with weights in slot order."""
    return Change(
        block=view.block, reducer=reducer, weights=tuple(sorted(weights.items())), outcome=outcome, error=error
    )
