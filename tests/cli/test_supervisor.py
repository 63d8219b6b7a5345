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

START = "import mmap, os, signal, sys, time\nfrom onnxgrail.machine import supervisor\nsupervisor.split()\n"
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


WRITES = """
from onnxgrail.machine.files.temporary import lasting
(lasting() / "weight").write_bytes(bytes(100))
"""


def ended(code: str, place: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", START + code]
    environment = os.environ | {"TMPDIR": str(place)}
    return subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, timeout=60, check=False)


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


@pytest.mark.parametrize("last", ["os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getppid(), signal.SIGTERM)", ""])
def test_temporary_files_go(last: str, tmp_path: Path) -> None:
    """The process that is told to end does not do so before it has removed those of the one that works."""
    done = ended(f"{WRITES}\n{last}\n{'time.sleep(60)' if last else ''}", tmp_path)
    assert (done.returncode != 0) == bool(last)
    assert not list(tmp_path.iterdir())


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


def test_a_signal_to_the_child_alone_is_told(tmp_path: Path) -> None:
    done = ended("os.kill(os.getpid(), signal.SIGTERM)", tmp_path)
    assert (done.returncode, done.stderr) == (
        -signal.SIGTERM,
        "Error: the program was ended by SIGTERM. Repeat the command\n",
    )


def test_the_first_process_of_a_container_does_the_work_once(tmp_path: Path) -> None:
    """There a signal of its own does not end a process; it must not go on as the child that it waited for."""
    code = f"{START}print('working', flush=True)\nos.kill(os.getpid(), signal.SIGTERM)"
    words = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code]
    try:
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `unshare` here")
    if "Operation not permitted" in done.stderr:
        pytest.skip("no namespaces may be made here")
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "working\n")


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_exit_code_stands_when_libraries_crash_at_the_end(code: int, tmp_path: Path) -> None:
    start = START.replace("supervisor.split()", "done = supervisor.split()")
    words = [sys.executable, "-c", f"{start}done({code})\nos.kill(os.getpid(), signal.SIGSEGV)"]
    found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stderr) == (code, "")


@pytest.mark.parametrize("broken", ["os.fork = lambda: os.open('', 0)", "sys.modules['ctypes'] = None"])
def test_without_a_child_the_program_works_alone(broken: str, tmp_path: Path) -> None:
    code = START.replace("supervisor.split()", f"before = os.getpid()\n{broken}\nsupervisor.split()(0)")
    words = [sys.executable, "-c", f"{code}print(os.getpid() == before)"]
    found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "True\n", "")


def test_the_process_that_tries_a_model_ends_with_the_one_that_asked(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.onnx")  # whoever opens it waits
    code = "from pathlib import Path\nfrom onnxgrail.calibration.runtime.trial import try_out\ntry_out(Path('m.onnx'))"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)}
    ) as asks:
        tries = children(asks.pid)
        while "child.py" not in Path(f"/proc/{tries}/cmdline").read_text(encoding="utf-8"):
            time.sleep(0.01)
        time.sleep(0.5)  # until it is tied, or until it sees that the other one is gone
        asks.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{tries}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children(parent: int) -> int:
    """Return the first child of a process, once there is one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8").split()
        if found:
            return int(found[0])
        time.sleep(0.01)
    raise AssertionError("it has no child")
