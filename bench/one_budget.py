"""Loss at equal bytes: bits and widths together, beside pairs of pruning and a quantizer of ONNX Runtime.

    python -m bench.one_budget --minilm W/minilm.dynamo.onnx W/calib.npz W/heldout.npz > bench/results/one_budget.json
    python -m bench.one_budget --markdown

Subjects are the texts of few_bits.py, and losses its.  In a pair, the float model is narrowed by `--target-size` with
`--only-widths` as far as the quantizer needs to meet the same bytes.  JSON on stdout, a line per result on stderr;
`--markdown` prints the table of docs/deploy.md from the stored results.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import io
import json
import logging
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

import onnxgrail
from bench.few_bits import BLOCK, LOSSES, Loss, Row, Write, arrays, dynamic, language, sentences
from onnxgrail import models
from onnxgrail.calibration.runtime.timing import machine
from onnxgrail.errors import OnnxGrailError

RESULTS = Path(__file__).parent / "results" / "one_budget.json"
SHARES = {"char_llama": (0.25, 0.15), "minilm": (0.15,)}
OURS: Mapping[str, dict[str, Any]] = {
    "bits and widths": {},
    "--only-bits": {"only_bits": True},
    "--only-widths": {"only_widths": True},
    "--quantize int4": {"quantize": "int4"},
}
LOSS = {"char_llama": "kl", "minilm": "one_minus_cosine"}  # that the table shows
WAYS = {
    "bits and widths": "`--target-size`",
    "--only-bits": "`--target-size`, `--only-bits`",
    "--quantize int4": "`--target-size`, `--quantize int4`",
    "--only-widths": "`--target-size`, `--only-widths`",
    "widths, then RTN of MatMul": "pruning, then RTN of `MatMul`",
    "widths, then RTN of MatMul and Gather": "pruning, then RTN of `MatMul` and `Gather`",
    "widths, then quantize_dynamic": "pruning, then `quantize_dynamic`",
}
ROUNDS = 3  # most narrowings of a pair until it meets the bytes
SPARE = 0.98  # share of the bytes that a pair aims at


def nearest(*ops: str) -> Write:
    """Return a function that rounds to nearest with `MatMulNBitsQuantizer`, 4 bits in blocks with zero points."""

    def write(source: Path, target: Path) -> None:
        from onnxruntime.quantization import matmul_nbits_quantizer as tool
        from onnxruntime.quantization.quant_utils import QuantFormat

        form = tool.DefaultWeightOnlyQuantConfig(
            block_size=BLOCK, is_symmetric=False, quant_format=QuantFormat.QOperator, op_types_to_quantize=ops
        )
        made = tool.MatMulNBitsQuantizer(onnx.load(source), algo_config=form)
        made.process()
        made.model.save_model_to_file(str(target), False)

    return write


PAIRS: Mapping[str, Write] = {
    "widths, then RTN of MatMul": nearest("MatMul"),
    "widths, then RTN of MatMul and Gather": nearest("MatMul", "Gather"),
    "widths, then quantize_dynamic": dynamic,
}


def pair(write: Write, dense: Path, limit: float, target: Path, choices: Mapping[str, Any]) -> bool:
    """Narrow and quantize a model so that it takes `limit` bytes at most; False if it cannot."""
    slim = target.with_suffix(".slim.onnx")
    with contextlib.redirect_stdout(io.StringIO()):
        write(dense, target)
    size, float_bytes = target.stat().st_size, dense.stat().st_size
    for _ in range(ROUNDS):
        if size <= limit:
            return True
        float_bytes = int(float_bytes * SPARE * limit / size)
        onnxgrail.compress(dense, slim, target_size=str(float_bytes), only_widths=True, force=True, **choices)
        with contextlib.redirect_stdout(io.StringIO()):
            write(slim, target)
        size = target.stat().st_size
    return size <= limit


def rows_of(name: str, dense: Path, loss: Loss, choices: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row per size and way."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for share in SHARES[name]:
            limit, target = share * dense.stat().st_size, Path(folder) / "m.onnx"
            for way in (*OURS, *PAIRS):
                started, row = time.monotonic(), {"model": name, "share": share, "way": way}
                try:
                    if way in PAIRS:
                        met = pair(PAIRS[way], dense, limit, target, choices)
                    else:
                        given = {"target_size": f"{share:%}", "force": True, **OURS[way], **choices}
                        onnxgrail.compress(dense, target, **given)
                        met = target.stat().st_size <= limit
                    row |= {"bytes": target.stat().st_size, "met": met, **loss(target)}
                except OnnxGrailError as error:
                    row["error"] = str(error)
                rows.append({**row, "seconds": round(time.monotonic() - started)})
                print(*rows[-1].values(), sep="  ", file=sys.stderr, flush=True)
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """Return the table of the page: a column per model and size, a row per way."""
    cells = {(row["way"], row["model"], row["share"]): row for row in rows}
    cases = [(name, share) for name, shares in SHARES.items() for share in shares]
    heads = [f"`{name}`, {100 * share:.0f} %: {LOSSES[LOSS[name]][0]}" for name, share in cases]
    lines = [f"| way | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for way, told in WAYS.items():
        found = [(cells[way, name, share], LOSS[name]) for name, share in cases]
        lost = [LOSSES[key][1].format(row[key]) if row.get("met") else "out of reach" for row, key in found]
        lines.append(f"| {' | '.join([told, *lost])} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the subjects and print the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", nargs=3, type=Path, metavar=("MODEL", "CALIB", "HELDOUT"))
    parser.add_argument("--samples", type=int, default=64, help="calibration samples")
    parser.add_argument("--judged", type=int, default=96, help="held-out samples of MiniLM")
    parser.add_argument("--markdown", action="store_true", help="print the table of the stored results")
    given = parser.parse_args()
    if given.markdown:
        print(markdown(json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]))
        return
    logging.disable(logging.WARNING)
    choices = {"samples": given.samples, "held_out": 0, "check": False}
    llama = models.load("char_llama")
    dense, data = Path(llama.model), arrays(Path(llama.heldout))
    rows = rows_of("char_llama", dense, language(dense, data), {**choices, "data": llama.calibration})
    if given.minilm:
        dense, calibration, heldout = given.minilm
        data = {name: array[: given.judged] for name, array in arrays(heldout).items()}
        rows += rows_of("minilm", dense, sentences(dense, data), {**choices, "data": calibration})
    head = {"bench": "one_budget", "date": dt.datetime.now(dt.UTC).date().isoformat(), "machine": machine()}
    print(json.dumps({**head, "samples": given.samples, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
