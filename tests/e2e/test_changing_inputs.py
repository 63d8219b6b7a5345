"""Inputs that somebody writes to while they are used: one line that says so, and no output."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgrail
from onnxgrail.calibration.feeds.kinds import arrays
from onnxgrail.commands import compare, compress
from onnxgrail.errors import DataError, ModelError
from onnxgrail.finishing import finish
from onnxgrail.graph.io import inside, mapped, model_file

from . import nets

WORDS: dict[str, Any] = {"ratio": 0.3, "compensate": "none", "check": False}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with all its weights in one file, and the same with them inside, which counts as large."""
    monkeypatch.setattr(inside, "MODEL", 0)
    monkeypatch.setattr(inside, "LARGE", 0)
    onnx.save(nets.mlp((12, 64, 48, 10)), tmp_path / "inline.onnx")
    model = nets.mlp((12, 64, 48, 10))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    return tmp_path


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def replaced(path: Path) -> None:
    path.with_name("new").write_bytes(path.read_bytes())
    path.with_name("new").replace(path)


def before(function: Callable[..., Any], change: Callable[[], None]) -> Callable[..., Any]:
    """A function that is called when something has happened."""

    def call(*words: Any, **named: Any) -> Any:
        change()
        return function(*words, **named)

    return call


STAGES = [
    (compress, "decided"),
    (finish, "narrowed"),
    (model_file, "save"),
    (model_file, "write_inline"),
    (model_file, "check_unchanged"),
]


@pytest.mark.parametrize(
    ("module", "name", "change", "file"),
    [
        *((*stage, cut, "w.bin") for stage in STAGES),
        *((*STAGES[0], change, "w.bin") for change in (touched, replaced)),
        *((*stage, replaced, "inline.onnx") for stage in (STAGES[0], STAGES[3])),
        (*STAGES[1], cut, "inline.onnx"),
    ],
)
def test_a_model_that_changes(
    module: Any, name: str, change: Callable[[Path], None], file: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = place / ("m.onnx" if file == "w.bin" else file)
    files = {path.name for path in place.iterdir()}
    monkeypatch.setattr(module, name, before(getattr(module, name), lambda: change(place / file)))
    with pytest.raises(ModelError, match=f"{file}' changed while it was used"):
        onnxgrail.compress(model, place / "o.onnx", data=nets.vectors(), **WORDS)
    assert {path.name for path in place.iterdir()} == files


@pytest.mark.parametrize("external", [False, True])
def test_a_dry_run_and_separate_weights(external: bool, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "narrowed", before(finish.narrowed, lambda: touched(place / "w.bin")))
    words = {**WORDS, "dry_run": not external, "save_as_external_data": external}
    with pytest.raises(ModelError, match=r"w.bin' changed while it was used \(it was written again\)"):
        onnxgrail.compress(place / "m.onnx", data=nets.vectors(), **words)
    assert not (place / "m.compressed.onnx").exists()


def test_fewer_bytes_than_the_shape_needs_are_noticed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped.Mapped, "tofile", lambda self, file: file.write(b"too few"))
    with pytest.raises(ModelError, match="7 bytes were written where its shape needs"):
        onnxgrail.compress(place / "m.onnx", place / "o.onnx", **{**WORDS, "ratio": 0})
    assert not (place / "o.onnx").exists()


def test_compare_notices_it_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "run_both", before(compare.run_both, lambda: touched(place / "w.bin")))
    with pytest.raises(ModelError, match=r"w\.bin' changed while it was used"):
        onnxgrail.compare(place / "inline.onnx", place / "m.onnx", data=nets.vectors())


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_data_that_change(suffix: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "LARGE", 0)
    data = place / f"d{suffix}"
    if suffix == ".npy":
        np.save(data, nets.vectors()["x"])
    else:
        np.savez(data, **nets.vectors())
    monkeypatch.setattr(compress, "decided", before(compress.decided, lambda: cut(data)))
    with pytest.raises(DataError, match=f"d{suffix}' changed while it was used"):
        onnxgrail.compress(place / "inline.onnx", place / "o.onnx", data=data, check=False, ratio=0.3)
    assert not (place / "o.onnx").exists()


def test_a_result_outlives_its_input(place: Path) -> None:
    result = onnxgrail.compress(place / "inline.onnx", data=nets.vectors(), dry_run=True, **WORDS)
    wanted = result.to_bytes()
    (place / "inline.onnx").write_bytes(b"something new") if os.name == "nt" else replaced(place / "inline.onnx")
    assert result.to_bytes() == wanted
    again = onnxgrail.compress(result.model, data=nets.vectors(), **WORDS)
    assert len(again.to_bytes()) < len(wanted)
