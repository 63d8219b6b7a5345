"""The program `onnxgrail` works in a child process: what ends that is told in one line, and signals reach it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only there a child ends with its parent")

START = "import mmap, os, signal, sys, time\nfrom onnxgrail import supervisor\nsupervisor.split()\n"
CUT = """
with open("cut", "wb+") as file:
    file.write(bytes(10000))
    file.flush()
    window = mmap.mmap(file.fileno(), 10000)
    file.truncate(100)
    window[9000]
"""
PAUSE = """
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
time.sleep(60)
"""


def ended(code: str, place: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", START + code]
    return subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=60, check=False)


def test_a_file_that_is_cut_short_while_it_is_mapped(tmp_path: Path) -> None:
    done = ended(CUT, tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("Error: a file was cut short, or could not be read, while it was in use (SIGBUS).")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_what_else_ends_native_code(name: str, tmp_path: Path) -> None:
    done = ended(f"os.kill(os.getpid(), signal.{name})", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("Error: ")
    assert name in done.stderr
    nowhere = ended(f"os.close(2); os.kill(os.getpid(), signal.{name})", tmp_path)
    assert nowhere.returncode == 1


@pytest.mark.parametrize("code", [0, 3])
def test_exit_codes_are_handed_on(code: int, tmp_path: Path) -> None:
    done = ended(f"print('said'); sys.exit({code})", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "said\n", "")


@pytest.mark.parametrize(
    ("number", "group", "code"),
    [
        (signal.SIGINT, False, 7),
        (signal.SIGINT, True, 7),
        (signal.SIGTERM, False, -signal.SIGTERM),
        (signal.SIGKILL, False, -signal.SIGKILL),
    ],
)
def test_signals_reach_the_child(number: int, group: bool, code: int) -> None:
    words = [sys.executable, "-c", START + PAUSE]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert child != process.pid
        (os.killpg if group else os.kill)(process.pid, number)
        assert process.wait(timeout=30) == code
        assert process.stdout.read() == "", "it is open as long as the child lives"
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
