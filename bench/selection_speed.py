"""Measure the time of selectors and folds on one wide block, and the loss of output.

    python bench/selection_speed.py [--widths 1536,3072,11008] [--only obs,fold] > selection_speed.json

The block is random: ReLU features of a narrow factor, 40 % of them near copies of others, with widely different scales.
30 % of the neurons are removed.  `loss` is the share of the consumer's squared
output that is lost after an optimal refit of the kept weights.  `cpu_seconds` is processor time, `seconds` wall-clock
time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np

from onnxgrail.algebra.fit.compensate.grail import Grail
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.select.selectors import SELECTORS
from onnxgrail.core import Block, Floats, Probe, Reducer, Slot, Stats, View

KEEP = 0.7
SELECTED = ("wanda", "flap", "gram", "slimgpt", "obs")
FOLDED = ("fold", "fold-kmeans", "fold-gram")


def drawn(width: int, inputs: int, outputs: int) -> View:
    """Return a random block of `width` neurons between `inputs` and `outputs` channels."""
    rng = np.random.default_rng(0)
    count, rank, fresh = (4 if width < 5000 else 2) * width, width // 8, int(0.6 * width)
    basis = rng.standard_normal((rank, width), np.float32) / np.float32(rank**0.5)
    rows = rng.standard_normal((count, rank), np.float32) @ basis
    rows += np.float32(0.05) * rng.standard_normal((count, width), np.float32)
    rows = np.maximum(rows * np.exp(0.7 * rng.standard_normal(width)).astype(np.float32), 0.0)
    source = rng.integers(0, fresh, width - fresh)
    scale = np.exp(0.3 * rng.standard_normal(width - fresh)).astype(np.float32)
    noise = np.float32(0.2) * rows[:, source].std(axis=0)
    rows[:, fresh:] = rows[:, source] * scale + noise * rng.standard_normal((count, width - fresh), np.float32)
    producer = rng.standard_normal((width, 1, inputs))
    producer[fresh:] = producer[source] * scale[:, None, None] + 0.2 * rng.standard_normal((width - fresh, 1, inputs))
    consumer = rng.standard_normal((width, 1, outputs)) * np.exp(0.4 * rng.standard_normal((width, 1, 1)))
    stats = Stats(gram=(rows.T @ rows).astype(np.float64), total=rows.sum(axis=0, dtype=np.float64), count=count)
    return view_of(producer, consumer, stats)


def view_of(producer: Floats, consumer: Floats, stats: Stats) -> View:
    """Return the view of a block with these weights and statistics."""
    units = len(producer)
    index = np.arange(units)[:, None]
    slots = (
        Slot(param="up", initializer="up", axis=0, index=index, role="producer"),
        Slot(param="down", initializer="down", axis=0, index=index, role="consumer", probe=0),
    )
    probe = Probe(value="hidden", axis=1, index=index, pooled=False)
    block = Block(
        name="mlp",
        kind="mlp",
        units=units,
        unit_size=1,
        slots=slots,
        probes=(probe,),
        ids=np.arange(units),
        span=(0, 1),
        nodes=("up", "down"),
    )
    return View(block=block, weights=(producer, consumer), stats=(stats,))


def ways(view: View, kept: int) -> dict[str, Callable[[], Reducer]]:
    """Return functions that reduce all neurons to `kept`, by name."""
    rng = np.random.default_rng(0)

    def pruned(name: str) -> Callable[[], Reducer]:
        return lambda: REDUCERS["prune"](view, kept, SELECTORS[name](view, rng), rng)

    def folded(name: str) -> Callable[[], Reducer]:
        return lambda: REDUCERS[name](view, kept, None, rng)

    return {name: pruned(name) for name in SELECTED} | {name: folded(name) for name in FOLDED}


def main() -> None:
    """Print the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="1536,3072")
    parser.add_argument("--only", default="", help="names, separated by commas; all by default")
    parser.add_argument("--no-loss", action="store_true", help="skip the refit that measures the loss")
    args = parser.parse_args()
    rows = []
    for width in map(int, args.widths.split(",")):
        view = drawn(width, 256 if width > 5000 else width // 4, 4096 if width > 5000 else width // 4)
        for name, way in ways(view, int(KEEP * width)).items():
            if args.only and name not in args.only.split(","):
                continue
            wall, cpu = time.perf_counter(), time.process_time()
            reducer = way()
            row = {"width": width, "way": name, "seconds": round(time.perf_counter() - wall, 2)}
            row["cpu_seconds"] = round(time.process_time() - cpu, 2)
            if not args.no_loss:
                row["loss"] = Grail(alpha=1e-6)(view, reducer).error.compensated
            rows.append(row)
    head = {"bench": "selection_speed", "date": datetime.now(UTC).date().isoformat(), "cores": os.cpu_count()}
    print(json.dumps(head | {"machine": platform.machine(), "numpy": np.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
