"""`--resume`: a killed run that goes on gives the bytes of one that was left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import onnxgrail
from bench.kill_and_resume import Command, Moment, killed, unkilled
from onnxgrail import models
from onnxgrail.algebra import decide
from onnxgrail.cli import main
from onnxgrail.narrowing import best, choosing, norms
from tests.pages import small
from tests.shorter import shorter

from . import nets


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


@pytest.fixture
def case(tmp_path: Path) -> tuple[Path, Path]:
    onnx.save(nets.mlp(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **nets.vectors())
    return tmp_path / "m.onnx", tmp_path / "d.npz"


def dying(after: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that can be called so many times."""
    left = iter(range(after))

    def call(*words: Any, **named: Any) -> Any:
        if next(left, None) is None:
            raise Killed
        return function(*words, **named)

    return call


CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "grail": {"compensate": "grail"},
    "open loop": {"closed_loop": False},
    "no compensation": {"compensate": "none"},
    "without data": {"compensate": "none", "selector": "l2"},
    "fold": {"reducer": "fold"},
    "random": {"selector": "random"},
    "norms": {"norms": "all"},
    "budget": {"ratio": None, "target_macs": "60%", "allocate": "flap"},
    "global": {"allocate": "global", "closed_loop": False},
}


@pytest.mark.parametrize("name", CHOICES)
def test_goes_on_behind_the_last_finished_block(
    name: str, case: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = case
    choices: dict[str, Any] = {"data": data, "round_to": 1, "ratio": 0.3, **CHOICES[name]}
    onnxgrail.compress(model, tmp_path / "whole.onnx", **choices)
    for after in (0, 1):
        kept, output = tmp_path / f"kept{after}", tmp_path / f"out{after}.onnx"
        with monkeypatch.context() as patch:
            patch.setattr(choosing.Run, "settle", dying(after, choosing.Run.settle))
            with pytest.raises(Killed):
                onnxgrail.compress(model, output, resume=kept, **choices)
        assert not output.exists()
        steps = len(list((kept / "steps").iterdir()))
        assert steps > after or name == "global"  # which settles blocks for a trial first
        onnxgrail.compress(model, output, resume=kept, **choices)
        assert output.read_bytes() == (tmp_path / "whole.onnx").read_bytes()
        assert len(list((kept / "steps").iterdir())) > steps


PLACES: dict[str, tuple[Any, str]] = {"fits": (best, "refit"), "norms": (norms, "_set")}


@pytest.mark.parametrize(
    ("name", "place", "choices"),
    [
        ("digits_resnet", "fits", {"samples": 96}),
        ("digits_resnet", "norms", {"samples": 96, "norms": "all"}),
        ("digits_vit", "fits", {"samples": 40}),  # few samples: every fold judges
        ("char_llama", "fits", {"samples": 12}),
    ],
)
def test_goes_on_behind_the_last_fitted_layer(
    name: str, place: str, choices: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, (module, function) = shorter(name, tmp_path), PLACES[place]
    words = {"data": source.calibration, "held_out": 0, "ratio": 0.3, "check": False, "allocate": "uniform", **choices}
    real, calls = getattr(module, function), list[int]()

    def counted(*args: Any, **named: Any) -> Any:
        calls.append(1)
        return real(*args, **named)

    monkeypatch.setattr(module, function, counted)
    onnxgrail.compress(source.model, tmp_path / "whole.onnx", **words)
    total = len(calls)
    after = total // 2
    assert after > 1
    with monkeypatch.context() as patch:
        patch.setattr(module, function, dying(after, real))
        with pytest.raises(Killed):
            onnxgrail.compress(source.model, tmp_path / "out.onnx", resume=tmp_path / "kept", **words)
    calls.clear()
    onnxgrail.compress(source.model, tmp_path / "out.onnx", resume=tmp_path / "kept", **words)
    assert len(calls) == total - after, "what is known is not fitted again"
    assert (tmp_path / "out.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()


def test_a_finished_run_decides_nothing_again(
    case: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = case
    words = {"data": data, "resume": tmp_path / "kept", "save_stats": tmp_path / "s.npz"}
    words |= {"ratio": 0.3, "round_to": 1, "norms": "all"}
    onnxgrail.compress(model, tmp_path / "out.onnx", **words)
    wanted = (tmp_path / "out.onnx").read_bytes()
    monkeypatch.setattr(decide, "reduce_and_compensate", dying(0, decide.reduce_and_compensate))
    for module, function in PLACES.values():
        monkeypatch.setattr(module, function, dying(0, getattr(module, function)))
    onnxgrail.compress(model, tmp_path / "out.onnx", **words)
    assert (tmp_path / "out.onnx").read_bytes() == wanted


def test_only_its_own_output_is_replaced(case: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = case
    (tmp_path / "other.onnx").write_bytes(b"mine")
    onnxgrail.compress(model, tmp_path / "out.onnx", data=data, resume=tmp_path / "kept", ratio=0.3)
    with pytest.raises(onnxgrail.OutputError, match="exists"):
        onnxgrail.compress(model, tmp_path / "other.onnx", data=data, resume=tmp_path / "kept", ratio=0.3)
    assert (tmp_path / "other.onnx").read_bytes() == b"mine"


@pytest.mark.parametrize("change", ["model", "data", "option"])
def test_anything_else_than_the_same_run_is_refused(change: str, case: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = case
    words = ["compress", str(model), "--ratio=0.3", "--data", str(data), "--resume", str(tmp_path / "kept"), "-q"]
    assert CliRunner().invoke(main, words).exit_code == 0
    if change == "model":
        onnx.save(nets.mlp(seed=1), model)
    elif change == "data":
        np.savez(data, **nets.vectors(seed=4))
    more = ["--seed", "1"] if change == "option" else []
    result = CliRunner().invoke(main, [*words, *more])
    assert result.exit_code == 2
    assert "belongs to another run" in result.stderr
    assert {"model": "model was", "data": "data was", "option": "seed was 0, now 1"}[change] in result.stderr


@pytest.mark.parametrize("change", ["held-out data", "labels", "code of metric"])
def test_what_judges_must_be_the_same(change: str, tmp_path: Path) -> None:
    given, other = nets.vectors(), nets.vectors(seed=1)

    def call(*, changed: str = "", resume: str | None = None) -> onnxgrail.Result:
        labels = np.full(len(given["x"]), int(changed == "labels"))
        times = 2.0 if changed == "code of metric" else 1.0
        return onnxgrail.compress(
            nets.mlp(),
            data={**given, "labels": labels},
            held_out=other if changed == "held-out data" else given,
            metric=lambda a, b, _: times * np.abs(a["y"] - b["y"]).mean(axis=1),
            resume=None if resume is None else tmp_path / resume,
            max_loss=0.2,
            minimize="params",
            effort="fast",
        )

    first = call(resume="kept").to_bytes()
    assert call(resume="kept").to_bytes() == first
    with pytest.raises(onnxgrail.UsageError, match=f"belongs to another run: .*{change} was"):
        call(changed=change, resume="kept")


def test_without_the_option_nothing_is_left(case: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = case
    onnxgrail.compress(model, tmp_path / "out.onnx", data=data, ratio=0.3)
    assert {p.name for p in tmp_path.iterdir()} == {"m.onnx", "d.npz", "out.onnx"}


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, str, float, int]:
    model = tmp_path_factory.mktemp("half") / "half.onnx"
    model.write_bytes(small("digits_resnet"))
    data = models.load("digits_resnet").calibration
    command = Command(model=model, data=data, options=("--samples", "24", "--no-check", "--ratio", "0.3"))
    return command, *unkilled(command)


@pytest.mark.parametrize("share", [0.3, 1.0, "time"])
def test_kill_minus_nine(share: Any, left_alone: tuple[Command, str, float, int], tmp_path: Path) -> None:
    command, wanted, seconds, steps = left_alone
    moment = Moment(seconds=0.8 * seconds) if share == "time" else Moment(steps=round(share * steps))
    assert killed(command, moment, tmp_path, wanted)["broken"] == []
