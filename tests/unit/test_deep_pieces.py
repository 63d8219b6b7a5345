"""Long graphs: ONNX Runtime's plan of shared memory, which takes quadratic time, is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnxgrail
from onnxgrail.calibration.runtime import session
from onnxgrail.calibration.stream.relay import DEEP
from onnxgrail.graph.io.serial import to_bytes
from tests.tiny import tiny


def chain(length: int) -> bytes:
    """A layer, many activations one after the other, and the layer that reads them."""
    middle = "\n".join(f"c{k + 1} = Relu(c{k})" for k in range(length))
    body = f"c0 = MatMul(x, w)\n{middle}\ny = MatMul(c{length}, v)"
    return to_bytes(tiny("float[N,6] x => float[N,4] y", body, {"w": (6, 16), "v": (16, 4)}, recorded=False))


@pytest.mark.parametrize("length", [8, DEEP + 8])
def test_only_long_pieces_are_opened_without_the_plan(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[bool] = set()
    usual = session.open_session

    def noted(source: Any, setup: session.Setup = session.USUAL, **settings: Any) -> Any:
        if setup.optimise and not setup.once:
            seen.add(setup.deep)
        return usual(source, setup, **settings)

    monkeypatch.setattr(session, "open_session", noted)
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    result = onnxgrail.compress(chain(length), data=x, unit_ratio=0.5)
    assert (True in seen) is (length > DEEP)
    assert result.report.data["blocks"][0]["kept"] == 8
