"""How the program ends: at once, with the right code, and with nothing left unsaid."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = "import sys; sys.argv = ['onnxgrail', {words!r}]; from onnxgrail.start import main; {before}; main()"


def ended(words: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    code = START.format(words=words, before=before)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("words", "code"), [("--version", 0), ("no-such-command", 2)])
def test_codes_and_words_arrive(words: str, code: int) -> None:
    done = ended(words)
    assert done.returncode == code
    assert done.stderr if code else done.stdout.startswith("onnxgrail ")


def test_the_interpreter_is_not_taken_apart() -> None:
    """A module's objects would be freed, and say so."""
    told = "import types; Last = type('Last', (), {'__del__': lambda self: print('freed')}); last = Last()"
    assert "freed" not in ended("--version", told.replace("; ", "\n")).stdout


def test_what_was_to_run_at_the_end_runs() -> None:
    """Its words arrive, too, although they are said last."""
    assert ended("--version", "import atexit; atexit.register(print, 'tidied')").stdout.endswith("tidied\n")


def test_other_threads_may_finish() -> None:
    late = "import threading, time; threading.Thread(target=lambda: (time.sleep(0.5), print('late'))).start()"
    assert ended("--version", late).stdout.endswith("late\n")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of a POSIX system")
def test_a_reader_may_go_away() -> None:
    code = START.format(words="--help", before="import time; time.sleep(0.5)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode != 0
