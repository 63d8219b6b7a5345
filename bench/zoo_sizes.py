"""Narrow every graph of a zoo, and fail if a file grows or the number of parameters differs from the prediction.

    python bench/zoo_sizes.py ZOO [--only SUBSTRING] [--unit-ratio 0.25 0.5] [--options '{"compensate": "grail"}']
    python bench/zoo_sizes.py FOLDER_OF_ONNX_FILES

ZOO is a folder as for `bench/zoo_coverage.py`; a folder of models works too, with random inputs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnxgrail
from onnxgrail.calibration.prepare import prepare
from onnxgrail.core import Recipe
from onnxgrail.graph.cost import counting
from onnxgrail.machine.job import Job


def models(folder: Path, only: str, scratch: Path) -> Iterator[tuple[str, Path, Any]]:
    """Yield every model as a file, with its name and data."""
    if not (folder / "manifest.json").exists():
        yield from ((path.stem, path, None) for path in sorted(folder.glob("*.onnx")) if only in path.stem)
        return
    sys.path.insert(0, str(folder))
    import conformance
    import skeleton

    for entry in json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["models"]:
        if only in entry["name"] and entry.get("runs", True):
            path = scratch / "model.onnx"
            onnx.save(skeleton.unpack((folder / entry["file"]).read_bytes()), path)
            yield entry["name"], path, [conformance.feeds(entry)]


def verdict(path: Path, data: Any, output: Path, options: dict[str, Any]) -> tuple[str, str]:
    """Return the result for a model (ok, nothing, LARGER, MISCOUNTED or FAILED), with numbers or a reason."""
    output.unlink(missing_ok=True)
    try:
        report = onnxgrail.compress(path, output, data=data, **options).report.data
    except onnxgrail.NothingToCompressError as error:
        return ("LARGER" if "would take" in str(error) else "nothing"), str(error)
    except onnxgrail.OnnxGrailError as error:
        return "FAILED", str(error)
    before, after = path.stat().st_size, output.stat().st_size
    sizes = report["model"]
    numbers = f"{before} -> {after} bytes, {sizes['params_before']} -> {sizes['params_after']} parameters"
    if after > before:
        return "LARGER", numbers
    predicted = sizes["params_before"] - _removed(path, data, report)
    if options.get("compensate") == "none" and predicted != sizes["params_after"]:
        return "MISCOUNTED", f"{numbers}, predicted {predicted}"
    return "ok", numbers


def _removed(path: Path, data: Any, report: dict[str, Any]) -> int:
    """Return the number of parameters that the cost model counts as removed."""
    prepared = prepare(path, data, Job(recipe=Recipe(samples=2, batch_size=2)))
    dead = np.zeros(prepared.survey.ids, dtype=bool)
    kept = {block["name"]: block["kept_units"] for block in report["blocks"]}
    for block in prepared.survey.blocks:
        dead[np.delete(block.ids, kept[block.name])] = True
    return counting.removed(prepared.survey, dead)[0]


def main() -> int:
    """Print a line per model and ratio; return 1 if there is an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--unit-ratio", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--options", type=json.loads, default={"compensate": "none", "check": False})
    args = parser.parse_args()
    tally: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        for name, path, data in models(args.folder, args.only, Path(scratch)):
            for ratio in args.unit_ratio:
                found, note = verdict(path, data, Path(scratch) / "out.onnx", {**args.options, "unit_ratio": ratio})
                tally[found] += 1
                print(f"{found:10} {name:44} {ratio:g}  {note[:160]}", flush=True)
    print(dict(tally))
    return 1 if tally["LARGER"] + tally["MISCOUNTED"] + tally["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
