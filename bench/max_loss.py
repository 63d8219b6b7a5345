"""Measure what a limit of the loss removes from models, and how well the results agree with the originals.

    python -m bench.max_loss [FOLDER] [--models a,b] [--losses 0.01 0.05] [--minimize latency] > results.json

Every model is compressed with `max_loss`, and judged on held-out samples that no fit and no search has seen.  Models
and their measures of agreement are those of `bench/loss_against_agreement.py`.  The means count a refused model as one
of which nothing is removed.  JSON on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxgrail
from bench.loss_against_agreement import Subject, judged, subjects
from onnxgrail.errors import OnnxGrailError
from onnxgrail.fidelity.loss import losses_of

SHARES = ("macs", "params", "bytes")


def main() -> None:
    """Parse the options, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--models", help="names, separated by commas")
    parser.add_argument("--losses", nargs="+", type=float, default=(0.01, 0.05))
    parser.add_argument("--minimize", default="latency")
    args = parser.parse_args()
    wanted = args.models.split(",") if args.models else None
    rows = []
    with tempfile.TemporaryDirectory(prefix="max-loss-") as folder:
        for subject in subjects(args.folder):
            for limit in args.losses if wanted is None or subject.name in wanted else ():
                rows.append(row(subject, limit, args.minimize, Path(folder) / "o.onnx"))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    json.dump(
        {"version": onnxgrail.__version__, "minimize": args.minimize, "means": means(rows), "rows": rows}, sys.stdout
    )
    print()


def row(subject: Subject, limit: float, minimize: str, file: Path) -> dict[str, Any]:
    """Compress a model within a loss, and return what went, the loss and the agreement."""
    known: dict[str, Any] = {"model": subject.name, "max_loss": limit}
    started = time.process_time()
    try:
        result = onnxgrail.compress(
            subject.model, file, data=subject.data, max_loss=limit, minimize=minimize, force=True
        )
    except OnnxGrailError as error:
        return {**known, "refused": str(error), "seconds": round(time.process_time() - started, 1)}
    seconds = time.process_time() - started
    data = result.report.data
    search, sizes, tally = data["allocation"]["search"], data["model"], judged(subject, file)
    loss = search["tried"][search["chosen"]]["loss"]
    name, value = subject.judge(file, tally)
    return {
        **known,
        **{key: round(1 - sizes[f"{key}_after"] / max(sizes[f"{key}_before"], 1), 4) for key in SHARES},
        "cost": round(1 - search["cost"] / search["before"], 4),
        "candidates": len(search["tried"]),
        "mean": round(loss["mean"], 5),
        "bound": round(loss["bound"], 5),
        "samples": loss["samples"],
        "held_out": round(losses_of(tally)[0].mean, 5),
        "measure": name,
        "agreement": round(value, 4),
        "seconds": round(seconds, 1),
    }


def means(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the mean shares that were removed, by limit."""
    limits = dict.fromkeys(row["max_loss"] for row in rows)
    return {
        f"{limit:g}": {
            key: round(
                sum(r.get(key, 0.0) for r in rows if r["max_loss"] == limit)
                / sum(r["max_loss"] == limit for r in rows),
                4,
            )
            for key in SHARES
        }
        for limit in limits
    }


if __name__ == "__main__":
    main()
