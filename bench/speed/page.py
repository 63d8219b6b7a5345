"""Write `docs/performance.md` from the JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench.speed.cells import START

Row = Mapping[str, Any]

INTRO = """\
# Performance

This page shows how long `onnxgrail compress` takes, how much memory it needs, how fast its results are, and how to
spend less time. `python -m bench.speed` measures and writes it from `bench/results/speed.json`.

| column | meaning |
| --- | --- |
| `forward s` | one plain ONNX Runtime pass over the calibration data, with the same batches and threads |
| `command s` | the whole command, from the start of the interpreter to the written file |
| `ratio` | `command s`, less one second for the start, divided by `forward s` |
| `cpu ratio` | the same in processor seconds, which other work on the machine disturbs less |
| `limit s` | `forward s`, and the operations of sums and solves at the measured speed of a float32 product |
| `share` | `limit s` as a share of `command s` less one second |
| `anonymous MB`, `total MB` | peak memory of the process, without and with mapped files |

Medians over rounds in which all rows take turns; rounds: {rounds}. Closed-loop GRAIL, unit ratio 0.3, unless the row
says otherwise. {date}, {machine}, {threads} threads.
"""

TITLES = {
    "models": "Models",
    "rivals": "Other tools",
    "depth": "Depth at equal width (256)",
    "width": "Width (2 layers, 32 x 128 tokens)",
    "samples": "Samples (6 layers of width 384, 128 tokens each)",
}

LATENCY = """\
## Latency of the result

Ratio 0.5, `--round-to 8`. `gain` is the original latency divided by the new one, and `ideal` is the same for
multiply-accumulates. `share` is the part of the ideal gain above 1 that is reached.
"""

NOTES = """\
## Where the time goes, and how to spend less

- **Samples.** Second moments of a hidden width of four times the model's width cost about as much as the forward
  pass. Fewer samples (`--samples`) make both cheaper in proportion. `--compensate best` computes only squares,
  unless the selector needs products (`obs`, `gram`, `slimgpt`).
- **`--compensate best`** runs the original and the narrowed network once, in parallel, and sums regressors and
  targets of every layer. On MiniLM this costs 3.6 more passes, with sums and solves, 1.2 of them for the basis of the
  channels inside heads.
- **Selector.** The default eliminates units one by one (`obs`) wherever that costs less than the fits. In narrow
  networks this takes as long as a forward pass or two; `--selector wanda` needs no such time.
- **Closed loop.** After a block that was only pruned, the measured activation is kept and loses its channels in
  memory. A closed loop therefore runs each node once, mostly on the narrowed network. The next session is not
  opened while the current one runs, because it depends on the current decision. Opening sessions costs little: 0.3
  of the 10.5 processor seconds for 24 layers of width 256 (48 sessions).
- **Threads.** `OMP_NUM_THREADS` sets the threads of ONNX Runtime and of BLAS; without it, the number of physical
  cores is used. With two or more threads, parts of the batches run in parallel, at most as many as there are parts
  that are summed separately ([distributed](distributed.md)), with one BLAS thread each: several BLAS threads next
  to those of ONNX Runtime made the same sums 2.8 times slower. If the sums of two parts would need more than
  another quarter of a GiB, there is only one part, and the next batch runs while half of the threads compute the
  sums of the previous one. Half of the threads solve; with two or three, parts are solved in parallel. The reason
  is that idle threads of OpenBLAS wait actively and take time from ONNX Runtime.
- **Few rows.** If there are at most half as many rows as inputs of a layer, from 1024 inputs on, GRAIL keeps them as
  rows, and products and solves cost in proportion to them; fits to the outputs of the original network (`best`) do so
  up to a quarter. A Llama of 8.6 GB with 256 tokens
  (`bench/large_model.py`) takes 4.9 minutes with `grail`, and 27 with `best`, which also turns and narrows the residual
  stream (with one thread on a busy machine; `bench/results/large_model_8g_grail.json`, `large_model_8g.json`).
- **New processors.** OpenBLAS treats a processor that it does not know as an older one: up to 0.3.31, an AMD Zen 5
  as one without AVX-512. `python -m threadpoolctl -i numpy` prints the `architecture` whose kernels it uses. If
  that is older than your processor, name a better one: `OPENBLAS_CORETYPE=SkylakeX onnxgrail ...`. The
  variable was not set for this page.
"""


def page(data: Mapping[str, Any]) -> str:
    """Return the whole page."""
    about = {"rounds": "?", "date": "?", "machine": "?", "threads": "?", **data["environment"]}
    rows: list[Row] = list(data["rows"].values())
    parts = [INTRO.format(**about)]
    for group, title in TITLES.items():
        some = [row for row in rows if row["group"] == group]
        if some:
            parts.append(f"## {title}\n\n" + _table(some, COSTS))
    timed = [row for row in rows if row["group"] == "latency"]
    if timed:
        parts.append(LATENCY + "\n" + _table(timed, GAINS))
    return "\n".join([*parts, NOTES])


def _number(key: str, form: str) -> Callable[[Row], str]:
    return lambda row: format(row[key], form)


COSTS: dict[str, Callable[[Row], str]] = {
    "row": lambda row: str(row["name"]) + (" (one round)" if row.get("rounds") == 1 else ""),
    "forward s": _number("forward", ".2f"),
    "command s": _number("seconds", ".2f"),
    "ratio": _number("ratio", ".2f"),
    "cpu ratio": _number("cpu_ratio", ".2f"),
    "limit s": lambda row: format(row["limit"], ".2f") if row.get("limit") else "",
    "share": lambda row: format(row["limit"] / (row["seconds"] - START), ".2f") if row.get("limit") else "",
    "anonymous MB": _number("anonymous", ".0f"),
    "total MB": _number("rss", ".0f"),
}
GAINS: dict[str, Callable[[Row], str]] = {
    "row": lambda row: str(row["name"]),
    "dense ms": _number("dense_ms", ".1f"),
    "narrowed ms": _number("slim_ms", ".1f"),
    "gain": _number("gain", ".2f"),
    "ideal": _number("ideal", ".2f"),
    "share": _number("share", ".2f"),
}


def _table(rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"
