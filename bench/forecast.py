"""Compare what dry runs expect with what they take.

    python -m bench.forecast [FOLDER] [--only NAME ...] [--ways WAY ...]

A dry run tells what a run will take, and then does all of it but writing. Each row is one, in a process of its own:
seconds of the clock from the call to its end, the largest resident memory of the process, and the bytes of the file
that it would write.  FOLDER has trained models of others with data and a `real.py`.  The constants of
`onnxgrail/narrowing/forecast` were fitted to the rows marked so; only the others judge them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import large_model
from bench.loss_against_agreement import subjects
from bench.speed import nets

RESULTS = Path(__file__).resolve().parent / "results" / "forecast.json"
GIVEN: Mapping[str, Any] = {"unit_ratio": 0.2}
FITTED = {  # models and choices to which the constants were fitted
    *(("encoder 768", way) for way in ("best", "grail")),
    *(("encoder 1536", way) for way in ("best", "grail")),
    *(("encoder 2048", way) for way in ("best", "grail")),
    *(("llama 512", way) for way in ("best", "grail")),
    *((name, "best") for name in ("yolox_nano", "face_landmark", "palm", "ultraface_rfb320", "selfie_seg")),
    *((name, "best") for name in ("ppocr_cls", "silero_vad", "char_llama", "digits_vit", "digits_resnet")),
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "best": GIVEN,
    "grail": {**GIVEN, "compensate": "grail"},
    "search": {"max_loss": 0.02},
}
RUN = """
import json, sys, time
import numpy as np
import onnxgrail
model, data, choices = json.loads(sys.argv[1])
feeds = dict(np.load(data))
started = time.perf_counter()
report = onnxgrail.compress(model, data=feeds, dry_run=True, **choices).report.data
taken = {"seconds": round(time.perf_counter() - started, 1), "memory": report["peak_rss_bytes"]}
print(json.dumps({"expected": report["expected"], "taken": {**taken, "disk": report["model"]["bytes_after"]}}))
"""


def main() -> None:
    """Parse the options, measure, and write the results after every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--only", nargs="+", help="models")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=tuple(WAYS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = json.loads(args.out.read_text(encoding="utf-8"))["rows"] if args.out.exists() else []
    with tempfile.TemporaryDirectory(prefix="forecast-") as folder:
        for name, model, data in models(args.folder, Path(folder)):
            for way in args.ways if args.only is None or name in args.only else ():
                rows = [row for row in rows if (row["model"], row["way"]) != (name, way)]
                rows.append({"model": name, "way": way, "fitted": (name, way) in FITTED, **row(model, data, way)})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                date = datetime.now(UTC).date().isoformat()
                found = {"date": date, "summary": summary(rows), "rows": rows}
                args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def models(real: Path | None, folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield names, models and files of data."""
    rng = np.random.default_rng(0)
    data = folder / "data.npz"
    for width in (768, 1536, 2048):
        model = nets.encoder(folder / f"{width}.onnx", depth=2, width=width, tokens=128)
        np.savez(data, x=rng.standard_normal((32, 128, width), np.float32))
        yield f"encoder {width}", model, data
    model = folder / "llama.onnx"
    large_model.write(model, depth=8, width=512, hidden=1408, heads=8, words=8000, tokens=64, dtype="fp32")
    np.savez(data, ids=rng.integers(0, 8000, (64, 64)))
    yield "llama 512", model, data
    for subject in subjects(real):
        if isinstance(subject.data, dict):
            np.savez(data, **subject.data)
            yield subject.name, subject.model, data
        elif isinstance(subject.data, Path):
            yield subject.name, subject.model, subject.data


def row(model: Path, data: Path, way: str) -> dict[str, Any]:
    """Return what a dry run expects and what it takes; an error if nothing can go."""
    words = [sys.executable, "-c", RUN, json.dumps([str(model), str(data), WAYS[way]])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:200]}
    return dict(json.loads(done.stdout))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the expected over the taken amounts: median, lowest and highest; of runs from five seconds on."""
    judged = [r for r in rows if "taken" in r and not r["fitted"] and r["taken"]["seconds"] >= 5]
    found = {}
    for amount in ("seconds", "memory", "disk"):
        shares = [r["expected"][amount] / r["taken"][amount] for r in judged]
        if shares:
            found[amount] = {"rows": len(shares)} | {
                name: round(of(shares), 2) for name, of in (("median", median), ("least", min), ("most", max))
            }
    return found


if __name__ == "__main__":
    main()
