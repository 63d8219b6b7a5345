"""Words on the samples that judge the loss of a search."""

from __future__ import annotations

from typing import Any

import pytest

from onnxgrail.report.summary import loss_of, search_text

LOSS: dict[str, Any] = {"name": "NMSE", "output": "y", "mean": 0.01, "bound": 0.02, "samples": 40}


@pytest.mark.parametrize(
    ("kind", "kept", "told"),
    [
        (None, 8, "each judged by a fit without it"),
        ("fp16", 8, "that no fit has seen"),
        ("fp16", 4, "that fits have seen"),
        ("int8", 8, "that fits have seen"),
    ],
)
def test_only_fits_see_samples(kind: str | None, kept: int, told: str) -> None:
    search = {"chosen": 0, "tried": [{"loss": LOSS}], "crossed": True, "limit": 0.05}
    last = None if kind is None else {"kind": kind, "loss": {**LOSS, "bound": 0.03}}
    data = {"allocation": {"search": search}, "quantization": last, "blocks": [{"kept": kept, "units": 8}]}
    assert f"on 40 samples {told};" in search_text(data)


@pytest.mark.parametrize(("crossed", "bound"), [(False, 0.01), (True, 0.02)])
def test_held_out_samples_tell_the_loss_of_the_written_file(bound: float, *, crossed: bool) -> None:
    """Also where it is lower.  Where samples judge in turn, the fits of the file have seen them: it may be too low."""
    search = {"chosen": 0, "tried": [{"loss": LOSS}], "crossed": crossed, "limit": 0.05}
    data = {"allocation": {"search": search}, "quantization": {"kind": "int8", "loss": {**LOSS, "bound": 0.01}}}
    loss = loss_of(data)
    assert loss is not None
    assert loss["bound"] == bound
