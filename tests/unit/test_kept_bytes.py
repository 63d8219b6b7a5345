"""Times that are kept decide alike: a run that measures, in which noise decides, and later runs give the same bytes."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.calibration.runtime import latency, profile
from onnxgrail.calibration.runtime.profile import Kernel, Profile
from tests.tiny import cnn, tiny


def noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which each node has another pace in every run; convolutions take most of the time."""
    real, rng = profile._profiled, np.random.default_rng(0)

    def times(*given: Any) -> tuple[Profile, ...]:
        pace: defaultdict[str, float] = defaultdict(lambda: 10 ** rng.uniform(-4, -2))

        def timed(kernel: Kernel) -> Kernel:
            ms = math.prod(kernel.gave) * pace[kernel.name] * (1.0 if "Conv" in kernel.op else 0.01)
            return dataclasses.replace(kernel, ms=ms)

        def whole(one: Profile) -> Profile:
            kernels = tuple(map(timed, one.kernels))
            return Profile(kernels=kernels, ms=sum(kernel.ms for kernel in kernels))

        return tuple(map(whole, real(*given)))

    monkeypatch.setattr(profile, "_profiled", times)

    def turns(sources: Iterable[Any], *_: Any, **__: Any) -> Any:
        models = len(list(sources))
        return (1 + rng.random((models, 9))) / np.arange(1, 1 + models)[:, None] ** 2

    monkeypatch.setattr(latency, "_turns", turns)


def chain() -> ir.Model:
    steps = [
        f"c{n} = Conv<pads = [1, 1, 1, 1]>({f'r{n - 1}' if n else 'x'}, w{n})\nr{n} = Relu(c{n})" for n in range(4)
    ]
    weights = {f"w{n}": (16, 16 if n else 3, 3, 3) for n in range(4)} | {"v": (4, 16, 1, 1)}
    return tiny("float[N,3,6,6] x => float[N,4,6,6] y", "\n".join([*steps, "y = Conv(r3, v)"]), weights)


@pytest.mark.parametrize(
    ("net", "more"),
    [(chain, {"quantize": "int8", "ratio": 0.0}), (lambda: cnn((32, 24)), {"max_loss": 0.3, "held_out": 0})],
    ids=["int8", "latency"],
)
def test_a_second_run_gives_the_same_bytes(
    net: Callable[[], ir.Model], more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy(monkeypatch)
    data = {"x": np.random.default_rng(0).normal(size=(48, 3, 6, 6)).astype(np.float32)}
    source = ir.to_proto(net())

    def run(**place: Any) -> bytes:
        onnxgrail.compress(source, tmp_path / "out.onnx", data=data, compensate="none", force=True, **more, **place)
        return (tmp_path / "out.onnx").read_bytes()

    monkeypatch.setenv("ONNXGRAIL_CACHE", "")
    assert len({run() for _ in range(4)}) > 1  # without, noise decides
    assert len({run(resume=tmp_path / "steps") for _ in range(3)}) == 1
    monkeypatch.setenv("ONNXGRAIL_CACHE", str(tmp_path / "cache"))
    assert len({run() for _ in range(3)}) == 1
    dry = onnxgrail.compress(source, data=data, compensate="none", dry_run=True, **more)
    assert dry.report.data["model"]["bytes_after"] == len(run())
