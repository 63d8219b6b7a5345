"""Drafts of runs that were killed go with the next run; those of living runs and other files stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from onnxgrail.machine.files import drafts
from tests.command import run
from tests.e2e import nets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only there the name of the kernel is known")

KILLED = """
import os, signal
from pathlib import Path
from onnxgrail.machine.files import placing
from onnxgrail.graph.io import model_file as model_io
model_io.place = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
model_io.save(model_io.load("m.onnx"), Path("o.onnx"), apart=True)
"""
WAITS = """
import sys
from pathlib import Path
from onnxgrail.machine.files import drafts
with drafts.draft(Path(".")) as folder:
    print(folder.parent.name, flush=True)
    sys.stdin.read()
"""


def hidden(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.name.startswith("."))


def test_the_next_run_removes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(nets.mlp(), "m.onnx")
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in next(tmp_path.glob(".*")).iterdir()]
    told = run("compress", "m.onnx", "o.onnx", "--unit-ratio", 0.5, "--no-check")
    assert told.exit_code == 0, told.stderr
    assert hidden(tmp_path) == []


def test_drafts_of_living_runs_stay(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WAITS]
    with subprocess.Popen(words, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        drafts.clear(tmp_path)
        assert hidden(tmp_path) == [name]
        process.kill()
        process.wait()
        drafts.clear(tmp_path)
        assert hidden(tmp_path) == []


def test_whatever_else_lies_there_stays(tmp_path: Path) -> None:
    with drafts.draft(tmp_path) as folder:
        ours = folder.parent.name
    away = tmp_path / "away"
    away.mkdir()
    (away / "file").touch()
    other_kernel = ours.replace(drafts._kernel(), "0" * 8)
    for name in (".onnxgrail-notes", ".onnxgrail-abcd1234", other_kernel):
        (tmp_path / name).mkdir()
    (tmp_path / f"{ours[:-8]}a_symlnk").symlink_to(away)
    (tmp_path / f"{ours[:-8]}one_file").touch()
    before = hidden(tmp_path)
    assert len(before) == 5
    drafts.clear(tmp_path)
    assert hidden(tmp_path) == before
    assert (away / "file").exists()


def test_a_draft_that_was_cleared_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, calls = drafts.locked, list[Path]()

    def late(folder: Path, *, wait: bool) -> int | None:
        if not calls:
            calls.append(folder)
            folder.rmdir()
        return locked(folder, wait=wait)

    monkeypatch.setattr(drafts, "locked", late)
    with drafts.draft(tmp_path) as folder:
        assert folder.is_dir()
        assert folder.parent != calls[0]
    assert hidden(tmp_path) == []


def test_a_draft_without_a_lock_is_nobodys_to_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", lambda *_: os.open("", 0))
    with drafts.draft(tmp_path) as folder:
        monkeypatch.undo()
        drafts.clear(tmp_path)
        assert folder.is_dir()
    assert hidden(tmp_path) == []
