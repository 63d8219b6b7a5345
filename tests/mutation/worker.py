"""A process that runs mutations one after another and says what came of each.

    python -m tests.mutation.worker SEED FOLDER KIND

KIND is the module that makes the mutations.  Numbers come on stdin, verdicts go to stdout as JSON, one a line.  A
mutation that takes too long ends the process, with the stack of where it was in `FOLDER/stack`; one that crashes the
runtime ends it, too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS, GROWTH, LARGEST = 10.0, 2**30, 2**28  # per mutation: time, bytes of memory, bytes of a file
WAITING = 40.0  # seconds on the clock
RUN = 2.0  # seconds that the runtime may take for a run
DOCUMENTED = {0, 1, 2, 3, 4}  # exit codes
USAGE = ("Usage: ", "Try ")
_written: list[str] = []
_watched = "/nowhere"  # the folder whose Python files nobody may run


def main() -> None:
    """Serve."""
    seed, root = int(sys.argv[1]), Path(sys.argv[2]).resolve()
    kind = importlib.import_module(f"tests.mutation.{sys.argv[3]}")
    answers = os.fdopen(os.dup(1), "w")
    stack, noise = (root / "stack").open("w+"), (root / "noise").open("a+")
    for stream in (1, 2):  # what libraries print past Python
        os.dup2(noise.fileno(), stream)
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGPROF, stack, chain=True)  # the stack, and the end of the process
    (root / "tmp").mkdir()
    os.environ |= {"TMPDIR": str(root / "tmp"), "ONNXGRAIL_RUN_SECONDS": str(RUN)}
    _warm(root)
    kind.prepare(root)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
    global _watched  # noqa: PLW0603  an audit hook takes no arguments
    _watched = str(root)
    sys.addaudithook(_watch)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        stack.seek(0)
        stack.truncate()
        verdict = _run(kind.case, seed, int(line), root, stack)
        if os.fstat(noise.fileno()).st_size:
            verdict["faults"].append("printed past the command: " + (root / "noise").read_text(errors="replace")[:300])
            noise.truncate(0)
        answers.write(json.dumps(verdict) + "\n")
        answers.flush()


def _run(case: Callable[..., Any], seed: int, number: int, root: Path, stack: Any) -> dict[str, Any]:
    place = root / "outer"
    shutil.rmtree(place, ignore_errors=True)
    folder = place / "work"
    folder.mkdir(parents=True)
    made = case(seed, number, folder)
    before = _listing(place)
    os.chdir(folder)
    _written.clear()
    _reset_peak()
    held = _status("VmRSS")
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + GROWTH, resource.RLIM_INFINITY))
    # What works is measured in time of the processor, as others may work here too; what waits, by the clock.
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    faulthandler.dump_traceback_later(WAITING, exit=True, file=stack)
    started = time.process_time()
    code, out, err = _invoke(made.words) if made.call is None else _called(made.call)
    seconds = time.process_time() - started
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_PROF, 0)
    grown = _status("VmHWM") - held
    written = [path for path in _written if not _allowed(path, root)]
    if "--verbose" in made.words:  # asked for
        err = err[err.rfind("Error: ") :] if code else err
    faults = [*_judged(code, out, err), *_kept(before, _listing(place), code, folder, made.own)]
    faults += [f"written: {path}" for path in dict.fromkeys(written)]
    faults += [f"left in the temporary folder: {p.name}" for p in (root / "tmp").iterdir()]
    if grown > GROWTH:
        faults.append(f"grew by {grown >> 20} MB")
    os.chdir(root)
    text = err.strip().splitlines()[-1][:400] if err.strip() else ""
    return {
        "number": number,
        "name": made.name,
        "words": made.words,
        "code": code,
        "text": text,
        "seconds": round(seconds, 3),
        "grown": grown,
        "faults": faults,
    }


def _invoke(words: tuple[str, ...]) -> tuple[int, str, str]:
    from click.testing import CliRunner

    from onnxgrail.cli import main as command

    result = CliRunner().invoke(command, list(words))
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        return -1, result.stdout, f"{result.stderr}\n{type(error).__name__}: {error}"
    return result.exit_code, result.stdout, result.stderr


def _called(call: Callable[[], object]) -> tuple[int, str, str]:
    """A call of the library, answered as a command would be."""
    from onnxgrail import OnnxGrailError

    try:
        call()
    except OnnxGrailError as error:
        return 1, "", f"Error: {error}".encode("unicode_escape").decode("ascii")  # names are shown as they are
    except Exception as error:  # noqa: BLE001  judged
        return -1, "", "".join(traceback.format_exception(error))
    return 0, "", ""


def _judged(code: int, out: str, err: str) -> list[str]:
    """Return the faults of an answer."""
    from tests.command import said
    from tests.mutation.protos import MARK

    found = []
    if code not in DOCUMENTED:
        found.append(f"exit code {code}: {err.strip()[-300:]}")
    if "internal error" in err or "Traceback" in out + err:
        found.append(f"not typed: {err.strip()[-300:]}")
    lines = [line for line in said(err).splitlines() if line and not line.startswith((*USAGE, "Warning: ", "Note: "))]
    errors = [line for line in lines if line.startswith("Error: ")]
    if code in DOCUMENTED - {0} and (len(errors) != 1 or lines != errors):
        found.append(f"not one line: {err.strip()[:300]!r}")
    if code == 0 and errors:
        found.append(f"an error and exit code 0: {errors[0][:300]}")
    if "\x1b" in out + err or "\x00" in out + err:
        found.append("a name reached the terminal as it is")
    page = Path("out.html")
    if page.exists() and MARK in page.read_text(encoding="utf-8", errors="replace"):  # a model may have that name
        found.append("a name is markup in the page")
    return found


def _kept(
    before: dict[str, bytes], after: dict[str, bytes], code: int, folder: Path, own: tuple[str, ...]
) -> list[str]:
    """Return changes beside the outputs, and outputs with contents that are not allowed."""
    from tests.mutation.traps import CANARY

    mine = tuple(f"work/{name}" for name in ("out.", *own))
    found = [f"{name} changed" for name in before if after.get(name) != before[name] and not name.startswith(mine)]
    new = set(after) - set(before)
    found += [f"{name} was made" for name in sorted(new) if not name.startswith(mine)]
    models = {name for name in new if re.fullmatch(r"work/out\.onnx(\.[0-9a-f]{16}\.data)?", name)}
    if code not in (0, 3) and models:
        found.append(f"{', '.join(sorted(models))} after a failure")
    found += [f"{name} holds what lies outside" for name in models if CANARY.tobytes() * 4 in after[name]]
    if "work/out.onnx" in models:
        found += _loads(folder / "out.onnx")
    return found


def _loads(path: Path) -> list[str]:
    import onnx

    try:
        onnx.load(path)
    except Exception as error:  # noqa: BLE001  whatever it is, a reader would meet it
        return [f"the output cannot be read: {error}"[:300]]
    return []


def _listing(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): os.fsencode(p.readlink()) if p.is_symlink() else p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what Python opens for writing, makes or moves."""
    if event == "open":
        path, flags = arguments[0], arguments[2]
        if isinstance(path, str | bytes) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            _written.append(os.fsdecode(path))
    elif event in ("os.rename", "os.link", "os.symlink"):
        _written.append(os.fsdecode(arguments[1]))
    elif event == "exec" and getattr(arguments[0], "co_filename", "").startswith(_watched):
        _written.append(f"run: {arguments[0].co_filename}")
    elif event in ("os.mkdir", "os.truncate") and isinstance(arguments[0], str | bytes):
        _written.append(os.fsdecode(arguments[0]))


def _allowed(path: str, root: Path) -> bool:
    """Outputs and drafts beside them, and temporary files."""
    real = Path(path).resolve() if Path(path).is_absolute() else (root / "outer" / "work" / path).resolve()
    inside = real.is_relative_to(root / "outer" / "work") or real.is_relative_to(root / "tmp")
    return inside or path in ("/dev/null", "/proc/self/clear_refs", str(root / "noise"))


def _warm(root: Path) -> None:
    """Import and run everything once, so that what follows is a mutation's own."""
    from tests.mutation.seeds import SEEDS, data_of

    folder = root / "warm"
    folder.mkdir()
    os.chdir(folder)
    import numpy as np

    for name in ("mlp", "attention"):
        model = SEEDS[name]()
        Path("m.onnx").write_bytes(model.SerializeToString())
        np.savez("d.npz", **data_of(model))
        words = ("compress", "m.onnx", "out.onnx", "--data", "d.npz", "--norms", "all", "--round-to", "1")
        more = ("--force", "--report", "out.html", "--reducer", "fold", "--allocate", "global", "--ratio", "0.3")
        code, _, err = _invoke((*words, *more))
        assert code == 0, err
        for more in (("inspect", "m.onnx"), ("compare", "m.onnx", "out.onnx")):
            assert _invoke(more)[0] == 0
    os.chdir(root)


def _status(key: str) -> int:
    """Bytes, of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def _reset_peak() -> None:
    with contextlib.suppress(OSError):  # not allowed everywhere: the peak is then that of all mutations so far
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


if __name__ == "__main__":
    main()
