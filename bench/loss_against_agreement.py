"""Measure the loss of compressed models beside their counted agreement with the original.

    python bench/loss_against_agreement.py [FOLDER] [--models a,b] [--ratios 0.02 0.05] [--keep DIR] > results.json

Every model is compressed at some ratios with the default options, and both numbers are measured on held-out samples.
The models are the embedded ones, and those of FOLDER, if given: it has `models/NAME.onnx` and a `real.py` with `MODELS`
(names), `SINGLE` (names of models with one sample per feed), `arrays` and `feeds` (inputs of a model by half: calib or
held), `run` (outputs of a file) and `judged` (name and value of the agreement).  With --keep, compressed models stay in
DIR, and those that are there are not compressed again.  `docs/loss_page.py` shows the results.  JSON on stdout,
progress on stderr.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.both import Pair, run_both
from onnxgrail.calibration.feeds.data import read_apart
from onnxgrail.calibration.feeds.signature import signature_of
from onnxgrail.errors import OnnxGrailError
from onnxgrail.fidelity import Tally
from onnxgrail.fidelity.loss import Loss, losses_of
from onnxgrail.fidelity.measures import SCALES
from onnxgrail.graph.io import model_file

RATIOS = (0.02, 0.05, 0.1, 0.2, 0.3)
SAMPLES = 256  # held-out samples of an embedded model
SHOWN = 4  # outputs of a model in the results, the worst ones


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with data for the fits and for judging; `judge` returns name and value of the counted agreement."""

    name: str
    model: Path
    data: Any
    held: Any
    judge: Callable[[Path, Tally], tuple[str, float]]


def main() -> None:
    """Parse the options, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--models", help="names, separated by commas")
    parser.add_argument("--ratios", nargs="+", type=float, default=RATIOS)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    wanted = args.models.split(",") if args.models else None
    with tempfile.TemporaryDirectory(prefix="loss-") as temporary:
        keep = args.keep or Path(temporary)
        keep.mkdir(parents=True, exist_ok=True)
        rows = []
        for subject in subjects(args.folder):
            for ratio in args.ratios if wanted is None or subject.name in wanted else ():
                rows.append(row(subject, ratio, keep))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    json.dump({"version": onnxgrail.__version__, "scales": dict(SCALES), "rows": rows}, sys.stdout, indent=1)
    print()


def subjects(folder: Path | None) -> Iterator[Subject]:
    """Yield the embedded models, then those of a folder."""
    for name in models.names():
        embedded = models.load(name)
        held = {key: array[:SAMPLES] for key, array in np.load(embedded.heldout).items() if key != "labels"}
        yield Subject(name=name, model=embedded.model, data=embedded.calibration, held=held, judge=same)
    if folder is not None:
        yield from foreign(folder)


def same(_: Path, tally: Tally) -> tuple[str, float]:
    """Return the share of samples, or of tokens, with the same highest score."""
    (verdict,) = tally.results()[0].verdicts
    value = verdict.details["agreement"] if verdict.kind == "tokens" else verdict.value
    return "top-1", float("nan") if value is None else value


def reader_of(folder: Path) -> ModuleType:
    """Import the `real.py` of a folder, which reads its models and data."""
    spec = importlib.util.spec_from_file_location("real", folder / "real.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{folder / 'real.py'} cannot be imported")
    real = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(real)
    return real


def foreign(folder: Path) -> Iterator[Subject]:
    """Yield the models of a folder, read by its `real.py`."""
    real = reader_of(folder)
    for name in real.MODELS:
        single = name in real.SINGLE
        calib, held = (real.feeds(name, half) if single else real.arrays(name, half) for half in ("calib", "held"))
        path = folder / "models" / f"{name}.onnx"
        yield Subject(name=name, model=path, data=calib, held=held, judge=own(real, name, path))


def own(real: Any, name: str, original: Path) -> Callable[[Path, Tally], tuple[str, float]]:
    """Return a judge that uses the measure of `real.py`."""

    def judge(file: Path, _: Tally) -> tuple[str, float]:
        held = real.feeds(name, "held")
        measure, value = real.judged(name, real.run(file, held), real.run(original, held))
        return measure, float(value)

    return judge


def row(subject: Subject, ratio: float, folder: Path) -> dict[str, Any]:
    """Compress a model at a ratio, and return its loss and its agreement."""
    known: dict[str, Any] = {"model": subject.name, "ratio": ratio}
    file = folder / f"{subject.name}-{ratio:g}.onnx"
    try:
        if not file.exists():
            onnxgrail.compress(subject.model, file, data=subject.data, ratio=ratio)
    except OnnxGrailError as error:
        return {**known, "refused": str(error)}
    tally = judged(subject, file)
    measure, value = subject.judge(file, tally)
    losses = losses_of(tally)
    size = file.stat().st_size / subject.model.stat().st_size
    return {
        **known,
        "file": round(size, 3),
        "measure": measure,
        "agreement": round(value, 4),
        "samples": len(losses[0].values),
        "outputs": [entry(loss) for loss in losses[:SHOWN]],
    }


def judged(subject: Subject, file: Path) -> Tally:
    """Run both models on the held-out samples."""
    batches = read_apart(subject.held, signature_of(model_file.load(subject.model)), 0)[0]
    return run_both(Pair(subject.model, file), batches, texts=True)


def entry(loss: Loss) -> dict[str, Any]:
    """Return a loss as plain data."""
    return {
        "output": loss.output,
        "part": loss.part,
        "kind": loss.kind,
        "name": loss.name,
        "mean": float(f"{loss.mean:.4g}"),
        "bound": float(f"{loss.bound:.4g}"),
        "measure": loss.agreement.measure,
        "agreement": loss.agreement.value,
    }


if __name__ == "__main__":
    main()
