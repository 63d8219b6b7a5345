"""Evaluates a fold on the folded network's own activations instead of averages of the original ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from onnxgrail.algebra.fit.normal import Normal, block_error, normals, squared_errors
from onnxgrail.algebra.fit.row_space import RowSpace
from onnxgrail.algebra.narrow import plain_weights
from onnxgrail.core import Change, Floats, Outcome, Stats, View

WORSE = "compensation does not lower the error on the folded activations"


def judge(view: View, change: Change, joint: Sequence[Stats]) -> Change:
    """Return the change with true errors, and plain weights for consumers that compensation makes worse.

    A fold's normal equations use R x, means of activations, but the narrowed network computes φ(mean of weights) = x̃.
    With both recorded, the error of any C' is tr(Cᵀ G C) - 2 tr(C'ᵀ X̃ᵀX C) + tr(C'ᵀ X̃ᵀX̃ C').

    Args:
        view: the block before the change.
        change: a fold, compensated or not.
        joint: one per probe, second moments of [x, x̃] side by side: (u + k) units in the order of the probe's
            features.
    """
    plain = plain_weights(view, change.reducer)
    chosen = dict(change.weights)
    systems, errors = [], []
    reverted: set[int] = set()
    for number, system in zip(_probes(view), normals(view, change.reducer), strict=True):
        true = _true(view, system, joint[number].gram)
        weights = np.concatenate([chosen[n].reshape(true.plain.shape[0], -1) for n, _ in true.parts], axis=1)
        step = weights - true.plain
        after = squared_errors(true, step)
        for n, part in true.parts:
            if not after[part].sum() <= true.lost[part].sum():
                after[part] = true.lost[part]
                chosen[n] = plain[n]
                reverted.add(n)
        systems.append(true)
        errors.append(after)
    if change.error.compensated is None:
        return dataclasses.replace(change, error=block_error(systems))
    consumers = {n for system in systems for n, _ in system.parts}
    outcome = Outcome(status="plain", reason=WORSE) if reverted >= consumers else change.outcome
    return dataclasses.replace(
        change, weights=tuple(sorted(chosen.items())), outcome=outcome, error=block_error(systems, errors)
    )


def _probes(view: View) -> list[int]:
    """Return the probe numbers in the order of `normals`."""
    return list(dict.fromkeys(s.probe for s in view.block.slots if s.role == "consumer" and s.probe is not None))


def _true(view: View, system: Normal | RowSpace, gram: Floats) -> Normal:
    """Return the normal equations with recorded instead of averaged features."""
    narrow = len(system.plain)
    wide = gram.shape[0] - narrow
    columns = np.concatenate([view.weights[n].reshape(wide, -1) for n, _ in system.parts], axis=1)
    return Normal.of(
        gram[wide:, :wide] @ columns,
        gram=gram[wide:, wide:],
        plain=system.plain,
        energy=system.energy,
        parts=system.parts,
    )
