"""The rows of the bench: a name, a model, data, and the options of the command."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.speed import clock, nets

START = 1.0  # seconds for the interpreter and its imports, subtracted from the command
SHARE = 0.3  # of the units that go
GRAIL = ("--unit-ratio", str(SHARE))
CLOSED = ("--compensate", "grail", "--closed-loop")  # what the published rows were measured with
BEST = ("--compensate", "best")
DEPTHS = (12, 24, 48)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A row of the page.

    Attributes:
        group: table it belongs to; make: writes the model; shape: of one sample, empty if the model comes with data.
        options: of `compress`; latency: measure the compressed model instead of the command.
        work: floating-point operations of sums and solves, 0 if they are not known.
        threads: of command and forward pass, None for those of all rows.
    """

    name: str
    group: str
    make: Callable[[Path], Path]
    shape: tuple[int, ...]
    samples: int = 128
    batch: int = 8
    options: tuple[str, ...] = GRAIL
    latency: bool = False
    threads: int | None = None
    work: float = 0.0

    def written(self, folder: Path) -> tuple[Path, Path]:
        """Return the model and its data, created if they do not exist."""
        model = folder / "model.onnx"
        if not model.exists():
            model = self.make(model)
        data = model.with_suffix(".npz")
        if not data.exists():
            rng = np.random.default_rng(1)
            np.savez(data, x=rng.standard_normal((self.samples, *self.shape), dtype=np.float32))
        return model, data


def cells() -> list[Cell]:
    """Return all rows that need no external files."""
    image, conv = (3, 224, 224), ("--unit-ratio", "0.3", "--blocks", "conv")
    found = [
        Cell(name=n, group="models", make=lambda p, n=n: nets.resnet(p, n), shape=image, options=conv)  # type: ignore[misc]
        for n in nets.STAGES
    ]
    found.append(Cell(name="vit_b_32", group="models", make=nets.vit, shape=image))
    found += [_encoder(f"depth {d}", "depth", d, 256, 64, samples=128) for d in DEPTHS]
    found += [_encoder(f"depth {d}, weights inside", "depth", d, 256, 64, samples=128, inside=True) for d in DEPTHS]
    found += [_encoder(f"depth {d}, best", "depth", d, 256, 64, samples=128, more=BEST) for d in DEPTHS]
    found += [_encoder(f"width {w}", "width", 2, w, 128, samples=32) for w in (768, 1536, 3072, 4096)]
    found += [_encoder(f"width {w}, best", "width", 2, w, 128, samples=32, more=BEST) for w in (768, 1536)]
    found += [_encoder(f"samples {n}", "samples", 6, 384, 128, samples=n) for n in (32, 128, 512)]
    half = ("--unit-ratio", "0.5", "--round-to", "8", "--compensate", "none", "--selector", "l2", "--no-check")
    for name, make in (("resnet50", lambda p: nets.resnet(p, "resnet50")), ("vit_b_32", nets.vit)):
        for batch in (1, 8):
            options = (*half, "--blocks", "conv" if name == "resnet50" else "mlp,heads")
            found.append(
                Cell(
                    name=f"{name}, batch {batch}",
                    group="latency",
                    make=make,
                    shape=image,
                    samples=batch,
                    batch=batch,
                    options=options,
                    latency=True,
                )
            )
    return found


def _encoder(
    name: str,
    group: str,
    depth: int,
    width: int,
    tokens: int,
    *,
    samples: int,
    inside: bool = False,
    more: tuple[str, ...] = (),
) -> Cell:
    def make(path: Path) -> Path:
        return nets.encoder(path, depth=depth, width=width, tokens=tokens, external=not inside)

    options = (*GRAIL, *more, *(() if inside else ("--save-as-external-data",)))
    work = 0.0 if more else depth * sum(_work(samples * tokens, inputs, width) for inputs in (width, 4 * width))
    return Cell(name=name, group=group, make=make, shape=(tokens, width), samples=samples, options=options, work=work)


def _work(rows: int, inputs: int, outputs: int) -> float:
    """Return the operations of GRAIL for one layer: half of XᵀX, products with kept and dropped inputs, the solve."""
    kept = round((1 - SHARE) * inputs)
    gone = inputs - kept
    products = 2 * kept * gone + gone**2 + kept**2
    return float(rows * inputs**2 + products * outputs + kept**3 / 3 + 2 * kept**2 * outputs)


def minilm(folder: Path) -> list[Cell]:
    """Return the rows of the sentence encoder, from a folder with the model and its tokens."""

    def make(path: Path) -> Path:
        path.symlink_to((folder / "minilm.dynamo.onnx").resolve())
        path.with_suffix(".npz").symlink_to((folder / "calib128.npz").resolve())
        return path

    common = {"group": "models", "make": make, "shape": ()}
    return [
        Cell(name="MiniLM", **common),  # type: ignore[arg-type]
        Cell(name="MiniLM, best", options=(*GRAIL, *BEST), **common),  # type: ignore[arg-type]
        Cell(name="MiniLM, two threads", threads=2, **common),  # type: ignore[arg-type]
        Cell(name="MiniLM, two threads, best", threads=2, options=(*GRAIL, *BEST), **common),  # type: ignore[arg-type]
    ]


def measure(cell: Cell, folder: Path, *, threads: int, rounds: int) -> dict[str, Any]:
    """Return a row: medians over rounds in which command and forward pass alternate."""
    threads = cell.threads or threads
    model, data = cell.written(folder)
    row = {"name": cell.name, "group": cell.group, "samples": cell.samples, "batch": cell.batch}
    row |= {"threads": threads, "rounds": rounds}
    out, report = folder / "slim.onnx", folder / "report.json"
    words = [
        sys.executable,
        "-m",
        "onnxgrail",
        "compress",
        str(model),
        str(out),
        "--data",
        str(data),
        "--held-out",
        "0",
        "--force",
        "-q",
    ]
    words += ["--batch-size", str(cell.batch), "--report", str(report), *CLOSED, *cell.options]
    if cell.latency:
        clock.command(words, threads)
        return row | _latency(model, out, data, json.loads(report.read_text(encoding="utf-8")), threads)
    plain, runs, speeds = [], [], []
    for _ in range(rounds):
        speeds.append(clock.speed(threads))
        plain.append(clock.forward(model, data, threads, cell.batch))
        runs.append(clock.command(words, threads))
        plain.append(clock.forward(model, data, threads, cell.batch))
    once = {key: statistics.median(run[key] for run in plain) for key in ("seconds", "cpu")}
    whole = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return row | {
        "forward": once["seconds"],
        "forward_cpu": once["cpu"],
        **whole,
        "ratio": (whole["seconds"] - START) / once["seconds"],
        "cpu_ratio": (whole["cpu"] - START) / once["cpu"],
        "limit": once["seconds"] + cell.work / statistics.median(speeds) if cell.work else None,
        "stages": json.loads(report.read_text(encoding="utf-8"))["timing"],
    }


def _latency(model: Path, slim: Path, data: Path, report: dict[str, Any], threads: int) -> dict[str, Any]:
    """Return the milliseconds of the dense and the narrowed model, measured in turn, and measured and ideal gain."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    both = [ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]) for path in (model, slim)]
    feed = dict(np.load(data))
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(33):
        for session, spent in zip(both, times, strict=True):
            started = time.perf_counter()
            session.run(None, feed)
            if turn >= 3:
                spent.append(time.perf_counter() - started)
    dense, after = (statistics.median(spent) * 1e3 for spent in times)
    sizes = report["model"]
    ideal = sizes["macs_before"] / sizes["macs_after"]
    gain = dense / after
    return {"dense_ms": dense, "slim_ms": after, "gain": gain, "ideal": ideal, "share": (gain - 1) / (ideal - 1)}
