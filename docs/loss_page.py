"""Write `docs/loss.md` from the measurements: `python docs/loss_page.py`.

The words are those of `docs/templates/loss.md`; the numbers come from `bench/results/loss_against_agreement.json` and
`bench/results/bound_on_digits.json`, from the scales in the code, and from a simulation of the bound.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrail.fidelity.loss import upper_bound
from onnxgrail.fidelity.measures import SCALES

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "bench" / "results" / "loss_against_agreement.json"
BOUNDS = RESULTS.with_name("bound_on_digits.json")
SAMPLES = (8, 16, 32, 64, 256)
TRIALS = 101
PIXELS, DECIBEL = "px of 192 (0 best)", "SNR dB"
WORDS = {PIXELS: "pixels of 192", DECIBEL: "dB"}
SHARES = frozenset({"top-1", "box F1", "mask IoU", "anchor IoU", "split IoU", "VAD agreement"})
Goal = tuple[frozenset[str], float, str, Callable[[float], bool]]
GOALS: tuple[Goal, ...] = (
    (SHARES, 0.01, "0.98", lambda value: value >= 0.98),
    (SHARES, 0.05, "0.94", lambda value: value >= 0.94),
    (frozenset({PIXELS}), 0.01, "1", lambda value: value <= 1),
    (frozenset({DECIBEL}), 0.01, "25", lambda value: value >= 25),
)


def page() -> str:
    """Return the whole page."""
    rows = [row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if "refused" not in row]
    parts = {name: f"{scale:g}" for name, scale in SCALES.items()}
    parts["token_percent"] = f"{1 / SCALES['tokens']:.3g} %"
    parts["decibel"] = f"{-10 * math.log10(0.01 / SCALES['values']):.0f}"
    parts["first"], parts["second"] = (f"{math.sqrt(1 - loss / SCALES['numbers']):.3f}" for loss in (0.01, 0.05))
    parts["coverage"] = "\n".join(coverage())
    parts |= {"looseness": "\n".join(looseness()), "table": "\n".join(table(rows)), "summary": "\n".join(summary(rows))}
    template = (DOCS / "templates" / "loss.md").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)


def looseness() -> Iterator[str]:
    """Yield one row per number of samples: the bound over the mean of exponential losses."""
    for count in SAMPLES:
        rng = np.random.default_rng(count)
        bounds = [upper_bound(rng.exponential(size=count)) for _ in range(TRIALS)]
        yield f"| {count} | {np.median(bounds):.2f} |"


def coverage() -> Iterator[str]:
    """Yield the table of how often the bound holds on the digits."""
    rows = json.loads(BOUNDS.read_text(encoding="utf-8"))["rows"]
    counts = sorted({row["samples"] for row in rows})
    yield f"| model | ratio | {' | '.join(f'{count} samples' for count in counts)} |"
    yield f"|---|---:|{'---:|' * len(counts)}"
    for model, ratio in dict.fromkeys((row["model"], row["ratio"]) for row in rows):
        held = {row["samples"]: row["holds"] for row in rows if (row["model"], row["ratio"]) == (model, ratio)}
        yield f"| {model} | {ratio:g} | {' | '.join(f'{held[count]:.3f}' for count in counts)} |"


def table(rows: Sequence[Any]) -> Iterator[str]:
    """Yield the table of all measurements."""
    heads = ("model", "samples", "ratio", "decides", "loss", "bound", "agreement", "measure")
    yield f"| {' | '.join(heads)} |"
    yield "|---|---:|---:|---|---:|---:|---:|---|"
    for row in rows:
        worst = row["outputs"][0]
        name = f"{worst['output']}, {worst['part']}" if worst["part"] else worst["output"]
        loss, bound = (percent(worst[key]) for key in ("mean", "bound"))
        cells = (row["model"], row["samples"], f"{row['ratio']:g}", name, loss, bound, value(row), measure(row))
        yield f"| {' | '.join(map(str, cells))} |"


def percent(share: float) -> str:
    """Return a share in percent, with two digits."""
    return f"{100 * share:.2g} %"


def value(row: Any) -> str:
    """Return the agreement; shares have three digits."""
    return f"{row['agreement']:.2f}" if row["measure"] == PIXELS else f"{row['agreement']:.3f}".rstrip("0").rstrip(".")


def measure(row: Any) -> str:
    """Return the name of the agreement."""
    return WORDS.get(row["measure"], row["measure"])


def summary(rows: Sequence[Any]) -> Iterator[str]:
    """Yield a table of how many results below a bound keep the agreement that belongs to it."""
    yield "| measure | bound at most | to hold | results | that hold | worst |"
    yield "|---|---:|---:|---:|---:|---:|"
    for names, limit, word, good in GOALS:
        within = [row for row in rows if row["outputs"][0]["bound"] <= limit and row["measure"] in names]
        held = [row for row in within if good(row["agreement"])]
        ordered = sorted(within, key=lambda row: row["agreement"], reverse=names == {PIXELS})
        worst = value(ordered[0]) if ordered else "-"
        yield f"| {WORDS.get(min(names), 'shares')} | {limit:.0%} | {word} | {len(within)} | {len(held)} | {worst} |"


if __name__ == "__main__":
    (DOCS / "loss.md").write_text(page(), encoding="utf-8")
