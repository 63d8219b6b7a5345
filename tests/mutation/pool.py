"""Deal mutations out to processes, and notice the ones that do not come back."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # seconds after which a process that should have ended itself is killed
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class _Worker:
    """One process and its folder."""

    def __init__(self, seed: int, threads: int, kind: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mutations-")
        self.root = Path(self._folder.name)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutation.worker", str(seed), str(self.root), kind],
            cwd=ROOT,
            env=os.environ | dict.fromkeys(THREADS, str(threads)) | {"PYTHONPATH": str(ROOT), "ONNXGRAIL_CACHE": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._answer() != "ready\n":
            self.close()
            raise RuntimeError("a worker does not start: " + self.stack())

    def ask(self, number: int) -> dict[str, Any]:
        """The verdict on a mutation; the process is gone after one that it did not survive."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        line = self._answer()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        code = self.process.wait()
        stack = self.stack()
        slow = "Timeout" in stack or code in (-signal.SIGPROF, -signal.SIGKILL)
        kind = "too slow" if slow else f"crash ({signal.Signals(-code).name if code < 0 else code})"
        return {"number": number, "name": "?", "words": [], "code": code, "text": "", "faults": [f"{kind}: {stack}"]}

    def stack(self) -> str:
        """Return the stack of the process when it ended."""
        files = [self.root / name for name in ("stack", "noise")]
        texts = [path.read_text(errors="replace")[-3000:] for path in files if path.exists()]
        return next((text for text in texts if text.strip()), "")

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()
        self._folder.cleanup()

    def _answer(self) -> str:
        timer = threading.Timer(PATIENCE, self.process.kill)
        timer.start()
        try:
            assert self.process.stdout is not None
            return self.process.stdout.readline()
        finally:
            timer.cancel()


def run(
    numbers: Iterable[int], *, seed: int, kind: str = "cases", workers: int = 1, threads: int = 1
) -> list[dict[str, Any]]:
    """Verdicts on mutations, in the order of their numbers; `kind` is the module of this folder that makes them."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in numbers:
        waiting.put(number)
    found: list[dict[str, Any]] = []
    failures: list[BaseException] = []

    def serve() -> None:
        worker: _Worker | None = None
        try:
            while True:
                number = waiting.get_nowait()
                worker = worker or _Worker(seed, threads, kind)
                found.append(worker.ask(number))
                if worker.process.poll() is not None:
                    worker.close()
                    worker = None
        except queue.Empty:
            pass
        except BaseException as error:  # noqa: BLE001  raised again where everybody sees it
            failures.append(error)
        finally:
            if worker is not None:
                worker.close()

    serving = [threading.Thread(target=serve) for _ in range(workers)]
    for thread in serving:
        thread.start()
    for thread in serving:
        thread.join()
    if failures:
        raise failures[0]
    return sorted(found, key=lambda verdict: int(verdict["number"]))
