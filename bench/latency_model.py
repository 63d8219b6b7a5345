"""Compare the latency model with the measured latency of narrowed models.

    OMP_NUM_THREADS=1 python bench/latency_model.py [--real FOLDER] [--only digits_vit,yunet_n320] > latency_model.json

Each model is really narrowed, to uniform and to random widths, of any size and of whole blocks of channels, and runs in
turn with the original on one sample and one thread.  The times are processor times, which other programs on the machine
disturb least.  Printed are the shares of the original's latency that the model and multiply-accumulates alone predict,
the measured share, and the mean absolute errors.

FOLDER holds `models/NAME.onnx` and a module `real.py` with `MODELS` and `feeds(name, half)`, a list of feeds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrail.allocation.balance import by_units
from onnxgrail.allocation.measures import ledger_of, measure_of
from onnxgrail.calibration.feeds.signature import signature_of
from onnxgrail.calibration.prepare import prepare
from onnxgrail.calibration.prepared import Prepared, narrowed
from onnxgrail.calibration.proof import proved
from onnxgrail.calibration.runtime.blocking import channel_block
from onnxgrail.calibration.runtime.latency import single
from onnxgrail.calibration.runtime.session import Session, open_session
from onnxgrail.calibration.runtime.threads import count
from onnxgrail.calibration.runtime.timing import machine
from onnxgrail.core import Recipe
from onnxgrail.errors import OnnxGrailError
from onnxgrail.graph.io.serial import pack
from onnxgrail.graph.rewrite.interface import changed, fit
from onnxgrail.machine.files.kept import NAMED
from onnxgrail.machine.job import Job
from onnxgrail.search.kernels import measured_kernels
from onnxgrail.search.latency import latency_measure

EMBEDDED = Path(__file__).resolve().parents[1] / "models" / "data"
NAMES = ("digits_resnet", "digits_vit", "char_llama")
UNIFORM = (0.2, 0.4, 0.6)
RANDOM = 3  # random widths, and as many in whole blocks of channels
LEAST, MOST, SECONDS, WARM = 20, 300, 1.5, 3
FEEDS = 4  # calibration feeds that are read

Widths = Mapping[str, int]


def sources(real: Path | None) -> Iterator[tuple[str, Path, Any]]:
    """Yield name, path and calibration data of the models."""
    for name in NAMES:
        yield name, EMBEDDED / f"{name}.onnx", EMBEDDED / f"{name}.calib.npz"
    if real is not None:
        sys.path.insert(0, str(real))
        import real as module  # type: ignore[import-not-found]

        for name in module.MODELS:
            yield name, real / "models" / f"{name}.onnx", module.feeds(name, "calib")[:FEEDS]


def measure(path: Path, data: Any) -> dict[str, Any]:
    """Return the entry of a model."""
    job = Job(recipe=Recipe(batch_size=1))
    prepared = prepare(path, data, job)
    half = by_units(prepared.survey.blocks, 0.5, 1)
    blocks, _ = proved(prepared, job, prepared.survey.blocks, half)
    if not blocks:
        return {"left_out": "no blocks"}
    started = time.perf_counter()
    kernels = measured_kernels(prepared, blocks, job.recipe)
    seconds = time.perf_counter() - started
    if not kernels.measured:
        return {"left_out": kernels.note}
    costs = {"latency": latency_measure(prepared, kernels), "macs": measure_of(prepared, "macs")}
    rng = np.random.default_rng(0)
    cases: list[tuple[str, Widths]] = [(f"uniform {s}", by_units(blocks, s, 1)) for s in UNIFORM]
    for number in range(RANDOM):
        random = {b.name: int(rng.integers(max(1, b.units // 4), b.units + 1)) for b in blocks}
        cases.append((f"random {number}", random))
        size = channel_block()
        cases.append((f"blocks {number}", {b.name: min(b.units, -(-random[b.name] // size) * size) for b in blocks}))
    rows = []
    for name, widths in cases:
        before, after = _times(prepared, widths)
        told = {kind: round(cost(widths) / cost.before, 3) for kind, cost in costs.items()}
        rows.append({"widths": name, "before_ms": round(before, 3), "measured": round(after / before, 3), **told})
    about = {"blocks": len(blocks), "seconds": round(seconds, 1), "attributed": round(kernels.measured[0].share, 3)}
    return {**about, "mean_absolute_error": _errors(rows), "rows": rows}


def _times(prepared: Prepared, widths: Widths) -> tuple[float, float]:
    """Return the median milliseconds of processor time of the original and of the narrowed model, run in turn."""
    ledgers = [ledger_of(prepared, each) for each in ({}, widths)]
    feed = single(next(iter(prepared.batches)), signature_of(prepared.model))
    feeds = [fit(feed, changed(prepared.model, prepared.survey, ledger.dead)) for ledger in ledgers]
    sessions = [open_session(pack(narrowed(prepared, ledger))) for ledger in ledgers]
    times: list[list[float]] = []
    started = time.perf_counter()
    while len(times) < LEAST or (len(times) < MOST and time.perf_counter() - started < SECONDS):
        row = [0.0, 0.0]
        for number in (0, 1) if len(times) % 2 else (1, 0):
            row[number] = _timed(sessions[number], feeds[number])
        times.append(row)
    before, after = np.median(np.array(times[WARM:]), axis=0).tolist()
    return before, after


def _timed(session: Session, feed: Any) -> float:
    started = time.process_time()
    session.run(feed)
    return (time.process_time() - started) * 1e3


def summary(models: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean absolute errors over all models, of all widths and of those in whole blocks of channels."""
    rows = [row for entry in models.values() for row in entry.get("rows", ())]
    whole = [row for row in rows if row["widths"].startswith("blocks")]
    return {"mean_absolute_error": _errors(rows), "mean_absolute_error_in_blocks": _errors(whole)}


def _errors(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {k: round(float(np.mean([abs(r[k] - r["measured"]) for r in rows])), 3) for k in ("latency", "macs")}


def main() -> None:
    """Measure all models and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", type=Path, help="folder with models of others")
    parser.add_argument("--only", help="names of models")
    given = parser.parse_args()
    if count() != 1:
        parser.error("processor times need one thread: set OMP_NUM_THREADS=1")
    os.environ[NAMED] = ""  # measure, whatever an earlier run has kept
    models: dict[str, Any] = {}
    for name, path, data in sources(given.real):
        if given.only and name not in given.only.split(","):
            continue
        try:
            models[name] = measure(path, data)
        except OnnxGrailError as error:
            models[name] = {"left_out": str(error)}
        print(name, models[name].get("mean_absolute_error", models[name]), file=sys.stderr, flush=True)
    head = {"bench": "latency_model", "date": datetime.now(UTC).date().isoformat(), "machine": machine()}
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    json.dump({**head, **versions, **summary(models), "models": models}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
