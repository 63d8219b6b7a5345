"""Measure the default widths beside uniform ones at equal parameters, on models of others.

    python -m bench.equal_params FOLDER [--models a,b] [--shares 0.15 0.3] [--out bench/results/equal_params.json]

Every model is compressed to the same parameters twice: with the widths that `--allocate auto` chooses, and with the
same share of every block (`--allocate uniform`).  All other options are the defaults.  The agreement is measured on
held-out samples by the model's purpose.  Models and measures are those of `bench/loss_against_agreement.py`.  Rows that
are in the results already are not measured again.  `docs/fidelity.md` shows the table.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxgrail
from bench.loss_against_agreement import Subject, foreign, judged
from onnxgrail.errors import OnnxGrailError
from onnxgrail.graph.cost import counting
from onnxgrail.graph.io import model_file

RESULTS = Path(__file__).resolve().parent / "results" / "equal_params.json"
WIDTHS = ("auto", "uniform")
LOWER = ("px",)  # beginnings of measures that are best at 0
TITLE = """\
## At equal parameters

Trained convolutional networks as their makers published them, calibrated with 48 to 96 samples and judged on others
(`bench/equal_params.py`). Both files are within the same `--target-params`; only the widths differ. `default` are
widths by measured loss, `uniform` takes the same share of every block.

| model | parameters | measure | default | uniform |
| --- | ---: | --- | ---: | ---: |
"""


def main() -> None:
    """Parse the options, measure what is missing, and write the results after every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", help="names, separated by commas")
    parser.add_argument("--shares", nargs="+", type=float, default=(0.15, 0.3))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    wanted = args.models.split(",") if args.models else None
    rows = json.loads(args.out.read_text(encoding="utf-8"))["rows"] if args.out.exists() else []
    with tempfile.TemporaryDirectory(prefix="equal-params-") as folder:
        for subject in foreign(args.folder):
            if not convolutional(subject.model) or (wanted is not None and subject.name not in wanted):
                continue
            for share in args.shares:
                for widths in WIDTHS:
                    if any((r["model"], r["share"], r["widths"]) == (subject.name, share, widths) for r in rows):
                        continue
                    rows.append(row(subject, share, widths, Path(folder) / "o.onnx"))
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                    found = {"version": onnxgrail.__version__, "rows": rows}
                    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def convolutional(path: Path) -> bool:
    """Return True if most nodes with weights are convolutions."""
    names = [node.op_type for node in model_file.load(path).graph]
    convolutions = sum(name in ("Conv", "ConvTranspose") for name in names)
    return convolutions > sum(name in ("MatMul", "Gemm", "LSTM", "GRU", "RNN") for name in names)


def row(subject: Subject, share: float, widths: str, file: Path) -> dict[str, Any]:
    """Compress a model to a share of its parameters, and return its agreement."""
    known: dict[str, Any] = {"model": subject.name, "share": share, "widths": widths}
    target = f"{100 * (1 - share):g}%"
    started = time.process_time()
    try:
        onnxgrail.compress(
            subject.model, file, data=subject.data, target_params=target, allocate=widths, force=True, curves=False
        )
    except OnnxGrailError as error:
        return {**known, "refused": str(error)}
    seconds = time.process_time() - started
    before, after = (counting.parameters(model_file.load(path)) for path in (subject.model, file))
    measure, value = subject.judge(file, judged(subject, file))
    return {
        **known,
        "params": round(after / before, 4),
        "measure": measure,
        "agreement": round(value, 4),
        "seconds": round(seconds, 1),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the section of `docs/fidelity.md`; models and shares without both rows have no line."""
    places: dict[tuple[str, float], dict[str, Mapping[str, Any]]] = {}
    for one in rows:
        if "agreement" in one:
            places.setdefault((one["model"], one["share"]), {})[one["widths"]] = one
    lines = []
    for (model, share), pair in places.items():
        if len(pair) == len(WIDTHS):
            values = [pair[widths]["agreement"] for widths in WIDTHS]
            best = (min if pair["auto"]["measure"].startswith(LOWER) else max)(values)
            shown = [f"**{value:.3f}**" if value == best else f"{value:.3f}" for value in values]
            lines.append(f"| {model} | −{100 * share:g} % | {pair['auto']['measure']} | {' | '.join(shown)} |\n")
    return TITLE + "".join(lines)


if __name__ == "__main__":
    main()
