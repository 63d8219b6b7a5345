"""Several processes on one job: the bytes of a single one, and a clear end when one is lost."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxgrail
from bench.kill_and_resume import finished
from onnxgrail import models
from onnxgrail.machine.group.torchrun import join
from tests.command import sized

from . import nets

torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is an extra")
LIMIT = 120.0
CHOICES = {
    "default": (),
    "grail": ("--compensate", "grail"),
    "closed loop": ("--compensate", "grail", "--closed-loop"),
    "no compensation": ("--compensate", "none"),
    "fold": ("--reducer", "fold"),
    "norms": ("--norms", "all"),
    "global": ("--allocate", "global"),
    "search": ("--max-loss", "20%", "--minimize", "params"),
    "few bits": ("--quantize", "int4"),
    "statistics": ("--save-stats", "s.npz"),
}


@pytest.fixture
def case(tmp_path: Path) -> Path:
    onnx.save(nets.mlp(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **nets.vectors(300))
    return tmp_path


def started(folder: Path, words: list[str], size: int, **environment: str) -> list[subprocess.Popen[str]]:
    """Processes as torchrun starts them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"OMP_NUM_THREADS": "1", **os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    return [
        subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env={**common, "MASTER_PORT": port, "RANK": str(rank), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def together(folder: Path, *options: str, size: int = 2, **environment: str) -> list[subprocess.Popen[str]]:
    """One compression in several processes."""
    words = ["-m", "onnxgrail", "compress", "m.onnx", "two.onnx", "--data", "d.npz", "--round-to", "1"]
    words += sized(options)
    return started(folder, words, size, **environment)


def workers(process: subprocess.Popen[str]) -> list[int]:
    """The program works in a child process on Linux."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(word) for word in children.read_text().split()] if children.exists() else [process.pid]


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each."""
    try:
        return [(p.returncode, *found) for p in processes for found in [p.communicate(timeout=LIMIT)]]
    finally:
        for process in processes:
            process.kill()


def alone(folder: Path, *options: str) -> bytes:
    """The bytes that one process writes."""
    words = ["m.onnx", "one.onnx", "--data", "d.npz", "--round-to", "1", "--quiet", *sized(options)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run(
        [sys.executable, "-m", "onnxgrail", "compress", *words], cwd=folder, env=environment, check=True, timeout=LIMIT
    )
    return (folder / "one.onnx").read_bytes()


@torch
@pytest.mark.parametrize("name", CHOICES)
def test_two_processes_write_the_bytes_of_one(name: str, case: Path) -> None:
    wanted = alone(case, *CHOICES[name])
    stats = (case / "s.npz").read_bytes() if name == "statistics" else b""
    (case / "s.npz").unlink(missing_ok=True)
    first, second = ends(together(case, "--json", *CHOICES[name]))
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert (case / "two.onnx").read_bytes() == wanted
    assert json.loads(first[1])["model"]["output"] == "two.onnx"
    assert second[1:] == ("", ""), "only the first process prints"
    if stats:
        with np.load(case / "s.npz") as file:
            assert file["gram0"].any()


@torch
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("digits_resnet", ("--norms", "all")),
        ("digits_vit", ("--samples", "41", "--batch-size", "3")),  # few samples; folds do not begin with batches
        ("char_llama", ("--samples", "64")),
    ],
)
def test_two_processes_fit_as_one_does(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    source = models.load(name)
    shutil.copy(source.model, tmp_path / "m.onnx")
    shutil.copy(source.calibration, tmp_path / "d.npz")
    wanted = alone(tmp_path, "--no-check", *options)
    found = ends(together(tmp_path, "--no-check", "--json", *options))
    assert [code for code, *_ in found] == [0, 0], found
    assert (tmp_path / "two.onnx").read_bytes() == wanted
    assert any(row["blend"] for row in json.loads(found[0][1])["refits"])


@torch
@pytest.mark.parametrize(
    "options",
    [
        ("--method", "grasp", "--grasp-layers", "1", "--grasp-whiten", "--grasp-refit"),
        ("--method", "grail,grasp", "--unit-ratio", "0.3", "--compensate", "grail", "--grasp-layers", "1"),
        ("--unit-ratio", "0.3", "--compensate", "none", "--refine", "norms"),
    ],
    ids=["grasp", "both", "refine"],
)
def test_what_the_first_process_does_alone_has_the_bytes_of_one(options: tuple[str, ...], tmp_path: Path) -> None:
    source = models.load("digits_vit")
    shutil.copy(source.model, tmp_path / "m.onnx")
    with np.load(source.calibration) as file:
        (tmp_path / "d").mkdir()
        for name in file.files:  # mapped: each process reads its own batches, the first one later all of them
            np.save(tmp_path / "d" / f"{name}.npy", file[name][:64])
    options = ("--data", "d", "--no-check", *options)
    wanted = alone(tmp_path, *options)
    found = ends(together(tmp_path, "--json", *options))
    assert [code for code, *_ in found] == [0, 0], found
    assert (tmp_path / "two.onnx").read_bytes() == wanted
    report = json.loads(found[0][1])
    assert report["methods"].get("grasp", {"matrices": "refined"})["matrices"]
    assert bool(report["refines"]) == ("--refine" in options)


@torch
def test_wide_sums_in_float32_have_the_bytes_of_one(tmp_path: Path) -> None:
    """With a bound that small models reach: triangles of several panels, added and sent in float32."""
    source, script, written = models.load("digits_vit"), tmp_path / "wide.py", []
    script.write_text(
        "import sys, onnxgrail\n"
        "from onnxgrail.algebra.moments import triangles\n"
        "triangles.SQUARE = int(sys.argv[4])\n"
        "with onnxgrail.join() as group:\n"
        "    onnxgrail.compress(sys.argv[1], sys.argv[3], data=sys.argv[2], unit_ratio=0.3, samples=64, batch_size=4,\n"
        "        compensate='grail', selector='wanda', check=False, group=group)\n"
    )
    for size, square in ((1, 16), (2, 16), (1, 1024)):
        output = tmp_path / f"{size} {square}.onnx"
        found = ends(
            started(tmp_path, [str(script), str(source.model), str(source.calibration), str(output), str(square)], size)
        )
        assert {code for code, *_ in found} == {0}, found
        written.append(output.read_bytes())
    assert written[0] == written[1]
    assert written[0] != written[2], "the bound was never reached"


@torch
def test_rows_are_drawn_and_packed_the_same_in_all_processes(tmp_path: Path) -> None:
    """With bounds that small models reach: fewer rows than there are, sums as triangles."""
    source, script = models.load("digits_resnet"), tmp_path / "small.py"
    script.write_text(
        "import sys, onnxgrail\n"
        "from onnxgrail.narrowing import two_networks as pair\n"
        "from onnxgrail.algebra.moments import triangles\n"
        "pair.ROWS, triangles.SQUARE = int(sys.argv[4]), 64\n"
        "with onnxgrail.join() as group:\n"
        "    onnxgrail.compress(sys.argv[1], sys.argv[3], data=sys.argv[2], unit_ratio=0.3, check=False, group=group)\n"
    )
    written = {}
    for size, bound in ((1, 256), (2, 256), (1, 1 << 20)):
        output = tmp_path / f"{size} {bound}.onnx"
        words = [str(script), str(source.model), str(source.calibration), str(output), str(bound)]
        found = ends(started(tmp_path, words, size))
        assert {code for code, *_ in found} == {0}, found
        written[size, bound] = output.read_bytes()
    assert written[1, 256] == written[2, 256]
    assert written[1, 256] != written[1, 1 << 20], "the bound was never reached"


@torch
@pytest.mark.parametrize("options", ["compensate='grail', closed_loop=True", "compensate='best'"])
def test_four_processes_solve_together(options: str, tmp_path: Path) -> None:
    """With bounds that small models reach: every fit is shared, and every product and factor is cut."""
    source, script, written = models.load("digits_resnet"), tmp_path / "joint.py", []
    script.write_text(
        "import sys, onnxgrail\n"
        "from onnxgrail.algebra.solve import linear, shared\n"
        "from onnxgrail.narrowing import order\n"
        "order.JOINT = shared.MUCH = shared.DEEP = linear.LARGE = 1\n"
        "linear.LEAST, linear.WHOLE, linear.BLOCK = 8, 16, 8\n"
        "with onnxgrail.join() as group:\n"
        "    onnxgrail.compress(sys.argv[1], sys.argv[3], data=sys.argv[2], unit_ratio=0.3, samples=64, batch_size=4,\n"
        f"        check=False, group=group, {options})\n"
        "    print(getattr(group, '_exchanges', 0))\n"
    )
    for size in (1, 4):
        output = tmp_path / f"{size}.onnx"
        found = ends(started(tmp_path, [str(script), str(source.model), str(source.calibration), str(output)], size))
        assert {code for code, *_ in found} == {0}, found
        assert {int(out) > 20 for _, out, _ in found} == {size > 1}
        written.append(output.read_bytes())
    assert written[0] == written[1]


@torch
def test_more_processes_than_batches(case: Path) -> None:
    wanted = alone(case, "--samples", "16")
    assert [code for code, *_ in ends(together(case, "--samples", "16", "--quiet", size=3))] == [0, 0, 0]
    assert (case / "two.onnx").read_bytes() == wanted


@torch
def test_every_process_ends_with_the_same_model(case: Path) -> None:
    script = case / "each.py"
    script.write_text(
        "import hashlib, onnxgrail, onnx_ir\n"
        "with onnxgrail.join() as group:\n"
        "    result = onnxgrail.compress('m.onnx', data='d.npz', ratio=0.3, output='two.onnx', group=group)\n"
        "    model = onnx_ir.to_proto(result.model).SerializeToString(deterministic=True)\n"
        "    print(group.rank, group.size, hashlib.sha256(model).hexdigest())\n"
    )
    lines = [out.split() for _, out, _ in ends(started(case, [str(script)], 2))]
    assert [line[:2] for line in lines] == [["0", "2"], ["1", "2"]]
    assert lines[0][2] == lines[1][2]


@torch
@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_process_is_named_and_the_job_can_go_on(lost: int, case: Path) -> None:
    wanted = alone(case)
    processes = together(case, "--resume", "kept", "--quiet")
    end = time.monotonic() + LIMIT
    while finished(case) < 1 and time.monotonic() < end and processes[0].poll() is None:
        time.sleep(0.001)
    processes[lost].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    found = ends(processes)
    assert time.monotonic() - killed < 20
    assert found[lost][0] == -signal.SIGKILL
    if found[1 - lost][0] == 0:
        pytest.skip("the other process had finished before the kill")
    assert found[1 - lost][0] == 1
    assert f"process {lost} of 2 was lost" in found[1 - lost][2]
    assert "--resume" in found[1 - lost][2]
    assert not (case / "two.onnx").exists()
    again = ends(together(case, "--resume", "kept", "--quiet"))
    assert [code for code, *_ in again] == [0, 0], again
    assert (case / "two.onnx").read_bytes() == wanted


@torch
def test_a_process_that_hangs_is_given_up(case: Path) -> None:
    processes = together(case, "--quiet", ONNXGRAIL_TIMEOUT="4")
    time.sleep(1.0)
    for worker in workers(processes[1]):
        os.kill(worker, signal.SIGSTOP)
    found = processes[0].communicate(timeout=60)
    processes[1].kill()
    processes[1].communicate()
    assert processes[0].returncode == 1
    assert "process 1 of 2" in found[1] or "cannot reach the others" in found[1]


@torch
def test_what_one_process_finds_ends_all(case: Path) -> None:
    """NaN in the last batch, which only the second process reads."""
    data = nets.vectors(300)
    data["x"][-1, 0] = np.nan
    np.savez(case / "d.npz", **data)
    first, second = ends(together(case))
    assert (first[0], second[0]) == (1, 1)
    assert "NaN" in second[2]
    assert "process 1 of 2 failed: d.npz" in first[2]
    assert "NaN" in first[2]
    assert not (case / "two.onnx").exists()


def test_without_torch_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(onnxgrail.MissingExtraError, match=r"pip install 'onnxgrail\[torch\]'"), join():
        pass


def test_a_single_process_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with join() as group:
        assert (group.rank, group.size) == (0, 1)


def test_an_incomplete_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(onnxgrail.UsageError, match="torchrun"), join():
        pass
