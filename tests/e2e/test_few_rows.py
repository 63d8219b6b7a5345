"""Layers of few calibration rows: the rows are kept, and give the weights that their products give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgrail
from onnxgrail.algebra.moments import few_rows
from onnxgrail.algebra.select.selectors import SELECTORS
from onnxgrail.algebra.select.selectors.auto import Auto
from onnxgrail.calibration.devices.lanes import HostLane
from onnxgrail.core import Probe

from . import nets


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Probe]:
    """The probes that are measured."""
    found: list[Probe] = []
    sums = HostLane.sums

    def noted(lane: HostLane, probe: Probe) -> Any:
        found.append(probe)
        return sums(lane, probe)

    monkeypatch.setattr(HostLane, "sums", noted)
    return found


def weights(folder: Path, count: int, **options: Any) -> list[np.ndarray]:
    """The weights of a narrowed network."""
    path = folder / "slim.onnx"
    onnxgrail.compress(
        nets.mlp(), path, data=nets.vectors(count), unit_ratio=0.3, check=False, force=True, ridge=1e-2, **options
    )
    return [onnx.numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer]


@pytest.mark.parametrize("loop", [True, False], ids=["closed", "open"])
def test_the_weights_are_the_same(
    loop: bool, asked: list[Probe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SELECTORS, "auto", Auto(small=16))
    want = weights(tmp_path, 12, compensate="grail", closed_loop=loop)
    assert not any(probe.few for probe in asked)
    asked.clear()
    monkeypatch.setattr(few_rows, "SIDE", 16)
    got = weights(tmp_path, 12, compensate="grail", closed_loop=loop)
    assert {probe.width for probe in asked if probe.few} == {32, 24, 40}
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * np.abs(other).max(initial=1e-9))


@pytest.mark.parametrize(
    "options",
    [
        {"compensate": "grail", "selector": "gram"},
        {"compensate": "grail", "reducer": "fold"},
        {"compensate": "none", "selector": "wanda"},
        {"compensate": "grail", "samples": 100},
    ],
)
def test_what_needs_products_gets_them(
    options: dict[str, Any], asked: list[Probe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "SIDE", 16)
    weights(tmp_path, options.pop("samples", 12), **options)
    assert not any(probe.few for probe in asked)
