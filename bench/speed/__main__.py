"""`python -m bench.speed`: measure, print JSON, write the page."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.speed import page, rivals
from bench.speed.cells import Cell, cells, measure, minilm

BESIDE = ("MiniLM", "resnet50")  # rows for which other tools are measured too
ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, and write all results."""
    args = options().parse_args(argv)
    data: dict[str, Any] = {"environment": {}, "rows": {}}
    if args.out.exists():
        data = json.loads(args.out.read_text(encoding="utf-8"))
    if not args.page_only:
        data["environment"] = environment(args.threads, args.rounds)
        for cell in wanted(args):
            with tempfile.TemporaryDirectory(prefix="speed-", dir=args.work) as folder:
                row = measure(cell, Path(folder), threads=args.threads, rounds=args.rounds)
                _keep(data, cell.name if not cell.latency else f"latency: {cell.name}", row, args.out)
                if args.onnxsim and cell.name in BESIDE:
                    row = rivals.onnxsim(args.onnxsim, cell, Path(folder), args.threads)
                    _keep(data, row["name"], row, args.out)
        if args.torch_pruning:
            row = rivals.torch_pruning(args.torch_pruning, args.threads)
            _keep(data, row["name"], row, args.out)
    args.page.write_text(page.page(data), encoding="utf-8")


def _keep(data: dict[str, Any], name: str, row: dict[str, Any], out: Path) -> None:
    data["rows"][name] = row
    print(json.dumps(row), flush=True)
    out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.speed", description=__doc__)
    parser.add_argument("--only", nargs="+", help="rows, or groups of rows (models, depth, width, samples, latency)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of ONNX Runtime and of BLAS")
    parser.add_argument("--minilm", type=Path, metavar="DIR", help="folder of minilm.dynamo.onnx and calib128.npz")
    parser.add_argument("--onnxsim", metavar="PYTHON", help="an interpreter with onnxsim, for rows beside ours")
    parser.add_argument("--torch-pruning", metavar="PYTHON", help="one with torch, transformers and torch-pruning")
    parser.add_argument("--work", type=Path, help="folder for models and data (some GB)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "speed.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--page-only", action="store_true", help="only write the page from what is measured")
    return parser


def wanted(args: argparse.Namespace) -> list[Cell]:
    """Return the requested rows."""
    every = [*(minilm(args.minilm) if args.minilm else []), *cells()]
    unknown = set(args.only or ()) - {name for cell in every for name in (cell.name, cell.group)}
    if unknown:
        sys.exit(f"no such row or group: {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in every)}")
    return [cell for cell in every if not args.only or cell.name in args.only or cell.group in args.only]


def environment(threads: int, rounds: int) -> dict[str, Any]:
    """Return the versions and settings that the numbers depend on."""
    from onnxgrail.calibration.runtime.session import CPU
    from onnxgrail.commands.demo import machine
    from onnxgrail.report.environment import environment as versions

    known = versions(providers=CPU, threads=threads)
    kernels = {"openblas_coretype": os.environ.get("OPENBLAS_CORETYPE")}  # null: the choice of OpenBLAS
    return {**known, **kernels, "machine": machine(), "rounds": rounds, "date": datetime.now(UTC).date().isoformat()}


if __name__ == "__main__":
    main()
