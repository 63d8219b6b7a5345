"""Compare class scores with and without low rank of convolutions, of digits_resnet and of models that are given.

    python -m bench.ranks [MODEL.onnx CALIBRATION.npz HELD_OUT.npz NAME] ...

Prints JSON, at equal parameters, at equal bytes (bits are chosen, too) and by loss: the mean total variation and the
agreement of the largest score on held-out samples, what is left of parameters, multiply-accumulates and bytes, and the
speed over the original: medians of runs in turn on one thread, one sample each.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import onnxgrail
from onnxgrail.core import KINDS
from onnxgrail.errors import NothingToCompressError, UsageError
from onnxgrail.models import load

WAYS: dict[str, dict[str, Any]] = {
    "one convolution": {"blocks": tuple(kind for kind in KINDS if kind != "rank")},
    "with `rank`": {},
}
AMOUNTS: tuple[dict[str, Any], ...] = (
    {"target_params": "75%"},
    {"target_params": "50%"},
    {"target_params": "35%"},
    {"target_size": "15%"},
    {"target_size": "12%"},
    {"target_size": "10%"},
    {"target_size": "8%"},
    {"max_loss": "1%", "minimize": "size"},
    {"max_loss": "1%", "minimize": "macs"},
    {"max_loss": "5%", "minimize": "macs"},
    {"max_loss": "0.5%", "minimize": "latency"},
    {"max_loss": "1%", "minimize": "latency"},
    {"max_loss": "5%", "minimize": "latency"},
)
RUNS = 200


def main() -> None:
    """Measure all rows and print them."""
    digits = load("digits_resnet")
    subjects = [(digits.name, digits.model, digits.calibration, digits.heldout)]
    for n in range(1, len(sys.argv), 4):
        model, calibration, held_out, name = sys.argv[n : n + 4]
        subjects.append((name, Path(model), Path(calibration), Path(held_out)))
    rows = [row for subject in subjects for row in measured(*subject)]
    print(json.dumps({"date": str(dt.date.today()), "version": onnxgrail.__version__, "rows": rows}, indent=1))


def measured(name: str, model: Path, calibration: Path, held_out: Path) -> list[dict[str, Any]]:
    """Return the rows of a model."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        for amount in AMOUNTS:
            files, reports = {"": model}, {}
            for number, (way, choices) in enumerate(WAYS.items()):
                target = Path(folder) / f"{number}.onnx"
                try:
                    done = onnxgrail.compress(model, target, data=calibration, force=True, **amount, **choices)
                except (NothingToCompressError, UsageError) as refused:  # nothing within the loss, or out of reach
                    rows.append({"model": name, **amount, "way": way, "refused": str(refused.args[0])})
                else:
                    files[way], reports[way] = target, done.report.data["model"]
            sessions = [opened(file) for file in files.values()]
            judged = compared(sessions, held_out)
            for way, (loss, agreement), speed in zip(reports, judged, speeds(sessions, held_out), strict=True):
                after = {key: reports[way][key] / reports[way][key.replace("after", "before")] for key in KEPT}
                rows.append({"model": name, **amount, "way": way, "loss": loss, "agreement": agreement, "speed": speed})
                rows[-1] |= {key.removesuffix("_after"): round(share, 4) for key, share in after.items()}
    return rows


KEPT = ("params_after", "macs_after", "bytes_after")


def opened(file: Path) -> ort.InferenceSession:
    """Open a model on one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(file, options)


def feed_of(session: ort.InferenceSession, path: Path) -> dict[str, Any]:
    """Return the arrays of a file that a model reads."""
    names = {given.name for given in session.get_inputs()}
    with np.load(path) as file:
        return {name: file[name] for name in names}


def compared(sessions: list[ort.InferenceSession], held_out: Path) -> list[tuple[float, float]]:
    """Return the mean total variation and the agreement with the first model of all others."""
    found = [probabilities(one.run(None, feed_of(one, held_out))[0]) for one in sessions]
    wanted = found[0]
    return [
        (
            round(float(np.abs(got - wanted).sum(axis=-1).mean() / 2), 5),
            round(float((got.argmax(axis=-1) == wanted.argmax(axis=-1)).mean()), 4),
        )
        for got in found[1:]
    ]


def probabilities(scores: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return class scores as probabilities."""
    if scores.min() >= 0:
        return scores
    raised = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=-1, keepdims=True))


def speeds(sessions: list[ort.InferenceSession], held_out: Path) -> list[float]:
    """Return the speed of all models but the first over it."""
    feed = {name: array[:1] for name, array in feed_of(sessions[0], held_out).items()}
    times: list[list[float]] = [[] for _ in sessions]
    for _ in range(RUNS):
        for session, own in zip(sessions, times, strict=True):
            begun = time.perf_counter()
            session.run(None, feed)
            own.append(time.perf_counter() - begun)
    first, *others = (float(np.median(own)) for own in times)
    return [round(first / other, 3) for other in others]


if __name__ == "__main__":
    main()
