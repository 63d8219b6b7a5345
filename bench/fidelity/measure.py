"""Measure a cell: compress with half of the calibration data, judge on held-out data, and time every new shape once."""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.fidelity.methods import Method
from bench.fidelity.store import finite
from bench.fidelity.subjects import Subject, session

WORKER = Path(__file__).with_name("onnxsim_worker.py")
ROUNDS = 30
WARM_UP = 3
WORKER_SECONDS = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A compressed file: its size, and an identifier of its shape (files of one shape take the same time)."""

    path: Path
    params: int
    macs: int | None
    shape: str
    note: str = ""


def calibration(subject: Subject, draw: int, folder: Path) -> Path:
    """Return a file with the half of the calibration samples that belongs to a split."""
    path = folder / f"{subject.name}.{draw}.npz"
    if not path.exists():
        count = len(next(iter(subject.calibration.values())))
        rows = np.sort(np.random.default_rng(draw).choice(count, count // 2, replace=False))
        np.savez(path, **{name: array[rows] for name, array in subject.calibration.items()})
    return path


def cell(subject: Subject, method: Method, ratio: float, draw: int, folder: Path, sim: Path | None) -> dict[str, Any]:
    """Compress and judge; the file stays in `folder` until the next cell.

    The row has a key `file`, which is not part of the results.
    """
    start = time.perf_counter()
    data = calibration(subject, draw, folder)
    target = folder / "cell.onnx"
    target.unlink(missing_ok=True)
    made = _onnxsim(subject, method, ratio, data, target, sim) if sim else _own(subject, method, ratio, data, target)
    row: dict[str, Any] = {"subject": subject.name, "method": method.name, "ratio": ratio, "draw": draw}
    if isinstance(made, str):
        return row | {"score": None, "params": None, "macs": None, "shape": "", "note": made, "file": None}
    seconds = time.perf_counter() - start
    row |= {"score": finite(subject.judge(made.path)), "params": made.params, "macs": made.macs, "shape": made.shape}
    if made.note:
        row["note"] = made.note
    return row | {"seconds": round(seconds, 2), "file": made.path}


def _own(subject: Subject, method: Method, ratio: float, data: Path, target: Path) -> Made:
    """Compress with onnxgrail, without rounding of widths, so that the ratio is exact."""
    import onnxgrail

    try:
        result = onnxgrail.compress(
            subject.model,
            target,
            data=data,
            held_out=0,
            unit_ratio=ratio,
            blocks=subject.blocks,
            round_to=1,
            check=False,
            force=True,
            **method.options,
        )
    except onnxgrail.NothingToCompressError:
        return _dense(subject, data, "removes nothing")
    report = result.report.data
    sizes = report["model"]
    kept = [(block["name"], block["kept"]) for block in report["blocks"]]
    if report.get("methods") or any(entry["added"] for entry in report.get("refines", ())):
        kept.append(("and more", sizes["params_after"]))  # the widths do not determine the shape alone
    return Made(path=target, params=sizes["params_after"], macs=sizes["macs_after"], shape=_digest(kept))


def _dense(subject: Subject, data: Path, note: str) -> Made:
    sizes = weigh(subject.model, data)
    return Made(path=subject.model, params=sizes["params"], macs=sizes["macs"], shape="dense", note=note)


def _onnxsim(
    subject: Subject, method: Method, ratio: float, data: Path, target: Path, python: Path | None
) -> Made | str:
    """Prune with onnxsim in a separate process; return the error if there is no file that can be run."""
    base = method.base.removeprefix("onnxsim-")
    call = [str(python), str(WORKER), str(subject.model), str(data), str(target), base, f"{ratio:g}", method.repair]
    try:
        done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=WORKER_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no result within {WORKER_SECONDS} seconds"
    if done.returncode != 0 or not target.exists():
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:120]
    try:
        sizes = weigh(target, data)
        session(target)
    except Exception as error:  # noqa: BLE001 - any problem with the file is the result of this cell
        return f"the file cannot be run: {str(error).splitlines()[0][:100]}"
    pruned = sizes["params"] < weigh(subject.model, data)["params"]
    shape = f"onnxsim-{_digest(sizes)}" if pruned else "dense"
    return Made(
        path=target, params=sizes["params"], macs=sizes["macs"], shape=shape, note="" if pruned else "prunes nothing"
    )


def weigh(path: Path, data: Path) -> dict[str, Any]:
    """Return parameters and multiply-accumulates per sample of a file, for inputs like those in `data`."""
    import onnxgrail

    found = onnxgrail.inspect(path, data=data)
    return {"params": found.params, "macs": found.macs}


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def latency(dense: Path, slim: Path, feed: Mapping[str, Any], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median milliseconds of both files, measured in turn.

    Processor time of one thread, which other work on the machine does not change.
    """
    sessions = [session(dense), session(slim)]
    times: list[list[float]] = [[], []]
    for number in range(WARM_UP + rounds):
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            start = time.thread_time()
            sessions[which].run(None, dict(feed))
            if number >= WARM_UP:
                times[which].append(1e3 * (time.thread_time() - start))
    return {"dense_ms": round(median(times[0]), 4), "ms": round(median(times[1]), 4)}
