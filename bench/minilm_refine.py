"""Measure the gain of gradient fits over the closed form on a trained sentence encoder with half of its MLPs removed.

    python bench/minilm_refine.py [--work DIR] [--selectors wanda obs] > bench/results/minilm_refine.json

512 calibration and 256 held-out sequences of 128 tokens (minilm_text.py), on one thread.  Every stage works on the
file of the previous stage, as `--refine laco,distill` does, and is not run again if its file exists.
Seconds are those of a stage alone; on a busy machine, `cpu_seconds` is more reliable.
`share` is 1 - cosine as a share of that of wanda and closed-loop GRAIL.  JSON on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import minilm
import minilm_best
import minilm_export
import numpy as np

RATIO = 0.5
REFINES = ("laco", "distill")


class Stages:
    """The files of a work folder, each with a JSON note of its seconds and its report."""

    def __init__(self, work: Path, model: Path, calibration: Path) -> None:
        self.work, self.model, self.calibration = work, model, calibration

    def made(self, name: str, make: Callable[[Path], Any]) -> tuple[Path, dict[str, Any]]:
        """Return a file and its note, created if they do not exist."""
        path, note = self.work / f"refine.{name}.onnx", self.work / f"refine.{name}.json"
        if not note.exists():
            start, work = time.perf_counter(), time.process_time()
            data = make(path).report.data
            models = [{k: e[k] for k in ("kind", "before", "after", "epochs")} for e in data.get("refines", ())]
            said = {"params_after": data["model"]["params_after"], "seconds": time.perf_counter() - start}
            said["cpu_seconds"] = time.process_time() - work
            note.write_text(json.dumps(said | {"fits": models}))
        found: dict[str, Any] = json.loads(note.read_text())
        return path, found

    def narrowed(self, selector: str, compensate: str) -> tuple[Path, dict[str, Any]]:
        """Remove half of every MLP."""
        import onnxgrail

        choices: dict[str, Any] = {"selector": selector, "compensate": compensate, "blocks": ("mlp",)}
        choices["closed_loop"] = compensate == "grail"
        common = {
            "unit_ratio": RATIO,
            "data": self.calibration,
            "held_out": 0,
            "batch_size": minilm.BATCH,
            "check": False,
            "force": True,
        }
        return self.made(
            f"{selector}.{compensate}", lambda path: onnxgrail.compress(self.model, path, **choices, **common)
        )

    def refined(self, small: Path, name: str, kind: str) -> tuple[Path, dict[str, Any]]:
        """Refine a file further."""
        import onnxgrail

        common: dict[str, Any] = {
            "data": self.calibration,
            "held_out": 0,
            "batch_size": minilm.BATCH,
            "check": False,
            "force": True,
        }
        return self.made(
            name, lambda path: onnxgrail.refine_model(small, path, reference=self.model, refine=(kind,), **common)
        )


def main() -> None:
    """Measure all rows and print the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = minilm_export.DEFAULT_CACHE
    parser.add_argument("--cache", type=Path, default=cache, help="folder for the package with the weights")
    parser.add_argument("--work", type=Path, default=cache / "minilm", help="folder for models and token files")
    parser.add_argument("--selectors", nargs="+", default=["wanda", "obs"])
    parser.add_argument("--distill-steps", type=int, help="not the usual number")
    args = parser.parse_args()
    if args.distill_steps is not None:
        from onnxgrail.methods.refine import distill

        distill.STEPS = args.distill_steps
    work = args.work.expanduser()
    model = minilm_export.ensure(work, args.cache, ("dynamo",))["dynamo"]
    calibration, heldout = minilm_best.tokens(work, args.cache)
    mask = heldout["attention_mask"]
    stages = Stages(work, model, calibration)

    def embed(path: Path) -> Any:
        return minilm.embeddings(minilm.hidden_states(minilm.session(path, 1), heldout), mask).astype(np.float64)

    reference, rows = embed(model), list[dict[str, Any]]()

    def add(selector: str, compensate: str, refine: str, made: tuple[Path, dict[str, Any]]) -> Path:
        path, note = made
        gap = float(1.0 - np.sum(embed(path) * reference, axis=1).mean())
        share = gap / rows[0]["one_minus_cosine"] if rows else 1.0
        rows.append({"selector": selector, "compensate": compensate, "refine": refine, "one_minus_cosine": gap})
        rows[-1] |= {"share": share, **note}
        print(json.dumps(rows[-1]), file=sys.stderr)
        return path

    add("wanda", "grail", "none", stages.narrowed("wanda", "grail"))
    for selector in args.selectors:
        path = add(selector, "best", "none", stages.narrowed(selector, "best"))
        done: list[str] = []
        for kind in REFINES:
            done.append(kind)
            made = stages.refined(path, f"{selector}.{'.'.join(done)}", kind)
            path = add(selector, "best", ",".join(done), made)
    head = {"bench": "minilm_refine", **minilm.environment(1), "blocks": "mlp", "ratio": RATIO}
    head["distill_steps"] = args.distill_steps
    print(json.dumps({**head, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
