"""Kernels compute channels in blocks of 8 or 16, as the machine has it: widths are measured by that, or it is said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail import models
from onnxgrail.allocation import choose
from onnxgrail.calibration.runtime.blocking import channel_block
from onnxgrail.report import notes
from tests.tiny import tiny

DIGITS, VIT = models.load("digits_resnet"), models.load("digits_vit")
QUICK: dict[str, Any] = {"compensate": "none", "check": False, "dry_run": True, "samples": 8}


def test_the_block_is_that_of_the_processor() -> None:
    assert channel_block() in (1, 4, 8, 16)
    file = Path("/proc/cpuinfo")
    flags = set(file.read_text().split()) if file.exists() else set()
    if "avx" in flags:
        assert channel_block() == (16 if "avx512f" in flags else 8)


def timed(block: int) -> Any:
    """A stopwatch under which a width costs as much as the next multiple of a block."""

    def stopwatch(*_: Any) -> Any:
        def watch(widths: Mapping[str, int]) -> tuple[float, float]:
            return 10.0, 10.0 * sum(-(-w // block) * block for w in widths.values()) / 480

        return watch

    return stopwatch


@pytest.mark.parametrize(("block", "multiple"), [(16, 16), (8, 8), (1, 8)])
def test_a_latency_is_met_with_the_multiple_that_leaves_more(
    block: int, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "channel_block", lambda: block)
    monkeypatch.setattr(notes, "channel_block", lambda: 3)  # what was measured is not doubted
    monkeypatch.setattr(choose, "stopwatch", timed(block))
    widths = (4, 160, 160, 160, 5)
    body = "\n".join(f"c{k} = Conv(r{k}, w{k})\nr{k + 1} = Relu(c{k})" for k in range(4))
    weights = {f"w{k}": (widths[k + 1], widths[k], 1, 1) for k in range(4)}
    model = tiny("float[N,4,3,3] r0 => float[N,5,3,3] y", f"{body}\ny = Neg(r4)", weights)
    data = {"r0": np.random.default_rng(0).random((8, 4, 3, 3), np.float32)}
    choices = {"target_latency": "72%", "quantize": "int8-weights", **QUICK}
    data = onnxgrail.compress(ir.to_proto(model), data=data, **choices).report.data
    kept = [row["kept"] for row in data["allocation"]["rounding"]]
    assert 330 <= sum(kept) <= 346
    assert all(width % multiple == 0 for width in kept)
    told = [note for note in data["notes"] if note.startswith("widths are multiples of")]
    assert [note.split(":")[0] for note in told] == (["widths are multiples of 16"] if block == 16 else [])
    assert not [note for note in data["notes"] if "may be as fast or faster" in note]
    assert [note for note in data["notes"] if "--target-latency is for the model before --quantize" in note]


def test_only_images_are_asked_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "channel_block", lambda: 1 / 0)
    monkeypatch.setattr(notes, "channel_block", lambda: 1 / 0)
    monkeypatch.setattr(choose, "stopwatch", timed(1))
    onnxgrail.compress(VIT.model, data=VIT.calibration, target_latency="70%", exclude="conv|stream", **QUICK)


@pytest.mark.parametrize("block", [1, 8, 16])
def test_widths_that_leave_a_block_half_empty_are_noted(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "channel_block", lambda: block)
    data = onnxgrail.compress(DIGITS.model, data=DIGITS.calibration, unit_ratio=0.25, **QUICK).report.data
    odd = sum(b["kept"] % block > 0 for b in data["blocks"])
    told = [note for note in data["notes"] if "narrowed blocks of convolutions are not multiples" in note]
    assert bool(told) == bool(odd)
    assert not told or f"{odd} of {len(data['blocks'])} narrowed blocks" in told[0]


def test_the_only_block_is_noted_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "channel_block", lambda: 16)
    choices = {"unit_ratio": 0.25, "include": "blocks.0.conv", **QUICK}
    data = onnxgrail.compress(DIGITS.model, data=DIGITS.calibration, **choices).report.data
    (note,) = (note for note in data["notes"] if "block of convolutions" in note)
    assert note.startswith("the narrowed block of convolutions is no multiple of 16 channels wide: ")


def test_a_constant_of_four_axes_makes_no_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "channel_block", lambda: 16)
    body = "h = MatMul(x, w1)\na = Add(h, b)\nr = Relu(a)\ny = MatMul(r, w2)"
    model = tiny("float[N,2,2,8] x => float[N,2,2,5] y", body, {"w1": (8, 16), "b": (1, 1, 1, 16), "w2": (16, 5)})
    data = {"x": np.random.default_rng(0).random((8, 2, 2, 8), np.float32)}
    found = onnxgrail.compress(ir.to_proto(model), data=data, unit_ratio=0.25, round_to=1, **QUICK).report.data
    assert [block["kept"] for block in found["blocks"]] == [12]
    assert not [note for note in found["notes"] if "convolutions" in note]
