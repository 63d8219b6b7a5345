"""Disks that are full, folders that are closed, strange names and links, company, and interrupts."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import onnxgrail
from onnxgrail.cli import main
from onnxgrail.errors import ModelError
from tests.command import in_a_process, said

from . import nets
from .test_bad_input import listing

linux = pytest.mark.skipif(sys.platform != "linux", reason="uses prctl and limits of Linux")
SMALL = 3000  # bytes that a file may have: less than a model, more than a step
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2  # capabilities by which root ignores permissions
BOUNDING_SET_DROP = 24  # of prctl


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return furnished(tmp_path / "work")


def furnished(place: Path) -> Path:
    place.mkdir()
    onnx.save(nets.mlp(), place / "m.onnx")
    onnx.save(nets.mlp(), place / "e.onnx", save_as_external_data=True, location="e.data", size_threshold=0)
    np.savez(place / "d.npz", **nets.vectors())
    return place


def command(folder: Path, *words: str, setup: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "onnxgrail", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=setup,
    )


def refused(found: int, stderr: str, text: str, code: int = 1) -> None:
    assert found == code, stderr
    lines = [line for line in said(stderr).splitlines() if line and not line.startswith(("Usage: ", "Try "))]
    assert len(lines) == 1, stderr
    assert lines[0].startswith("Error: ")
    assert text in lines[0]


# ------------------------------------------------------------------------------------------- no room and no permission


def full() -> None:
    """No file may grow, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, SMALL))


FULL: tuple[tuple[tuple[str, ...], str], ...] = (
    ((), "m.compressed.onnx"),
    (("--save-as-external-data",), "m.compressed.onnx"),
    (("--save-stats", "s.npz", "--dry-run"), "s.npz"),
    (("--report", "r.html", "--dry-run"), "r.html"),
    (("--resume", "kept"), "cannot write"),
)


@linux
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    places = [furnished(tmp_path / str(number)) for number in range(len(FULL))]
    before = listing(places[0])
    calls = [
        (place, ["compress", "m.onnx", "--unit-ratio=0.3", "--data", "d.npz", *words])
        for place, (words, _) in zip(places, FULL, strict=True)
    ]
    for place, (words, text), (code, stderr) in zip(places, FULL, in_a_process(calls, full), strict=True):
        refused(code, stderr, text)
        left = {name: content for name, content in listing(place).items() if not name.startswith("kept/")}
        assert left == before, words
        assert [path.name for path in place.glob(".*")] == []
    place, words = calls[-1]
    resumed = command(place, *words)
    assert resumed.returncode == 0, resumed.stderr


@linux
def test_a_full_folder_for_temporary_files_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = listing(folder)
    done = command(
        folder, "compress", "m.onnx", "--unit-ratio=0.3", "--data", "d.npz", "--quantize", "int8-dynamic", setup=full
    )
    text = "narrowed.onnx: File too large. Set TMPDIR to a folder with room for temporary files"
    refused(done.returncode, done.stderr, text)

    def spill(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("onnxgrail.finishing.ship.verified", spill)
    result = CliRunner().invoke(
        main, ["compress", str(folder / "m.onnx"), "--unit-ratio=0.3", "--data", str(folder / "d.npz")]
    )
    assert result.exit_code == 1
    told = "Error: No space left on device. Set TMPDIR to a folder with room for temporary files\n"
    assert said(result.stderr) == told
    assert listing(folder) == before


def ordinary() -> None:
    """Without what lets the superuser ignore permissions."""
    libc = ctypes.CDLL(None)
    for capability in (DAC_OVERRIDE, DAC_READ_SEARCH):
        libc.prctl(BOUNDING_SET_DROP, capability, 0, 0, 0)


CLOSED: tuple[tuple[str, int, tuple[str, ...], str, int], ...] = (
    (".", 0o555, ("m.onnx",), "cannot write to folder", 1),
    (".", 0o555, ("m.onnx", "--report", "r.json", "--dry-run"), "cannot write to folder", 1),
    ("m.onnx", 0o000, ("m.onnx",), "not readable", 2),
    ("d.npz", 0o000, ("m.onnx", "--data", "d.npz"), "d.npz", 1),
    ("e.data", 0o000, ("e.onnx",), "e.data cannot be read", 1),
)


@linux
def test_closed_doors(tmp_path: Path) -> None:
    places = [furnished(tmp_path / str(number)) for number in range(len(CLOSED))]
    before = listing(places[0])
    for place, (path, mode, *_) in zip(places, CLOSED, strict=True):
        (place / path).chmod(mode)
    try:
        calls = [
            (place, ["compress", "--unit-ratio=0.3", *words])
            for place, (_, _, words, *_) in zip(places, CLOSED, strict=True)
        ]
        found = in_a_process(calls, ordinary)
    finally:
        for place, (path, *_) in zip(places, CLOSED, strict=True):
            (place / path).chmod(0o755)
    for place, (*_, text, wanted), (code, stderr) in zip(places, CLOSED, found, strict=True):
        refused(code, stderr, text, wanted)
        assert listing(place) == before


@linux
def test_the_input_may_lie_in_a_closed_folder(folder: Path) -> None:
    (folder / "m.onnx").chmod(0o444)
    folder.chmod(0o555)
    out = folder.parent / "out.onnx"
    try:
        done = command(folder, "compress", "m.onnx", str(out), "--unit-ratio=0.3", "--data", "d.npz", setup=ordinary)
        seen = command(folder, "inspect", "e.onnx", setup=ordinary)
    finally:
        folder.chmod(0o755)
    assert (done.returncode, seen.returncode) == (0, 0), done.stderr + seen.stderr
    onnx.checker.check_model(out)


# ------------------------------------------------------------------------------------------- names, company, interrupts


def test_strange_names_of_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder / "模型 é 🙂 'q' %s [b]"
    place.mkdir()
    model = place / "название модели.onnx"
    onnx.save(nets.mlp(), model, save_as_external_data=True, location="веса ü.bin", size_threshold=0)
    (folder / "d.npz").rename(place / "данные.npz")
    monkeypatch.chdir(place)
    words = [
        "compress",
        model.name,
        "klein ß.onnx",
        "--unit-ratio=0.3",
        "--data",
        "данные.npz",
        "--save-as-external-data",
    ]
    result = CliRunner().invoke(main, [*words, "--report", "rapport é.html", "--report", "报告.json"])
    assert result.exit_code == 0, result.output
    for other in (["inspect", str(model)], ["compare", str(model), "klein ß.onnx", "--data", "данные.npz"]):
        assert CliRunner().invoke(main, other).exit_code == 0
    onnx.checker.check_model(place / "klein ß.onnx")
    assert sorted(p.suffix for p in place.iterdir()) == [".bin", ".data", ".html", ".json", ".npz", ".onnx", ".onnx"]


@pytest.mark.parametrize("same", [False, True], ids=["two outputs", "one output"])
def test_two_runs_at_once_on_one_input(same: bool, folder: Path) -> None:
    before = listing(folder)
    names = ["a.onnx", "a.onnx" if same else "b.onnx"]
    words = [sys.executable, "-m", "onnxgrail", "compress", "m.onnx", "--unit-ratio=0.3"]
    started = [
        subprocess.Popen([*words, name, "--data", "d.npz", "--force", "--quiet"], cwd=folder, stderr=subprocess.PIPE)
        for name in names
    ]
    for process in started:
        assert process.communicate(timeout=60)[1] == b""
        assert process.returncode == 0
    after = listing(folder)
    assert len({after.pop(name) for name in set(names)}) == 1
    assert after == before
    onnx.checker.check_model(folder / "a.onnx")


def test_an_interrupted_run_says_how_to_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = ["compress", "m.onnx", "--unit-ratio=0.3", "--data", "d.npz", "--resume", "kept dir", "-q"]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("onnxgrail.finishing.ship.verified", interrupted)
        result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    goes_on = "The same command continues from 'kept dir'"
    assert said(result.stderr) == f"Error: interrupted. {goes_on}\n"
    assert not list(folder.glob("*compressed*"))
    assert CliRunner().invoke(main, words).exit_code == 0
    onnx.checker.check_model(folder / "m.compressed.onnx")


def test_links_lead_nowhere_else(folder: Path) -> None:
    outside = folder.parent / "outside.data"
    (folder / "e.data").rename(outside)
    (folder / "e.data").symlink_to(outside)
    with pytest.raises(ModelError, match="a link that leads outside the model's folder"):
        onnxgrail.inspect(folder / "e.onnx")
    (folder / "e.onnx").rename(folder.parent / "real.onnx")
    (folder / "e.onnx").symlink_to(folder.parent / "real.onnx")  # both are links to one folder, as in a hub's cache
    onnxgrail.inspect(folder / "e.onnx")


@linux
def test_the_runtime_sends_nothing_home(tmp_path: Path) -> None:
    code = "from onnxgrail.calibration.runtime.session import runtime; import os; runtime(); print(os.environ['{}'])"
    done = subprocess.run(
        [sys.executable, "-c", code.format("ORT_DISABLE_TELEMETRY")],
        env={k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"} | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "1\n", done.stderr
    assert list(tmp_path.iterdir()) == []  # of releases that would send: the number of the session
