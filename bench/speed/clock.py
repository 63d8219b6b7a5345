"""Measure seconds, processor seconds and memory of a command, and of a forward pass for comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORWARD = """
import json, sys, time
import numpy as np
import onnxruntime as ort
model, data, threads, batch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
options = ort.SessionOptions()
options.intra_op_num_threads = threads
session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
arrays = dict(np.load(data))
count = len(next(iter(arrays.values())))
feeds = [{name: a[i:i + batch] for name, a in arrays.items()} for i in range(0, count, batch)]
session.run(None, feeds[0])
wall, cpu = time.perf_counter(), time.process_time()
for feed in feeds:
    session.run(None, feed)
print(json.dumps({"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}))
"""

SPEED = """
import time
import numpy as np
a = np.ones((2048, 2048), np.float32)
a @ a
took = []
for _ in range(5):
    started = time.perf_counter()
    a @ a
    took.append(time.perf_counter() - started)
print(2 * 2048**3 / min(took))
"""


def speed(threads: int) -> float:
    """Measure the floating-point operations per second of a matrix product in float32."""
    done = subprocess.run([sys.executable, "-c", SPEED], env=_with(threads), capture_output=True, text=True, check=True)
    return float(done.stdout)


def _with(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}


def forward(model: Path, data: Path, threads: int, batch: int) -> dict[str, float]:
    """Measure one forward pass over the data in a new process, without session and loading."""
    words = [sys.executable, "-c", FORWARD, str(model), str(data), str(threads), str(batch)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def command(words: Sequence[str], threads: int) -> dict[str, Any]:
    """Measure a whole command in a new process: wall and processor seconds, peak memory in MB, exit code."""
    started = time.perf_counter()
    process = subprocess.Popen(words, env=_with(threads), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak, over = {"RssAnon": 0, "VmHWM": 0}, threading.Event()
    watch = threading.Thread(target=_watch, args=(process.pid, peak, over))
    watch.start()
    errors = process.stderr.read() if process.stderr is not None else b""
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    over.set()
    watch.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        print(errors.decode(errors="replace")[-500:], file=sys.stderr)
    return {
        "seconds": seconds,
        "cpu": used.ru_utime + used.ru_stime,
        "rss": peak["VmHWM"] / 1024,  # not ru_maxrss, which starts with the memory of this process
        "anonymous": peak["RssAnon"] / 1024,
        "exit": process.returncode,
    }


def _watch(number: int, peak: dict[str, int], over: threading.Event) -> None:
    """Measure the peak memory in kB of a process, or of its child if it has one, fifty times a second."""
    while not over.wait(0.02):
        try:
            child = Path(f"/proc/{number}/task/{number}/children").read_text(encoding="ascii").split()[:1]
            text = Path(f"/proc/{[number, *child][-1]}/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            name, _, value = line.partition(":")
            if name in peak:
                peak[name] = max(peak[name], int(value.split()[0]))
