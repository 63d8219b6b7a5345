"""`python -m bench.fidelity`: measure the missing cells, then draw the figures and write the page."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.fidelity import measure, methods, page, plots, store
from bench.fidelity.methods import Method
from bench.fidelity.subjects import DEFAULT, SUBJECTS, Subject

ROOT = Path(__file__).resolve().parents[2]
RATIOS = tuple(round(0.1 * step, 1) for step in range(1, 10))
Cell = tuple[Subject, Method, float, int]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, and write all results."""
    args = options().parse_args(argv)
    wanted, missing = methods.known(methods.chosen(args.methods))
    sim = onnxsim(args.onnxsim_python)
    if sim is None:
        missing += [method.name for method in wanted if method.external]
        wanted = [method for method in wanted if not method.external]
    for name in missing:
        print(f"left out: {name} (not installed)", file=sys.stderr)
    data = store.load(args.out)
    if not args.page_only:
        data["skipped"] = sorted({*data["skipped"], *missing} - {method.name for method in wanted})
        now = environment(sim)
        data["environment"] = data["environment"] or now
        data.setdefault("dates", {}).update(
            {method.name: now["date"] for method in wanted if method in methods.named()}
        )
        data["settings"] = {"rounds": measure.ROUNDS, "round_to": 1, "share_of_calibration": 0.5, "threads": 1}
        with tempfile.TemporaryDirectory(prefix="fidelity-") as folder:
            run(data, args, wanted, Path(folder), sim[0] if sim else None)
    figures = plots.write(data, args.docs / "img")
    (args.docs / "fidelity.md").write_text(page.page(data), encoding="utf-8")
    print(f"{len(data['cells'])} cells, {len(figures)} figures, {args.docs / 'fidelity.md'}", file=sys.stderr)


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.fidelity", description=__doc__)
    parser.add_argument(
        "--models", nargs="+", default=DEFAULT, choices=tuple(SUBJECTS), help="all but minilm if absent"
    )
    parser.add_argument("--ratios", nargs="+", type=float, default=RATIOS)
    parser.add_argument("--draws", type=int, default=3, help="halves of the calibration data")
    parser.add_argument("--methods", nargs="+", help="rows (l1/none) or groups of them (l1)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "fidelity.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the page and its figures")
    parser.add_argument("--onnxsim-python", default=sys.executable, help="an interpreter that has onnxsim >= 0.8")
    parser.add_argument("--page-only", action="store_true", help="only draw and write what is measured already")
    return parser


def onnxsim(python: str) -> tuple[Path, str] | None:
    """Return the interpreter with its version of onnxsim, None if it has no onnxsim that prunes."""
    code = "import onnxsim; onnxsim.apply_structured_pruning; print(onnxsim.__version__)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:  # no such interpreter
        return None
    return (Path(python), done.stdout.strip()) if done.returncode == 0 else None


def environment(sim: tuple[Path, str] | None) -> dict[str, Any]:
    """Return the versions and settings that the numbers depend on."""
    from onnxgrail.calibration.runtime.session import CPU
    from onnxgrail.commands.demo import machine
    from onnxgrail.report.environment import environment as versions

    known = versions(providers=CPU, threads=1)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "onnxsim": sim[1] if sim else None,
        **{name: known[name] for name in ("python", "onnx", "onnxruntime", "numpy")},
    }


def run(data: store.Data, args: argparse.Namespace, wanted: Sequence[Method], folder: Path, sim: Path | None) -> None:
    """Measure the missing cells, and save after each."""
    subjects = [SUBJECTS[name]() for name in args.models]
    for subject in subjects:
        prepare(data, subject, folder)
    done = {store.key(row) for row in data["cells"]}
    todo = [
        (subject, method, ratio, draw)
        for subject, method, ratio, draw in grid(subjects, wanted, args.ratios, args.draws)
        if (subject.name, method.name, ratio, draw) not in done
    ]
    started = time.perf_counter()
    for number, (subject, method, ratio, draw) in enumerate(todo, start=1):
        row = measure.cell(subject, method, ratio, draw, folder, sim if method.external else None)
        file = row.pop("file")
        data["cells"].append(row)
        if file is not None:
            timed(data, subject, row, file)
        store.save(args.out, data)
        spent = time.perf_counter() - started
        print(f"{number}/{len(todo)} {spent:.0f} s: {json.dumps(row)}", file=sys.stderr, flush=True)
    data["cells"].sort(key=store.key)
    data["latency"].sort(key=lambda row: (row["subject"], row["shape"]))
    store.save(args.out, data)


def grid(subjects: Sequence[Subject], wanted: Sequence[Method], ratios: Sequence[float], draws: int) -> Iterator[Cell]:
    """Yield all cells, split by split, so that a stopped run has results for all methods."""
    for draw in range(draws):
        for subject in subjects:
            for ratio in ratios:
                for method in wanted:
                    if draw < method.draws(draws) and (subject.onnxsim or not method.external):
                        yield subject, method, ratio, draw


def prepare(data: store.Data, subject: Subject, folder: Path) -> None:
    """Measure the dense model, and remove cells of an earlier model."""
    known = data["subjects"].get(subject.name)
    if known is not None and known["sha256"] == subject.sha256:
        return
    store.forget(data, subject.name)
    sizes = measure.weigh(subject.model, measure.calibration(subject, 0, folder))
    data["subjects"][subject.name] = {
        "sha256": subject.sha256,
        "blocks": list(subject.blocks),
        "metric": subject.metric,
        "score": store.finite(subject.judge(subject.model)),
        **sizes,
        "batch": len(next(iter(subject.feed.values()))),
        "calibration_samples": len(next(iter(subject.calibration.values()))) // 2,
    }


def timed(data: store.Data, subject: Subject, row: dict[str, Any], file: Path) -> None:
    """Measure the latency of a shape that has not been measured: files of the same shape take the same time."""
    known = {(entry["subject"], entry["shape"]) for entry in data["latency"]}
    if (subject.name, row["shape"]) in known or row["shape"] == "dense":
        return
    times = measure.latency(subject.model, file, subject.feed)
    data["latency"].append({"subject": subject.name, "shape": row["shape"], **times})


if __name__ == "__main__":
    main()
