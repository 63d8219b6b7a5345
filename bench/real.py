"""Measure models of others and the embedded ones: fixed ratios, searches, int8, and two other tools beside them.

    python -m bench.real FOLDER [--models a,b] [--ways a,b] [--out bench/results/real.json]

FOLDER is laid out as in `bench/loss_against_agreement.py`.  Every way of WAYS writes a file from the same calibration
samples; agreement with the original is counted on held-out samples, and the files of a model are timed in turn on one
thread.  Needs onnxsim in the same interpreter, or PYTHONPATH=FOLDER_WITH_IT; without it, its rows say so.  A finished
model is written at once, and replaces its rows in the file.  `docs/real_models_page.py` shows the results.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import version_converter
from onnxruntime.quantization import CalibrationDataReader, quantize_static

import onnxgrail
from bench.loss_against_agreement import SAMPLES, reader_of
from onnxgrail import models
from onnxgrail.calibration.feeds.data import read_apart
from onnxgrail.calibration.feeds.reading import Sampling
from onnxgrail.calibration.feeds.signature import signature_of
from onnxgrail.errors import OnnxGrailError
from onnxgrail.graph.io import model_file

RESULTS = Path(__file__).with_name("results") / "real.json"
WORKER = Path(__file__).parent / "fidelity" / "onnxsim_worker.py"
LIMIT = 900  # seconds that onnxsim may take
GROUPS = 16  # of held-out samples, for the interval of the agreement
OPSET = 17  # for the second try of ONNX Runtime's quantizer, which needs 13 for scales per channel
ROUNDS = 101

Feed = dict[str, Any]
Outputs = list[list[np.ndarray[Any, Any]]]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with samples for the fits and for judging; `judge` gets outputs of ours and of the original."""

    name: str
    model: Path
    calib: list[Feed]
    held: list[Feed]
    stacked: bool  # samples can be joined to a batch
    judge: Callable[[Outputs, Outputs], tuple[str, float]]


def ours(**choices: Any) -> Callable[[Subject, Path], str]:
    """Return a way that calls `onnxgrail.compress` with these choices."""

    def way(subject: Subject, file: Path) -> str:
        data: Any = subject.calib
        if subject.stacked:
            data = {key: np.concatenate([feed[key] for feed in subject.calib]) for key in subject.calib[0]}
        onnxgrail.compress(subject.model, file, data=data, **choices)
        return ""

    return way


def by_onnxsim(base: str, repair: str = "none") -> Callable[[Subject, Path], str]:
    """Return a way that calls onnxsim in a process of its own."""

    def way(subject: Subject, file: Path) -> str:
        if importlib.util.find_spec("onnxsim") is None:
            raise ValueError("onnxsim is not installed")
        data = file.with_suffix(".npz")
        np.savez(data, **{key: np.stack([feed[key] for feed in subject.calib]) for key in subject.calib[0]})
        words = [sys.executable, str(WORKER), str(subject.model), str(data), str(file), base, "0.1", repair, "feeds"]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT)
        if done.returncode:
            raise ValueError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        return ""

    return way


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """The calibration samples, one after another."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> Feed | None:
        """Return the next sample."""
        return next(self._feeds, None)


def by_runtime(subject: Subject, file: Path) -> str:
    """Quantize with ONNX Runtime: per channel, otherwise its defaults; where that fails, again at a newer opset."""
    try:
        quantize_static(subject.model, file, Reader(subject.calib), per_channel=True)
        session(file)
    except Exception as error:
        known = onnx.load(subject.model)
        if known.opset_import[0].version >= OPSET:
            raise
        source = file.with_suffix(".source.onnx")
        onnx.save(version_converter.convert_version(known, OPSET), source)
        quantize_static(source, file, Reader(subject.calib), per_channel=True)
        return f"fails as it is ({reason(error)}); converted to opset {OPSET} first"
    return ""


WAYS: Mapping[str, Callable[[Subject, Path], str]] = {
    "none": ours(ratio=0.1, compensate="none"),
    "grail": ours(ratio=0.1, compensate="grail"),
    "best": ours(ratio=0.1),
    "loss 1 %": ours(),
    "loss 5 %": ours(max_loss="5%"),
    "loss 1 %, bytes": ours(minimize="size"),
    "int8": ours(ratio=0.0, quantize="int8"),
    "ORT int8": by_runtime,
    "onnxsim": by_onnxsim("simplify"),
    "onnxsim, pruned": by_onnxsim("wanda", "finetune"),
}


def main() -> None:
    """Parse the options, measure, and write the results after every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--models", help="names, separated by commas")
    parser.add_argument("--ways", help="names, separated by semicolons", default=";".join(WAYS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    ort.set_default_logger_severity(4)
    wanted = args.models.split(",") if args.models else None
    for subject in subjects(args.folder):
        if wanted is None or subject.name in wanted:
            found = measured(subject, args.ways.split(";"))
            data = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"models": {}}
            data["models"][subject.name] = found
            args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def subjects(folder: Path | None) -> Iterator[Subject]:
    """Yield the embedded models, then those of a folder."""
    for name in models.names():
        embedded = models.load(name)
        signature = signature_of(model_file.load(embedded.model))
        calib = read_apart(embedded.calibration, signature, 0, Sampling(batch_size=1))[0]
        with np.load(embedded.heldout) as file:
            held = {key: file[key][:SAMPLES] for key in file.files if key != "labels"}
        yield Subject(
            name=name,
            model=Path(embedded.model),
            calib=[dict(feed) for feed in calib],
            held=[dict(feed) for feed in read_apart(held, signature, 0, Sampling(batch_size=1))[0]],
            stacked=True,
            judge=same,
        )
    if folder is not None:
        yield from foreign(folder)


def foreign(folder: Path) -> Iterator[Subject]:
    """Yield the models of a folder, read by its `real.py`."""
    real = reader_of(folder)
    for name in real.MODELS:
        yield Subject(
            name=name,
            model=folder / "models" / f"{name}.onnx",
            calib=real.feeds(name, "calib"),
            held=real.feeds(name, "held"),
            stacked=name not in real.SINGLE,
            judge=lambda a, b, name=name: real.judged(name, a, b),
        )


def same(a: Outputs, b: Outputs) -> tuple[str, float]:
    """Return the share of samples, or of tokens, with the same highest score."""
    pairs = zip(a, b, strict=True)
    return "top-1", float(np.mean([np.mean(x[0].argmax(-1) == y[0].argmax(-1)) for x, y in pairs]))


def measured(subject: Subject, ways: Sequence[str]) -> dict[str, Any]:
    """Return the rows of a model: a file per way, judged, weighed, and timed with the others in turn."""
    wanted, rows = outputs(subject.model, subject.held), []
    with tempfile.TemporaryDirectory(prefix="real-") as folder:
        files = {}
        for number, way in enumerate(ways):
            file = Path(folder) / f"{number}.onnx"
            rows.append(row(subject, way, file, wanted))
            files |= {way: file} if "failed" not in rows[-1] else {}
        timed = onnxgrail.bench(subject.model, *files.values(), data=[subject.held[0]], rounds=ROUNDS, threads=1)
        dense, *times = (timing.times for timing in timed.rows)
        for one, time in zip((r for r in rows if "failed" not in r), times, strict=True):
            one |= {"median_ms": time.median, "ratio": time.ratio, "interval": time.interval}
            print(subject.name, json.dumps(one), file=sys.stderr, flush=True)
    return {
        "date": timed.date,
        "machine": timed.machine,
        "environment": dict(timed.environment),
        "rounds": timed.rows[0].rounds,
        "samples": {"calib": len(subject.calib), "held": len(subject.held)},
        "bytes": subject.model.stat().st_size,
        "median_ms": dense.median,
        "rows": rows,
    }


def row(subject: Subject, way: str, file: Path, wanted: Outputs) -> dict[str, Any]:
    """Write a file in one way, and return how it agrees and what it weighs, or why there is none."""
    try:
        note = WAYS[way](subject, file)
        found = outputs(file, subject.held)
    except Exception as error:  # noqa: BLE001 - whatever a tool raises is its result
        print(subject.name, way, error, file=sys.stderr, flush=True)
        return {"way": way, "failed": reason(error), "refused": isinstance(error, OnnxGrailError)}
    measure, value, error = agreement(subject, found, wanted)
    compared = onnxgrail.compare(subject.model, file, data=[subject.held[0]])
    a, b = compared.a, compared.b
    return {
        "way": way,
        "note": note,
        "measure": measure,
        "agreement": value,
        "error": error,
        "bytes": round(b.bytes / a.bytes, 4),
        "macs": round(b.macs / a.macs, 4) if a.macs and b.macs else None,
    }


def agreement(subject: Subject, found: Outputs, wanted: Outputs) -> tuple[str, float, float]:
    """Return the measure, its value, and half of its 95 % interval, from a jackknife over groups of samples."""
    measure, value = subject.judge(found, wanted)
    groups = min(GROUPS, len(found))
    parts = []
    for group in range(groups):
        left = [n for n in range(len(found)) if n % groups != group]
        parts.append(subject.judge([found[n] for n in left], [wanted[n] for n in left])[1])
    spread = float(np.sqrt((groups - 1) / groups * np.sum((np.array(parts) - np.mean(parts)) ** 2)))
    return measure, round(float(value), 4), round(1.96 * spread, 4)


def outputs(file: Path, feeds: Sequence[Feed]) -> Outputs:
    """Return the outputs of a file for every sample."""
    opened = session(file)
    return [opened.run(None, feed) for feed in feeds]


def session(file: Path) -> ort.InferenceSession:
    """Open a file on one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def reason(error: Exception) -> str:
    """Return what a tool said, on one line and short."""
    text = re.sub(r"\S*/(?=\S)", "", " ".join(str(error).split())).replace("|", "/")
    return text.split(" Hint:")[0][:200]


if __name__ == "__main__":
    main()
