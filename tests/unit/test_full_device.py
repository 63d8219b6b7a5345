"""A device without torch that is full: what does not fit is kept and summed on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onnxgrail.calibration.devices import kernels
from onnxgrail.calibration.devices.kernels import Kernels
from onnxgrail.calibration.devices.values import ValueLane
from onnxgrail.calibration.runtime.session import Session
from onnxgrail.core import Array, Probe
from onnxgrail.errors import ModelError
from tests.unit.ways import Values


def full_for(monkeypatch: pytest.MonkeyPatch, graph: Callable[..., bytes], number: int) -> list[int]:
    """Let one run of a small graph find no room; return a list that counts them."""
    whole, calls = Kernels.session, [0]

    def opened(self: Kernels, make: Callable[..., bytes], *choices: Any) -> Session:
        calls[0] += make is graph
        if make is graph and calls[0] == number:
            raise ModelError("ONNX Runtime failed on the feed x[9, 4]: Failed to allocate memory for requested buffer")
        return whole(self, make, *choices)

    monkeypatch.setattr(Kernels, "session", opened)
    return calls


def summed(lane: ValueLane, batches: list[Array], probe: Probe) -> Any:
    total, part = lane.sums(probe), lane.sums(probe)
    for x in batches:
        part.add(Values().there(x), probe)
        total.take(part)
    return total.drain()


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize(
    ("graph", "alone"),
    [(kernels.moments, False), (kernels.moments, True), (kernels.widening, False)],
    ids=["products", "squares", "merging"],
)
def test_sums_go_on_on_the_host(
    graph: Callable[..., bytes], alone: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Probe(value="x", axis=1, index=np.arange(4)[:, None], pooled=False, alone=alone)
    batches = [np.random.default_rng(seed).standard_normal((9, 4)).astype(np.float32) for seed in range(4)]
    whole = summed(ValueLane(), batches, probe)
    calls = full_for(monkeypatch, graph, number)
    parts = summed(ValueLane(), batches, probe)
    assert calls[0] >= number
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-5)


def test_activations_are_kept_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, x = ValueLane(), np.arange(12, dtype=np.float32).reshape(3, 4)
    there, stays = Values().there(x.copy()), np.array([True, False, True, True])
    for graph in (kernels.copying, kernels.picking, kernels.joining):
        full_for(monkeypatch, graph, 1)
    kept, some, both = lane.kept(there, 1000), lane.compress(stays, there, 1), lane.concatenate([there, there], 0)
    assert all(isinstance(array, np.ndarray) for array in (kept, some, both))
    np.testing.assert_array_equal(kept, x)
    np.testing.assert_array_equal(some, x[:, stays])
    np.testing.assert_array_equal(both, np.concatenate([x, x]))
    assert not isinstance(lane.kept(there, 1000), np.ndarray)
