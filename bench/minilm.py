"""Measure the cost of compression for a trained sentence encoder: fidelity on held-out text, size and time.

    python bench/minilm.py [--work DIR] > minilm.json

Exports all-MiniLM-L6-v2 with both exporters of PyTorch (see minilm_export.py), compresses each with and without
compensation on 128 x 128 real tokens, and compares sentence embeddings with those of the dense model on unseen text of
the same kind (see minilm_text.py).  JSON on stdout, a table on stderr.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import minilm_export
import minilm_text
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Tokens = dict[str, npt.NDArray[np.int64]]

SETTINGS: tuple[dict[str, Any], ...] = (
    {"blocks": ("mlp",), "unit_ratio": 0.3, "selector": "wanda"},
    {"blocks": ("heads",), "unit_ratio": 0.25, "selector": "wanda"},
)
COMPENSATIONS: dict[str, dict[str, Any]] = {
    "none": {"compensate": "none"},
    "grail, open loop": {"compensate": "grail", "closed_loop": False},
    "grail, closed loop": {"compensate": "grail", "closed_loop": True},
}
BATCH = 8
PACKAGES = ("onnxgrail", "numpy", "scipy", "onnx", "onnx-ir", "onnxruntime", "torch", "transformers")
COLUMNS = ("form", "blocks", "ratio", "compensate", "cosine", "blocks_narrowed", "params_after", "seconds", "forwards")


def load_tokens(path: Path) -> Tokens:
    """Load the arrays of a token file."""
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}


def session(path: Path, threads: int) -> Any:
    """Open an ONNX Runtime session; 0 threads leaves the choice to ONNX Runtime."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def hidden_states(runner: Any, tokens: Tokens) -> Floats:
    """Return the last hidden state of every sequence, computed in batches."""
    parts = []
    for start in range(0, len(tokens["input_ids"]), BATCH):
        feed = {name: array[start : start + BATCH] for name, array in tokens.items()}
        parts.append(runner.run(["last_hidden_state"], feed)[0])
    return np.concatenate(parts)


def embeddings(states: Floats, mask: npt.NDArray[np.int64]) -> Floats:
    """Return sentence embeddings as the encoder was trained for: mean over real tokens, then unit length."""
    weight = mask[:, :, None].astype(np.float32)
    mean = (states * weight).sum(axis=1) / weight.sum(axis=1)
    unit: Floats = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    return unit


def forward_seconds(runner: Any, tokens: Tokens) -> float:
    """Measure the seconds of one forward pass over all sequences, after a warm-up."""
    hidden_states(runner, {name: array[:BATCH] for name, array in tokens.items()})
    return _timed(lambda: hidden_states(runner, tokens))[1]


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    value = call()
    return value, time.perf_counter() - start


def measure(form: str, model: Path, out: Path, data: Mapping[str, Path], threads: int) -> list[dict[str, Any]]:
    """Return a row per setting and compensation for an exported form."""
    calib, heldout = (load_tokens(data[split]) for split in minilm_text.SPLITS)
    mask = heldout["attention_mask"]
    dense = session(model, threads)
    reference = embeddings(hidden_states(dense, heldout), mask)
    rows = []
    for setting in SETTINGS:
        for label, compensation in COMPENSATIONS.items():
            # Measured before and after the call, because the load of the machine varies.
            before = forward_seconds(dense, calib)
            result, seconds = compress(model, out, data["calib"], {**setting, **compensation})
            forward = (before + forward_seconds(dense, calib)) / 2
            slim = embeddings(hidden_states(session(out, threads), heldout), mask)
            cosines = np.sum(slim.astype(np.float64) * reference, axis=1)
            row = {
                "form": form,
                "blocks": ",".join(setting["blocks"]),
                "ratio": setting["unit_ratio"],
                "selector": setting["selector"],
                "compensate": label,
                "cosine": float(cosines.mean()),
                "cosine_worst": float(cosines.min()),
                **result,
                "seconds": seconds,
                "forward_seconds": forward,
                "forwards": seconds / forward,
            }
            rows.append(row)
            print("  ".join(_cell(row[name]) for name in COLUMNS), file=sys.stderr)
    return rows


def compress(model: Path, out: Path, calib: Path, options: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Compress; return the numbers of the report, and the seconds of the whole call (tracing to verification)."""
    import onnxgrail

    result, seconds = _timed(
        lambda: onnxgrail.compress(model, out, data=calib, held_out=0, batch_size=BATCH, force=True, **options)
    )
    report = result.report.data
    found = [block for block in report["blocks"] if block["kind"] in options["blocks"]]
    row = {
        "blocks_found": len(found),
        "blocks_narrowed": sum(block["kept"] < block["units"] for block in found),
        "params_before": report["model"]["params_before"],
        "params_after": report["model"]["params_after"],
        "timing": dict(report["timing"]),
    }
    return row, seconds


def environment(threads: int) -> dict[str, Any]:
    """Return the versions and settings that the numbers depend on."""
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "threads": threads or "chosen by ONNX Runtime",
        "cpu": _cpu(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} logical)" if names else platform.processor() or platform.machine()


def _cell(value: object) -> str:
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    return text.rjust(18)


def main(argv: Sequence[str] | None = None) -> None:
    """Run every setting on every form and print the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = minilm_export.DEFAULT_CACHE
    parser.add_argument("--cache", type=Path, default=cache, help="folder for the package with the weights")
    parser.add_argument("--work", type=Path, default=cache / "minilm", help="folder for models and token files")
    parser.add_argument("--form", choices=minilm_export.FORMS, action="append", help="only this export; repeatable")
    parser.add_argument("--threads", type=int, default=0, help="of the plain forward; 0 is ONNX Runtime's own choice")
    args = parser.parse_args(argv)
    work = args.work.expanduser()
    models = minilm_export.ensure(work, args.cache, tuple(args.form or minilm_export.FORMS))
    data = minilm_text.ensure(work, args.cache)
    print("  ".join(_cell(name) for name in COLUMNS), file=sys.stderr)
    rows = []
    for form, model in models.items():
        rows += measure(form, model, work / f"minilm.{form}.slim.onnx", data, args.threads)
    print(json.dumps({"bench": "minilm", **environment(args.threads), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
