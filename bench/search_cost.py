"""The time of a search over that of a run with a ratio, on the embedded models and those of others.

    python -m bench.search_cost [FOLDER] [--rounds N] [--models a,b] [--out bench/results/search_cost.json]

FOLDER is laid out as in `bench/real.py`.  A run with a ratio makes the same fits (`--ratio 0.1`).  The calls take turns
in this process, after one run with a ratio to warm up; the least time of the rounds counts.  A search that is refused
has done all of its work, so it counts, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.real import Subject, ours, subjects
from onnxgrail.errors import NothingToCompressError

PLAIN = "ratio 0.1"
WAYS = {PLAIN: ours(ratio=0.1), "loss 1 %": ours(), "loss 1 %, bytes": ours(minimize="size")}


def main() -> None:
    """Measure and print, and write the JSON after every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--models", help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wanted = args.models.split(",") if args.models else None
    rows = []
    for subject in subjects(args.folder):
        if wanted is None or subject.name in wanted:
            rows.append(measured(subject, args.rounds))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if args.out is not None:
                found = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "rounds": args.rounds, "rows": rows}
                args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measured(subject: Subject, rounds: int) -> dict[str, Any]:
    """Return the least seconds of each way, and the searches in units of a run with a ratio."""
    seconds(subject, WAYS[PLAIN])
    times = [{way: seconds(subject, run) for way, run in WAYS.items()} for _ in range(rounds)]
    least = {way: round(min(one[way] for one in times), 2) for way in WAYS}
    over = {way: round(time / least[PLAIN], 2) for way, time in least.items() if way != PLAIN}
    return {"model": subject.name, "samples": len(subject.calib), "seconds": least, "over": over}


def seconds(subject: Subject, way: Callable[[Subject, Path], str]) -> float:
    """Return the time of a call that writes a file, or finds that nothing can go within the loss."""
    with tempfile.TemporaryDirectory(prefix="search-") as folder:
        start = time.perf_counter()
        with contextlib.suppress(NothingToCompressError):
            way(subject, Path(folder) / "o.onnx")
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
