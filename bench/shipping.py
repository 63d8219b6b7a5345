"""Accuracy, size and latency of each step to a deployed file: dense, narrowed, and narrowed then quantized.

    python -m bench.shipping > bench/results/shipping.json
    python -m bench.shipping --markdown

JSON on stdout; `--markdown` prints the table of docs/deploy.md from the stored results.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.runtime.session import open_session

RESULTS = Path(__file__).parent / "results" / "shipping.json"
NAMES = ("digits_resnet", "digits_vit")
STEPS = ("dense", "none", "int8", "int8-dynamic", "fp16")
BATCH, ROUNDS = 8, 200


def accuracy(embedded: models.Embedded, path: Path) -> float:
    """Return the accuracy on held-out data."""
    with open_session(path) as session:
        return float(models.score(embedded, lambda feed: list(session.run(feed).values())))


def rows(name: str, folder: Path) -> list[dict[str, Any]]:
    """Measure one model at every step."""
    embedded = models.load(name)
    files = {"dense": Path(embedded.model)}
    for kind in STEPS[1:]:
        files[kind] = folder / f"{name}.{kind}.onnx"
        onnxgrail.compress(
            embedded.model, files[kind], data=embedded.calibration, held_out=0, unit_ratio=0.3, quantize=kind
        )
    with np.load(embedded.calibration) as file:
        data = {key: file[key] for key in file.files}
    timed = onnxgrail.bench(*files.values(), data=data, batch_sizes=(BATCH,), rounds=ROUNDS, threads=1)
    return [
        {
            "model": name,
            "step": step,
            "accuracy": accuracy(embedded, path),
            "bytes": path.stat().st_size,
            "median_ms": row.times.median,
            "ratio": row.times.ratio,
            "interval": row.times.interval,
            "machine": timed.machine,
            "date": timed.date,
        }
        for (step, path), row in zip(files.items(), timed.rows, strict=True)
    ]


def markdown(found: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    lines = ["| model | step | accuracy | size | median | ratio |", "|---|---|---:|---:|---:|---:|"]
    for row in found:
        step = {"dense": "dense", "none": "narrowed, unit ratio 0.3"}.get(row["step"], f"and `{row['step']}`")
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}×"
        cells = (
            f"{row['accuracy']:.2%}".replace("%", " %"),
            f"{row['bytes'] / 1e3:.0f} kB",
            f"{row['median_ms']:.2f} ms",
        )
        lines.append(f"| `{row['model']}` | {step} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--markdown" in sys.argv:
        print(markdown(json.loads(RESULTS.read_text(encoding="utf-8"))))
    else:
        with tempfile.TemporaryDirectory() as place:
            print(json.dumps([row for name in NAMES for row in rows(name, Path(place))], indent=1))
