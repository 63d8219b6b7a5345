"""The work of a job dealt out to processes: any number of them writes the bytes of one.

Processes are threads here, so that many cases take little time; `test_processes.py` starts real ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgrail
from onnxgrail import models
from onnxgrail.algebra.solve import shared
from onnxgrail.machine.group.sums import SOLO, Group
from onnxgrail.narrowing import grail, order
from tests.unit.members import played

from . import nets

CHOICES: dict[str, dict[str, Any]] = {
    "open loop": {"compensate": "grail"},
    "closed loop": {"compensate": "grail", "closed_loop": True},
    "best": {"compensate": "best"},
    "obs": {"compensate": "grail", "selector": "obs"},
    "l2": {"compensate": "grail", "selector": "l2"},
    "fold": {"reducer": "fold", "compensate": "grail"},
    "few bits": {"compensate": "best", "quantize": "int4"},
    "search": {"max_loss": 0.2, "minimize": "params", "unit_ratio": None},
    "statistics": {"compensate": "grail", "save_stats": "s.npz"},
}


def small(monkeypatch: pytest.MonkeyPatch, *, joint: bool) -> None:
    """Bounds that small models reach: blocks in steps of their own, and solves that several processes share."""
    monkeypatch.setattr(grail, "TOGETHER", 1)
    monkeypatch.setattr(order, "JOINT", 1 if joint else 2**62)
    monkeypatch.setattr(shared, "MUCH", 1)
    monkeypatch.setattr(shared, "DEEP", 1)


def written(folder: Path, size: int, model: Path, data: Any, **choices: Any) -> bytes:
    """The bytes that so many processes write."""
    output = folder / f"{size}.onnx"
    common: dict[str, Any] = {"unit_ratio": 0.3, "check": False, "force": True, "round_to": 1, **choices}
    common = {name: value for name, value in common.items() if value is not None}
    if "save_stats" in common:
        common["save_stats"] = folder / f"{size} {common['save_stats']}"

    def work(group: Group) -> None:
        onnxgrail.compress(model, output, data=data, group=group, **common)

    if size == 1:
        work(SOLO)
    else:
        played(size, work)
    return output.read_bytes()


@pytest.fixture
def case(tmp_path: Path) -> tuple[Path, Any]:
    onnx.save(nets.mlp(), tmp_path / "m.onnx")
    return tmp_path / "m.onnx", nets.vectors(300)


@pytest.mark.parametrize("joint", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize("name", CHOICES)
def test_any_number_of_processes_writes_the_bytes_of_one(
    name: str, joint: bool, case: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch, joint=joint)
    wanted = written(tmp_path, 1, *case, **CHOICES[name])
    for size in (2, 3, 4):
        assert written(tmp_path, size, *case, **CHOICES[name]) == wanted, size


@pytest.mark.parametrize("model", ["digits_vit", "digits_resnet"])
@pytest.mark.parametrize("mode", ["open loop", "closed loop", "best"])
def test_networks_that_share_weights_between_blocks(
    model: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams, heads and convolutions: a weight that one block changes is read by the next."""
    small(monkeypatch, joint=True)
    source = models.load(model)
    with np.load(source.calibration) as file:
        data = {name: file[name][:64] for name in file.files}
    wanted = written(tmp_path, 1, source.model, data, batch_size=4, **CHOICES[mode])
    for size in (2, 5):
        assert written(tmp_path, size, source.model, data, batch_size=4, **CHOICES[mode]) == wanted, size
