"""Ctrl-C at any moment of the program `onnxgrail` gives one line and exit code 1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import onnx
import pytest

from tests.e2e import nets

START = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is born without it

class Told:
    def find_spec(self, name, *rest):
        if name == "onnxgrail.cli":  # the first that is imported once the program has begun
            print("begun", flush=True)

sys.meta_path.insert(0, Told())
from onnxgrail.__main__ import main
"""
WORK = """
import time, onnxgrail

def compress(*args, **options):
    print("works", flush=True)
    time.sleep(60)

onnxgrail.compress = compress
"""


def interrupted(folder, code, *, words=("compress", "m.onnx"), lines=1, after=0.0):
    """Exit code and stderr of the program when it was interrupted so many seconds after its first lines on stdout."""
    onnx.save(nets.mlp(), folder / "m.onnx")
    command = [sys.executable, "-c", f"{code}\nmain()", *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(lines):
            process.stdout.readline()
        time.sleep(after)
        os.kill(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("after", [0.0, 0.003, 0.01, 0.03, 0.1, 0.2])
def test_while_modules_are_imported(after, tmp_path):
    code, stderr = interrupted(tmp_path, START, after=after)
    assert (code, stderr.count("\n")) == (1, 1), stderr
    assert stderr == "Error: interrupted\n" or stderr.startswith("Error: interrupted. With --resume DIR ")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_while_it_works(tmp_path):
    code, stderr = interrupted(tmp_path, START + WORK, lines=2)
    assert code == 1
    assert stderr == "Error: interrupted. With --resume DIR the same command would go on where it was\n"


LATE = {
    "swallowed by a callback": """
class Odd:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def compress(*args, **options):
    odd = Odd()
    del odd
    time.sleep(60)
""",
    "turned into another error": """
def compress(*args, **options):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise SystemError("initialization of a module failed") from None
""",
}


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("name", LATE)
def test_an_interrupt_is_not_lost(name, tmp_path):
    code, stderr = program(tmp_path, f"{START}\nimport time, onnxgrail\n{LATE[name]}\nonnxgrail.compress = compress")
    assert (code, stderr) == (1, "Error: interrupted. With --resume DIR the same command would go on where it was\n")


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize(
    "late",
    [
        "import threading\nthreading._register_atexit(signal.raise_signal, signal.SIGINT)",
        "import atexit\natexit.register(signal.raise_signal, signal.SIGINT)",
    ],
    ids=["while threads end", "at exit"],
)
def test_the_exit_code_of_a_finished_command_stands(late, tmp_path):
    work = "import onnxgrail\nonnxgrail.compress = lambda *args, **options: 1 / 0"
    code, stderr = program(tmp_path, f"{START}\n{late}\n{work}")
    assert code == 1
    assert stderr.startswith("Error: internal error: ZeroDivisionError")
    assert stderr.count("\n") == 1


def program(folder, code):
    """Exit code and stderr of the program, changed by some code."""
    onnx.save(nets.mlp(), folder / "m.onnx")
    command = [sys.executable, "-c", f"{code}\nmain()", "compress", "m.onnx"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr
