"""Write the result of the demo into the README.

    onnxgrail demo --json > bench/results/demo.json
    python bench/readme_table.py

Replaces the text between the two table markers; a test checks that the README contains exactly this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULT = ROOT / "bench" / "results" / "demo.json"
BEGIN, END = "<!-- table:begin -->\n", "<!-- table:end -->\n"
SHOWN = (0, 0.5)  # ratios
ARROWS = {"accuracy": "↑", "perplexity": "↓"}

Row = Mapping[str, Any]


def table(data: Mapping[str, Any]) -> str:
    """Return one line per ratio and compensation, the models side by side, and how they were measured."""
    models = {name: rows_of(data, name) for name in sorted({row["model"] for row in data["rows"]}, reverse=True)}
    heads, rules = ["ratio", "compensate"], ["---", "---"]
    for name, rows in models.items():
        metric = rows[0]["metric"]
        heads += [f"`{name}`<br>{metric} {ARROWS[metric]}", "parameters", "latency"]
        rules += ["---:"] * 3
    lines = [heads, rules]
    for together in zip(*models.values(), strict=True):
        first = together[0]
        if first["ratio"] not in SHOWN:
            continue
        line = [f"{first['ratio']:g}", f"`{first['compensate']}`"] if first["compensate"] else ["dense", ""]
        for row, rows in zip(together, models.values(), strict=True):
            line += cells(row, rows[0])
        lines.append(line)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{how(data)}\n"


def rows_of(data: Mapping[str, Any], name: str) -> list[Row]:
    """Return the rows of one model, the dense one first."""
    return sorted((row for row in data["rows"] if row["model"] == name), key=lambda row: row["ratio"])


def cells(row: Row, dense: Row) -> list[str]:
    """Format metric, parameters and latency of one row, with the 95 % intervals that the run has stored."""
    score = f"{row['score']:.2%}".replace("%", " %") if row["metric"] == "accuracy" else f"{row['score']:.2f}"
    if row.get("score_interval"):
        shown = "{:.1%}" if row["metric"] == "accuracy" else "{:.2f}"
        score += f" ({'–'.join(shown.format(end).removesuffix('%') for end in row['score_interval'])})"
    params, latency = f"{row['params']:,}", f"{row['latency_ms']:.2f} ms"
    if row is dense:
        return [score, params, latency]
    fewer = f"{row['params'] / dense['params'] - 1:+.0%}".replace("%", " %").replace("-", "−")
    return [score, fewer, f"{latency} ({speed(row, dense)})"]


def speed(row: Row, dense: Row) -> str:
    """Format the speed relative to the dense model, or say that noise hides the difference."""
    ratio, interval = f"{dense['latency_ms'] / row['latency_ms']:.2f}×", row.get("speedup_interval")
    if not interval:
        return ratio
    low, high = interval
    return "no measurable difference" if low <= 1 <= high else f"{ratio}, {low:.2f}–{high:.2f}"


def how(data: Mapping[str, Any]) -> str:
    """Return when, where and how it was measured."""
    versions = data["environment"]
    threads = f"{data['threads']} thread{'s' if data['threads'] > 1 else ''}"
    kept = all(row.get("score_interval") for row in data["rows"])
    extent = "with 95 % intervals" if kept else "its intervals were not kept, so small differences say nothing"
    return (
        f"`onnxgrail demo` on {data['date']}: metrics on held-out data; latency of a batch of {data['batch_size']} on "
        f"{threads}, median of\n{data['repeats']} interleaved runs ({data['machine']}, ONNX Runtime "
        f"{versions['onnxruntime']}, Python {versions['python']}); {extent}."
    )


def filled(readme: str, data: Mapping[str, Any]) -> str:
    """Return the README with the table of `data` between its markers."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table(data) + END + after


def main() -> None:
    """Rewrite the README."""
    data = json.loads(RESULT.read_text(encoding="utf-8"))
    README.write_text(filled(README.read_text(encoding="utf-8"), data), encoding="utf-8")


if __name__ == "__main__":
    main()
