"""Run `onnxgrail` on broken models and broken data, and check that it answers with a one-line error.

    python bench/mutations.py [--count 10000] [--seed 0] [--first 0] [--workers 1] [--threads 1]

Every mutation runs in a worker process with limits on time, memory and sizes of files.  These are faults: an answer
that is not typed, an undocumented exit code, more than 10 seconds or 1 GB, a file that was changed or created next to
the output, a name that reaches the terminal or a page unescaped, and, counted separately, a crash of the process.
Prints JSON; exit code 1 if there are faults.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.mutation.pool import run

BATCH = 200


def main(text: str | None = __doc__, *, kind: str = "cases", count: int = 10_000) -> int:
    """Run the mutations of a module of `tests/mutation`, and print the results."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    choices = parser.parse_args()
    started = time.perf_counter()
    verdicts: list[dict[str, Any]] = []
    last = choices.first + choices.count
    for first in range(choices.first, last, BATCH):
        numbers = range(first, min(first + BATCH, last))
        found = run(numbers, seed=choices.seed, kind=kind, workers=choices.workers, threads=choices.threads)
        verdicts += found
        faulty = sum(bool(v["faults"]) for v in verdicts)
        print(f"{len(verdicts)} of {choices.count}, {faulty} with faults", file=sys.stderr, flush=True)
    summary = summed(verdicts)
    print(json.dumps({"seed": choices.seed, "seconds": round(time.perf_counter() - started), **summary}, indent=2))
    return 1 if summary["faulty"] else 0


def summed(verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts, and all mutations with a fault."""
    faulty = [v for v in verdicts if v["faults"]]
    crashed = [v for v in faulty if v["faults"][0].startswith("crash")]
    slowest = max(verdicts, key=lambda v: float(v.get("seconds", 0.0)), default={})
    return {
        "mutations": len(verdicts),
        "codes": {str(code): count for code, count in sorted(Counter(v["code"] for v in verdicts).items())},
        "slowest": {key: slowest.get(key) for key in ("number", "name", "seconds")},
        "largest_growth": max((v.get("grown", 0) for v in verdicts), default=0),
        "faulty": len(faulty),
        "crashes": len(crashed),
        "faults": faulty,
    }


if __name__ == "__main__":
    sys.exit(main())
