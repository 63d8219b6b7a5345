"""`docs/performance.md`: tables from the JSON, no number typed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]

INTRO = """\
# Performance

`python -m bench.speed` measures and writes this page from `bench/results/speed.json`.

- `forward` is one plain ONNX Runtime pass over the calibration data in the same batches and with the same threads.
- `ratio` is the whole command, from the interpreter's start to the written file, less one second for that start, in
  forward passes.  `cpu ratio` is the same in processor seconds, which other work on the machine disturbs less.
- Memory is the peak of the process, in MB: anonymous (what it asked for) and total (with mapped files).
- Medians of {rounds} rounds in which everything takes its turn; closed-loop GRAIL, unit ratio 0.3, unless said
  otherwise.

{date}, {machine}, {threads} threads.
"""

TITLES = {
    "models": "Models",
    "rivals": "Other tools",
    "depth": "Depth at equal width (256)",
    "width": "Width (2 layers, 32 x 128 tokens)",
    "samples": "Samples (6 layers of width 384, 128 tokens each)",
}

LATENCY = """\
## Latency of what is written

Ratio 0.5, `--round-to 8`.  `gain` is dense over narrowed milliseconds, `ideal` the same of multiply-accumulates;
`share` is the part of the ideal gain above 1 that is reached.
"""

NOTES = """\
## Where the time goes, and how to spend less

- Behind a block that was only narrowed, the measured activation is kept and loses its channels in memory, so that a
  closed loop runs each node once, most of them on the narrowed network.
- Second moments of a hidden width of four times the model's cost about as much as the forward pass itself: fewer
  samples (`--samples`) make both cheaper in proportion.  `--compensate best` takes only squares of them, unless the
  selector reads products (`obs`, `gram`, `slimgpt`).
- The next session is not opened while the current one runs.  In a closed loop it holds what the current one decides, so
  only its graph could be made ready, and opening sessions is little: 0.3 of the 10.5 processor seconds that 24 layers
  of width 256 take (48 sessions).
- `--compensate best` walks the original and the narrowed network side by side, once, and sums regressors and targets of
  every layer: on MiniLM that is most of one more pass, and as much again for sums and solves.
- `OMP_NUM_THREADS` sets the threads of ONNX Runtime and of BLAS together; unset, it is the number of physical cores.
  From two on, parts of the batches are gone through side by side, as many as there are threads and stretches that are
  summed as one (`docs/distributed.md`), with one thread of BLAS each: several threads of BLAS beside those of ONNX
  Runtime made the same sums 2.8 times slower.  Where the sums of two parts would take more than a quarter of a GiB
  besides, there is one part, and the next batch runs while half of the threads take the sums of the one before.
  Solving is done by half of the threads, or, with two or three, in parts side by side: the threads of OpenBLAS itself
  go on waiting busily when they are done, and ONNX Runtime has to share the processor with them.
- Few rows (a quarter of a layer's inputs or less, from 1024 inputs on) are kept as rows, and products and solutions
  cost in proportion to them: a Llama of 8.6 GB with 256 tokens (`bench/large_model.py`) takes 6.5 minutes with `best`
  and 4.9 with `grail` (`bench/results/large_model_8g.json`, `large_model_8g_grail.json`).
- OpenBLAS takes a processor that is newer than itself for an older one: up to 0.3.31 it takes an AMD Zen 5 for a
  processor without AVX-512.  `python -m threadpoolctl -i numpy` prints the `architecture` whose kernels it uses; where
  that is older than the processor, name a better one before the command: `OPENBLAS_CORETYPE=SkylakeX onnxgrail ...`.
  Where OpenBLAS does without AVX-512 all the same, ONNX Runtime makes the sums.  Here it was not set.
"""


def page(data: Mapping[str, Any]) -> str:
    """The whole page."""
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
