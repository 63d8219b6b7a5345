"""A model and the file with its weights are replaced together: one rename decides, and nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgrail
from onnxgrail.machine.files import placing
from tests.written import weights_of

from . import nets
from .decorated import values


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


def write(place: Path, ratio: float = 0.5, *, external: bool = True, name: str = "o.onnx", **more: Any) -> Path:
    words = {"data": nets.vectors(), "compensate": "none", "check": False, "force": True}
    words |= {"save_as_external_data": external, "unit_ratio": ratio}
    onnxgrail.compress(place / "m.onnx", place / name, **words, **more)
    return place / name


@pytest.fixture
def place(tmp_path: Path) -> Path:
    onnx.save(nets.mlp((12, 64, 48, 80, 10)), tmp_path / "m.onnx")
    return tmp_path


def files(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def dying(after: int) -> Callable[..., Any]:
    """`Path.replace` for a process that is killed before one of its calls."""
    real, left = Path.replace, iter(range(after))

    def replace(self: Path, target: Path) -> Path:
        if next(left, None) is None:
            raise Killed
        return real(self, target)

    return replace


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_that_is_killed_leaves_the_old_pair(
    after: int, resumed: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = values(onnx.load(write(place)))
    # The same shapes with other numbers: a mixture would load.
    more: dict[str, Any] = {"selector": "random", "seed": 3}
    with monkeypatch.context() as patch:
        patch.setattr(placing.Path, "replace", dying(after))
        with pytest.raises(Killed):
            write(place, **more)
    assert values(onnx.load(place / "o.onnx")) == old
    new = values(onnx.load(write(place, name="other.onnx", **more)))
    assert new != old
    assert values(onnx.load(write(place, **more, **({"resume": place / "kept"} if resumed else {})))) == new
    other = weights_of(place / "other.onnx").name
    expected = {"m.onnx", "o.onnx", weights_of(place / "o.onnx").name, "other.onnx", other}
    assert files(place) == expected | ({"kept"} if resumed else set())


def test_old_weights_go_with_the_model_that_named_them(place: Path) -> None:
    (place / "o.onnx.data").write_bytes(b"somebody's weights")
    first = weights_of(write(place))
    second = weights_of(write(place, 0.25))
    assert first.name != second.name
    assert files(place) == {"m.onnx", "o.onnx", second.name, "o.onnx.data"}
    write(place, external=False)
    assert files(place) == {"m.onnx", "o.onnx", "o.onnx.data"}
    assert (place / "o.onnx.data").read_bytes() == b"somebody's weights"


def test_the_same_weights_once_more(place: Path) -> None:
    target = write(place)
    before = weights_of(target).stat()
    write(place)
    assert weights_of(target).stat().st_ino == before.st_ino, "what is there already is left as it is"


@pytest.mark.parametrize("kind", ["copy", "link", "model above"])
def test_weights_that_others_name_stay(kind: str, place: Path) -> None:
    below = place / "below"
    below.mkdir()
    target = write(place, name="below/o.onnx", report=below / "r.json")
    kept = weights_of(target)
    if kind == "copy":
        (below / "o.bak").write_bytes(target.read_bytes())
    elif kind == "link":
        (below / "latest").symlink_to(kept.name)
    else:
        model = onnx.load(target, load_external_data=False)
        for entry in (e for t in model.graph.initializer for e in t.external_data if e.key == "location"):
            entry.value = f"below/{kept.name}"
        onnx.save(model, place / "above.onnx")
    write(place, 0.25, name="below/o.onnx")
    assert kept.exists()
    for path in [*below.glob("o.bak"), *below.glob("latest"), *place.glob("above.onnx")]:
        path.unlink()
    write(place, 0.3, name="below/o.onnx")
    assert not kept.exists()
    assert len(list(below.glob("*.data"))) == 1


def test_a_file_under_this_name_with_other_content_is_not_taken_for_the_weights(place: Path) -> None:
    target = write(place)
    wanted, taken = values(onnx.load(target)), weights_of(target)
    taken.write_bytes(b"damaged")
    target.rename(place / "other.onnx")  # which names it
    assert values(onnx.load(write(place))) == wanted
    assert taken.read_bytes() == b"damaged"


def test_files_are_on_the_disk_before_they_are_renamed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        calls.append(f"replace {self.name}")
        return real(self, target)

    monkeypatch.setattr(placing.Path, "replace", replace)
    monkeypatch.setattr(placing, "sync", lambda path: calls.append(f"sync {path.name}"))
    weights = weights_of(write(place))
    wanted = ["sync weights", "replace weights", f"sync {weights.name}", f"sync {place.name}"]
    assert calls == [*wanted, "sync model", "replace model", f"sync {place.name}"]


def test_a_disk_that_fails_is_an_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    write(place)
    before = (place / "o.onnx").read_bytes()
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(onnxgrail.OutputError, match="Input/output error"):
        write(place, 0.25)
    assert (place / "o.onnx").read_bytes() == before
    np.testing.assert_equal(len(list(place.glob("*.data"))), 1)
