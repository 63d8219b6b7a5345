"""Measure how much more the search removes than uniform widths at the same loss.

    python -m bench.against_uniform [FOLDER] [--minilm MODEL CALIB HELDOUT] [--models a,b] [--limits 0.01 0.05]

The search minimizes parameters within a limit.  Its file is judged on held-out samples that neither way has seen; then
the smallest file with uniform widths (`--target-params`, `--allocate uniform`) that loses no more there is found by
bisection.  All other options are the defaults, for both.  Models are those of `bench/loss_against_agreement.py`, and a
sentence encoder with files of tokens (bench/minilm_export.py, bench/minilm_text.py).  A finished row replaces the one
in the results.  `docs/fidelity.md` shows the table.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import onnxgrail
from bench.loss_against_agreement import Subject, judged, same, subjects
from onnxgrail.errors import OnnxGrailError
from onnxgrail.fidelity.loss import losses_of
from onnxgrail.graph.cost import counting
from onnxgrail.graph.io import model_file

RESULTS = Path(__file__).resolve().parent / "results" / "against_uniform.json"
STEPS = 7  # of the bisection: within 1 % of the parameters
TITLE = """\
## At the same loss

Parameters that go at the same mean loss on held-out samples (`bench/against_uniform.py`, {date}): the search of
`--max-loss L --minimize params`, and the largest cut with uniform widths that loses no more, found by bisection to 1 %
of the parameters. The loss is the measured one, not the limit. One run each; no intervals.

| model | L | loss | search | uniform | ratio |
| --- | ---: | ---: | ---: | ---: | ---: |
"""


def main() -> None:
    """Parse the options, measure, and write the results after every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--minilm", nargs=3, type=Path, metavar=("MODEL", "CALIB", "HELDOUT"))
    parser.add_argument("--models", help="names, separated by commas")
    parser.add_argument("--limits", nargs="+", type=float, default=(0.01, 0.05))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    wanted = args.models.split(",") if args.models else None
    rows = json.loads(args.out.read_text(encoding="utf-8"))["rows"] if args.out.exists() else []
    with tempfile.TemporaryDirectory(prefix="uniform-") as folder:
        for subject in (*subjects(args.folder), *([encoder(*args.minilm)] if args.minilm else [])):
            for limit in args.limits if wanted is None or subject.name in wanted else ():
                rows = [r for r in rows if (r["model"], r["limit"]) != (subject.name, limit)]
                rows.append(row(subject, limit, Path(folder) / "o.onnx"))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                date = datetime.now(UTC).date().isoformat()
                args.out.write_text(json.dumps({"date": date, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def encoder(model: Path, calibration: Path, heldout: Path) -> Subject:
    """Return the sentence encoder with its tokens."""
    return Subject(name="MiniLM", model=model, data=calibration, held=dict(np.load(heldout)), judge=same)


def row(subject: Subject, limit: float, file: Path) -> dict[str, Any]:
    """Return the shares of the parameters that the search and uniform widths remove at the search's loss."""
    known: dict[str, Any] = {"model": subject.name, "limit": limit}
    try:
        onnxgrail.compress(subject.model, file, data=subject.data, max_loss=limit, minimize="params", force=True)
    except OnnxGrailError as error:
        return {**known, "refused": str(error)}
    loss, gone = measured(subject, file)
    low, high, allowed = 0.0, 1.0, 0.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        try:
            onnxgrail.compress(
                subject.model,
                file,
                data=subject.data,
                target_params=f"{100 * (1 - middle):.4g}%",
                allocate="uniform",
                force=True,
            )
        except OnnxGrailError:  # out of reach
            high = middle
            continue
        found, less = measured(subject, file)
        if found <= loss:
            low, allowed = middle, max(allowed, less)
        else:
            high = middle
    return {**known, "loss": float(f"{loss:.4g}"), "search": round(gone, 4), "uniform": round(allowed, 4)}


def measured(subject: Subject, file: Path) -> tuple[float, float]:
    """Return the mean loss of a file on held-out samples, and the share of the parameters that are gone."""
    before, after = (counting.parameters(model_file.load(path)) for path in (subject.model, file))
    return losses_of(judged(subject, file))[0].mean, 1 - after / before


def table(data: Mapping[str, Any]) -> str:
    """Return the section of `docs/fidelity.md`."""
    rows: Sequence[Mapping[str, Any]] = [row for row in data["rows"] if "search" in row]
    lines = [
        f"| {r['model']} | {r['limit']:.0%} | {r['loss']:.2%} | −{r['search']:.1%} | −{r['uniform']:.1%} | "
        f"{r['search'] / r['uniform']:.2f} |\n".replace("%", " %")
        for r in rows
    ]
    return TITLE.format(date=data["date"]) + "".join(lines)


if __name__ == "__main__":
    main()
