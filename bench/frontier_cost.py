"""The time of `frontier` over that of plain `compress --ratio` runs, on the embedded models.

    python bench/frontier_cost.py [--rounds N] [--out bench/results/frontier_cost.json]

Plain runs have the same compensator (grail), and the one that `compress` has by default (best). Each call runs in this
process, in turn, after one call of each to warm up; the least time of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxgrail
from onnxgrail import models

NAMES = ("digits_resnet", "digits_vit", "char_llama")
POINTS, RATIO = 10, 0.3


def seconds(call: Callable[[], Any]) -> float:
    """Return the time of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Return the times of the calls for a model."""
    model = models.load(name)
    with tempfile.TemporaryDirectory() as folder:

        def plain(compensate: str) -> Any:
            given = {"data": model.calibration, "ratio": RATIO, "compensate": compensate, "force": True}
            return onnxgrail.compress(model.model, Path(folder) / "o.onnx", **given)

        calls: dict[str, Callable[[], Any]] = {
            "frontier": lambda: onnxgrail.frontier(model.model, data=model.calibration, points=POINTS),
            "compress, grail": lambda: plain("grail"),
            "compress, best": lambda: plain("best"),
        }
        for call in calls.values():
            call()
        rows = [{what: seconds(call) for what, call in calls.items()} for _ in range(rounds)]
    times = {what: round(min(row[what] for row in rows), 3) for what in calls}
    over = {what: round(times["frontier"] / times[what], 2) for what in calls if what.startswith("compress")}
    return {"model": name, "points": POINTS, "seconds": times, "frontier_over": over}


def main() -> None:
    """Measure and print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [measured(name, args.rounds) for name in NAMES]
    text = json.dumps(rows, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
