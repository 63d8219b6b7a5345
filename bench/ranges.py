"""Errors of models whose layers all compute in 8 bits, by the way in which ranges of activations are chosen.

    python -m bench.ranges [FOLDER] [--models a,b] [--markdown]

FOLDER is laid out as in `bench/loss_against_agreement.py`.  Ranges and biases come from calibration samples; errors are
those of the outputs on held-out samples, as shares of their energy, averaged over the outputs.  `--markdown` prints the
table of `docs/deploy.md` from the stored results.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from bench.real import Subject, subjects
from onnxgrail.calibration.quantize import FIRST_OPSET
from onnxgrail.calibration.quantize.eight import LAYERS, Source, by_tool
from onnxgrail.calibration.quantize.form import FEW
from onnxgrail.calibration.quantize.prepare import prepare
from onnxgrail.calibration.quantize.ranges import shares_of
from onnxgrail.calibration.quantize.shifts import shifts_in_8_bits
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.graph.bits.folded import lifted
from onnxgrail.graph.bits.ranges import narrow, ranges_of, shift
from onnxgrail.graph.io.model_file import load, save
from onnxgrail.graph.io.opset import opset_of, raised
from onnxgrail.graph.io.serial import to_bytes

RESULTS = Path(__file__).with_name("results") / "ranges.json"
WAYS = ("least and greatest values", "squared error", "and biases")

Outputs = list[list[np.ndarray[Any, Any]]]


def main() -> None:
    """Parse the options, measure, and write the results after every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--models", help="names, separated by commas")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    data = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"models": {}}
    if args.markdown:
        print(markdown(data))
        return
    for subject in subjects(args.folder):
        if args.models is None or subject.name in args.models.split(","):
            data["models"][subject.name] = dict(errors(subject))
            data["date"] = datetime.now(UTC).date().isoformat()
            print(subject.name, data["models"][subject.name], flush=True)
            RESULTS.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def errors(subject: Subject) -> Iterator[tuple[str, float]]:
    """Yield the error of a model by the ways of `WAYS`."""
    with tempfile.TemporaryDirectory(prefix="ranges-") as folder:
        source, prepared = Path(folder) / "source.onnx", Path(folder) / "prepared.onnx"
        model = load(subject.model)
        save(lifted(model if opset_of(model) >= FIRST_OPSET else raised(model, FIRST_OPSET)), source)
        prepare(source, prepared)
        ready = load(prepared)
        wanted = outputs(ready, subject)
        few = subject.calib[:: max(1, len(subject.calib) // FEW)][:FEW]
        for way in WAYS:
            with redirect_stdout(StringIO()):
                whole = by_tool(Source(prepared, ready, {}, {}), subject.calib, Path(folder) / "target.onnx")
            if way != WAYS[0]:
                narrow(whole, shares_of(ready, ranges_of(whole), few, LAYERS))
            if way == WAYS[-1]:
                shift(whole, shifts_in_8_bits(ready, whole, subject.calib))
            yield way, distance(outputs(whole, subject), wanted)


def outputs(model: ir.Model, subject: Subject) -> Outputs:
    """Return the outputs for all held-out samples."""
    with open_session(to_bytes(model)) as session:
        return [list(session.run(feed).values()) for feed in subject.held]


def distance(found: Outputs, wanted: Outputs) -> float:
    """Return the energy of errors as a share of the outputs' energy, averaged over the outputs."""
    parts = []
    for number in range(len(wanted[0])):
        a, b = (np.concatenate([np.ravel(one[number]) for one in each]).astype(np.float64) for each in (found, wanted))
        parts.append(np.square(a - b).sum() / max(np.square(b).sum(), np.finfo(np.float32).tiny))
    return float(np.mean(parts))


def markdown(data: dict[str, Any]) -> str:
    """Return the table of the page."""
    lines = ["| model | " + " | ".join(WAYS) + " |", "|---|" + "---:|" * len(WAYS)]
    rows: Sequence[tuple[str, dict[str, float]]] = list(data["models"].items())
    lines += [f"| `{name}` | " + " | ".join(f"{row[way]:.2g}" for way in WAYS) + " |" for name, row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
