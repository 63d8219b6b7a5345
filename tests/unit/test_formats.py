"""Numbers beyond the range of a format, without a model around them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from onnxgrail.algebra.fit.formats import in_range
from onnxgrail.core import Block, BlockError, Change, Reducer, Slot, View
from onnxgrail.graph import slots


def decided(*values: float, compensated: float | None = 0.1) -> tuple[View, Change]:
    slot = Slot(param="w", initializer="w", axis=0, index=np.arange(4)[:, None], role="consumer", probe=0)
    block = Block(
        name="b", kind="mlp", units=4, unit_size=1, slots=(slot,), probes=(), ids=np.arange(4), span=(0, 1), nodes=()
    )
    array = np.array(values).reshape(-1, 1, 1)
    view = View(block=block, weights=(np.ones((4, 1, 1)),), stats=())
    error = BlockError(plain=0.5, compensated=compensated)
    return view, Change(block=block, reducer=Reducer(kept=np.arange(len(values))), weights=((0, array),), error=error)


@pytest.mark.parametrize(
    ("values", "status", "clamped"),
    [((1.0, -65504.0), "ok", 0), ((65600.0, -131000.0), "ok", 2), ((65600.0, -131100.0), "plain", 0)],
)
def test_material_means_more_than_twice(values: tuple[float, ...], status: str, clamped: int) -> None:
    view, change = decided(*values)
    found = in_range(view, change, [slots.largest(np.dtype(np.float16))])
    assert (found.outcome.status, found.outcome.clamped) == (status, clamped)
    assert bool(found.weights) == (status == "ok")
    assert found.error.compensated == (0.1 if status == "ok" else 0.5)


def test_a_fold_without_compensation_has_nothing_to_fall_back_to() -> None:
    view, change = decided(2e5, 1.0, compensated=None)
    assert in_range(view, change, [65504.0]).outcome.clamped == 1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_what_is_written_is_finite(dtype: type) -> None:
    kind = np.dtype(dtype)
    slot = Slot(param="w", initializer="w", axis=1, index=np.arange(3)[:, None], role="consumer")
    array = np.ones((2, 3), kind)
    values = np.full((2, 1, 2), 2.0 * min(slots.largest(kind), 1e300))
    out = slots.write(array, slot, np.array([0, 2]), -values)
    assert out.dtype == kind
    assert np.isfinite(out.astype(np.float64)).all()
    assert (out[:, [0, 2]].astype(np.float64) <= -min(slots.largest(kind), 1e300)).all()
    assert (out[:, 1] == 1).all()


def test_integers_have_no_such_limit() -> None:
    assert slots.largest(np.dtype(np.int8)) == np.inf
