"""Standard streams that are closed, full, or read by nobody: the file and the exit code are as ever."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest

from tests.e2e import nets

pytestmark = pytest.mark.skipif(os.name == "nt", reason="descriptors and /dev/full")

FULL = "Error: standard output: No space left on device\n"
WORK = """
import sys, types
import onnxgrail
from onnxgrail.__main__ import main

def bench(*args, **options):
    print("table")
    print("a warning", file=sys.stderr)
    {work}

onnxgrail.bench = bench
main()
"""
SIGNALS = """
import os, signal, sys, threading, time
from onnxgrail.machine.streams import settle

def send():
    for _ in range(50):
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGURG)

settle()
signal.signal(signal.SIGURG, lambda *_: None)
threading.Thread(target=send, daemon=True).start()
sys.stdout.write("x" * 2**20)
sys.stdout.flush()
"""


def program(folder, redirection, work="raise SystemExit(3)", words="bench m.onnx"):
    """Run the program in a shell, with a command that prints to both streams and does some work."""
    script = folder / "program.py"
    script.write_text(WORK.format(work=work))
    (folder / "m.onnx").touch()
    command = f"set -o pipefail; {sys.executable} {script} {words} {redirection}"
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("redirection", "stdout", "stderr"),
    [
        ("2>&-", "table\n", ""),
        (">&-", "", "a warning\n"),
        (">&- 2>&- <&-", "", ""),
        ("2>/dev/full", "table\n", ""),
        ("| true", "", "a warning\n"),
        ("2>&1 | true", "", ""),
    ],
)
def test_the_exit_code_is_that_of_the_command(redirection, stdout, stderr, tmp_path):
    assert program(tmp_path, redirection) == (3, stdout, stderr)


def test_a_library_keeps_a_file_open(tmp_path):
    """Its descriptor is not that of standard output, which is closed."""
    work = "raise SystemExit(3)\n\nfrom onnxgrail.machine import supervisor\nstarted, held = supervisor.split, []\n"
    work += "supervisor.split = lambda: (held.append(open('m.onnx')), started())[1]"
    assert program(tmp_path, ">&-", work) == (3, "", "a warning\n")


@pytest.mark.parametrize("words", ["bench m.onnx", "--help", "compress --help", "--version"])
def test_standard_output_that_is_full_is_an_error(words, tmp_path):
    code, stdout, stderr = program(tmp_path, ">/dev/full", words=words)
    assert (code, stdout) == (1, "")
    assert stderr.removeprefix("a warning\n") == FULL


def test_a_closed_stream_is_not_where_the_next_file_lies(tmp_path):
    """Prints of a library to descriptor 2 would be written into the model."""
    work = (
        "import os; file = open('made.bin', 'wb'); [os.write(n, b'from a library') for n in (1, 2)]; raise SystemExit"
    )
    assert program(tmp_path, ">&- 2>&- <&-", work)[0] == 0
    assert (tmp_path / "made.bin").read_bytes() == b""


def test_names_that_the_encoding_lacks_are_escaped(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert program(tmp_path, "", "print('é'); raise SystemExit") == (0, "table\n\\xe9\n", "a warning\n")


def test_a_model_is_written_all_the_same(tmp_path):
    onnx.save(nets.mlp(), tmp_path / "m.onnx")
    words = (
        f"{sys.executable} -m onnxgrail compress m.onnx o.onnx --ratio 0.3 --compensate none --selector l2 --no-check"
    )
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words} 2>&- | head -1"], cwd=tmp_path, check=False, timeout=60
    )
    assert done.returncode == 0
    onnx.checker.check_model(Path(tmp_path, "o.onnx"))


@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_signals_do_not_cut_off_output(flags, monkeypatch):
    """A write to a pipe that a signal interrupts says how much it wrote; without a buffer, nobody wrote the rest."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with subprocess.Popen([sys.executable, *flags, "-c", SIGNALS], stdout=subprocess.PIPE) as done:
        assert done.stdout is not None
        assert done.stdout.read(1) == b"x"
        time.sleep(0.2)  # the pipe is full, and the signals arrive
        assert len(done.stdout.read()) == 2**20 - 1
    assert done.returncode == 0
