"""If temporary files cannot be written, one line names the folder and how to choose another one."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import onnxgrail
from onnxgrail.calibration.stream.cache import Cache
from onnxgrail.cli import main
from onnxgrail.errors import OutputError
from onnxgrail.graph.io.model_file import load, save
from onnxgrail.machine.files.temporary import scratch, temporary_folder
from tests.e2e import nets

HINT = "Set TMPDIR to a folder with room for temporary files"
COMMANDS = (
    ("compress", "m.onnx", "o.onnx", "--ratio=0.3"),
    ("inspect", "m.onnx"),
    ("compare", "m.onnx", "m.onnx"),
    ("bench", "m.onnx"),
    ("apply", "r.yaml", "m.onnx"),
    ("refine", "m.onnx", "o.onnx", "--reference", "m.onnx"),
    ("export", "a.py:model", "o.onnx"),
    ("demo",),
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(nets.mlp(), "m.onnx")
    Path("r.yaml").write_text("onnxgrail: 1\nratio: 0.5\n", encoding="utf-8")
    Path("a.py").touch()
    return tmp_path


def text(place: Path, why: str) -> str:
    return f"Error: cannot write temporary files to {str(place)!r}: {why}. {HINT}\n"


@pytest.mark.parametrize("words", COMMANDS, ids=[words[0] for words in COMMANDS])
def test_every_command_looks_before_its_work(
    words: tuple[str, ...], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(here.iterdir())
    for place, why in (("nowhere", "No such file or directory"), ("m.onnx", "Not a directory")):
        monkeypatch.setenv("TMPDIR", str(here / place))
        told = CliRunner().invoke(main, words, obj={"ready": temporary_folder})
        assert (told.exit_code, told.stderr) == (1, text(here / place, why))
    assert sorted(here.iterdir()) == before


def test_the_program_looks(here: Path) -> None:
    words = [sys.executable, "-m", "onnxgrail", "inspect", "m.onnx"]
    environment = os.environ | {"TMPDIR": str(here / "nowhere")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == text(here / "nowhere", "No such file or directory")


def test_models_are_moved_to_folders_for_temporary_files(here: Path) -> None:
    """Which are locked, as is a folder to which a model is moved."""
    model = load(here / "m.onnx")
    with scratch() as folder:
        save(model, folder / "m.onnx")
        assert (folder / "m.onnx").is_file()


LASTING = """
import os, signal, sys
from onnxgrail.machine.files.temporary import lasting
assert lasting() is lasting()
(lasting() / "weight").write_bytes(bytes(100))
os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there the name of the kernel is known")
def test_a_folder_that_lasts_as_long_as_the_process(tmp_path: Path) -> None:
    """A run removes those of earlier ones that were killed, and its own."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}

    def left(number: int) -> list[str]:
        words = [sys.executable, "-c", LASTING, str(number)]
        subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=False)
        return [path.name for path in tmp_path.iterdir()]

    (one,) = left(signal.SIGKILL)
    (other,) = left(signal.SIGKILL)
    assert one != other
    assert left(0) == []


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("function", ["tempfile.TemporaryFile", "tempfile.mkdtemp"])
def test_a_full_folder(function: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(here))
    monkeypatch.setattr(function, full)
    with pytest.raises(OutputError, match=r"cannot write temporary files to .*: No space left") as caught, scratch():
        pass
    assert caught.value.hint == HINT


def test_no_folder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)

    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    with pytest.raises(OutputError, match="No usable temporary directory found"), scratch():
        pass


def test_what_is_written_there_finds_no_room(here: Path) -> None:
    """An error with another cause is raised unchanged."""
    with pytest.raises(OutputError, match="cannot write temporary files to"), scratch() as folder:
        (folder / "none" / "file").touch()
    with pytest.raises(FileNotFoundError), scratch():
        (here / "none" / "file").touch()
    with pytest.raises(OutputError, match="cannot write temporary files to"), scratch():
        full()


def test_activations_find_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(OutputError, match="cannot write temporary files to"):
        Cache([])._stored("x", np.zeros(3))


@pytest.mark.parametrize("choice", [{"quantize": "fp16"}, {"quantize": "int8"}, {"simplify": True}], ids=str)
def test_steps_that_write_models_on_their_way(
    choice: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(here / "nowhere"))
    if "simplify" in choice:
        pytest.importorskip("onnxslim")
    with pytest.raises(OutputError, match="nowhere") as caught:
        onnxgrail.compress("m.onnx", "o.onnx", unit_ratio=0.5, **choice)
    assert caught.value.hint == HINT
    assert not Path("o.onnx").exists()
