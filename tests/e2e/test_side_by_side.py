"""Parts of the data that go through the network side by side: one that fails or an interrupt ends all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto

from onnxgrail.calibration.runtime import threads
from onnxgrail.calibration.stream import stream
from onnxgrail.cli import main
from tests.command import said

from . import nets
from .test_bad_input import listing

SAMPLES, BATCH = 256, 4  # 64 batches
WORDS = ("compress", "m.onnx", "--ratio=0.3", "--data", "d.npz", "--samples", str(SAMPLES), "--batch-size", str(BATCH))
WORK = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is born without it
from onnxgrail.calibration.stream import stream
share = stream.share

def slowly(shard, parts, step, work):
    print(f"{parts} parts", flush=True)
    return share(shard, parts, lambda place: (time.sleep(0.5), step(place))[1], work)

stream.share = slowly
from onnxgrail.__main__ import main
main()
"""


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return the number of parts that ran side by side, each time."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    threads.count.cache_clear()
    found, share = [], stream.share

    def noted(shard: Any, parts: int, *rest: Any) -> Any:
        found.append(parts)
        return share(shard, parts, *rest)

    monkeypatch.setattr(stream, "share", noted)
    yield found
    threads.count.cache_clear()


def overflowing() -> onnx.ModelProto:
    """A huge input gives numbers on the way that are not finite."""
    model = nets.mlp()
    model.graph.node.insert(0, nets.node("Mul", "x x", "square"))
    model.graph.node[1].input[0] = "square"
    return model


def looking_up() -> onnx.ModelProto:
    """The first number of an input is, rounded, a row of a table; a huge one is none of its rows."""
    model = nets.mlp()
    arrays = {"column": np.array([0]), "scale": np.float32(1e-6), "table": np.zeros((2, 12), np.float32)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items())
    found = [
        nets.node("Gather", "x column", "first", axis=1),
        nets.node("Squeeze", "first", "flat"),
        nets.node("Mul", "flat scale", "small"),
        nets.node("Cast", "small", "row", to=TensorProto.INT64),
        nets.node("Gather", "table row", "rows"),
        nets.node("Add", "x rows", "moved"),
    ]
    model.graph.node[0].input[0] = "moved"
    for number, node in enumerate(found):
        model.graph.node.insert(number, node)
    return model


@pytest.mark.parametrize("place", [70, 200], ids=["first part", "second part"])
@pytest.mark.parametrize(
    ("model", "huge", "text"),
    [
        (nets.mlp, np.nan, "d.npz, input 'x': 1 of 3072 values are NaN or infinite"),
        (overflowing, 1e30, "NaN or infinite"),
        (looking_up, 1e8, "ONNX Runtime failed on the feed"),
    ],
    ids=["data", "sums", "runtime"],
)
def test_one_sample_that_cannot_be_used(
    model: Any, huge: float, text: str, place: int, folder: Path, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    onnx.save(model(), "m.onnx")
    data = nets.vectors(SAMPLES)
    np.savez("d.npz", **data)
    assert CliRunner().invoke(main, [*WORDS, "--dry-run"]).exit_code == 0
    assert 2 in parts
    parts.clear()
    data["x"][place, 0] = huge
    np.savez("d.npz", **data)
    before, running = listing(folder), threading.active_count()
    result = CliRunner().invoke(main, list(WORDS))
    assert result.exit_code == 1
    assert said(result.stderr).startswith("Error: ")
    assert said(result.stderr).count("\n") == 1
    assert text in result.stderr
    assert parts[-1:] == ([2] if model is not nets.mlp else []), "it is found while parts go side by side"
    assert threading.active_count() == running
    assert listing(folder) == before


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("after", [0.0, 0.3])
def test_an_interrupt_ends_all_parts(after: float, folder: Path) -> None:
    np.savez(folder / "d.npz", **nets.vectors(4 * SAMPLES))
    before = listing(folder)
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    words = [sys.executable, "-c", WORK, *WORDS[:-4], "--samples", str(4 * SAMPLES), *WORDS[-2:]]
    with subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "2 parts\n"
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=40)  # all batches would take a minute
    assert process.returncode == 1
    assert stdout == ""
    assert said(stderr) == "Error: interrupted. With --resume DIR the same command would go on where it was\n"
    assert listing(folder) == before
