"""The section of `docs/fidelity.md` about published methods."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results" / "published.json"
OURS = "`default`"
PAPERS = {
    "SliceGPT": ("2401.15024", "fine-tuning"),
    "SliceGPT, one rotation": (
        "2401.15024",
        "fine-tuning; one basis for all layers instead of one each, so no matrix on the skips",
    ),
    "SVD-LLM": ("2403.07378", "the update after truncation"),
    "SVD-LLM with update": (
        "2403.07378",
        "fine-tuning by low-rank adapters; the second factor is fitted in closed form",
    ),
    "FLAP": ("2312.11983", "nothing is left out; whole key-value groups instead of heads"),
    "SlimGPT": ("2412.18110", "fine-tuning; groups of neurons, which only save time; whole key-value groups"),
    "MoDeGPT": ("2408.09632", "fine-tuning; energies are summed over the query heads of a group"),
}
TITLE = """\
## Published methods at equal parameters

Perplexity of char_llama ({dense:.3f}, {params:,} parameters) on 64 held-out samples, lower is better
(`python -m bench.published`, {date}). `default` is `onnxgrail compress --target-params`. The others are short
re-implementations of ours in numpy (`bench/published/`), not the code of the authors. All get the same 128 calibration
samples, and none is trained. The steps of a method are coarse: it has between 0 and {most:.1f} % more parameters than
the default. Matrices on skips and biases that it adds are counted. In brackets: the 95 % interval of how far its
perplexity is above that of the default, over resampled samples.

"""
LIMITS = """\
{verdict}

This is one small model with a small vocabulary; large models can give another order. The default searches the widths of
stream, neurons and heads by measured loss and fits all weights, while each published method has one way of narrowing;
the rows with `--blocks` have fewer ways too. Choices that a paper leaves open (the ratio of the first layer of SlimGPT,
the temperature of MoDeGPT, scores of FLAP as in the paper or as in its code) are those with the lowest perplexity on
the calibration data. Embedding and head stay whole except with SliceGPT and in streams.

| method | paper | left out or changed |
| --- | --- | --- |
"""


def table(data: Mapping[str, Any]) -> str:
    """Return the section."""
    rows = {(row["method"], row["size"]): row for row in data["rows"]}
    sizes = list(dict.fromkeys(row["size"] for row in data["rows"]))
    most = max(100 * (rows[name, size]["params"] / rows[OURS, size]["params"] - 1) for name in PAPERS for size in sizes)
    text = TITLE.format(dense=data["model"]["perplexity"], params=data["model"]["params"], date=data["date"], most=most)
    text += (
        f"| method | {' | '.join(f'{size} of the parameters' for size in sizes)} |\n| --- |{' ---: |' * len(sizes)}\n"
    )
    best = {size: min(row["perplexity"] for row in data["rows"] if row["size"] == size) for size in sizes}
    for method in dict.fromkeys(row["method"] for row in data["rows"]):
        cells = [cell(rows[method, size], best[size]) for size in sizes]
        text += f"| {method} | {' | '.join(cells)} |\n"
    text += "\n" + LIMITS.format(verdict=verdict(data))
    return text + "".join(f"| {name} | arXiv {number} | {what} |\n" for name, (number, what) in PAPERS.items())


def cell(row: Mapping[str, Any], best: float) -> str:
    """Return a perplexity with its interval; the best is bold."""
    value = f"{row['perplexity']:.3f}" if row["perplexity"] > best else f"**{row['perplexity']:.3f}**"
    return f"{value} ({row['more'][0]:+.2f} to {row['more'][1]:+.2f})" if "more" in row else value


def verdict(data: Mapping[str, Any]) -> str:
    """Say which published methods may be as good as the default, or are closer than one of its parts."""
    published = [row for row in data["rows"] if row["method"] in PAPERS]
    near = [f"{row['method']} at {row['size']}" for row in published if row["more"][0] <= 0]
    text = "The default is closer than every published method at every size, and no interval includes 0."
    if near:
        text = f"Not worse than the default, or not certainly: {', '.join(near)}."
    for part in (row for row in data["rows"] if row["method"].startswith(f"{OURS},")):
        same = (row for row in published if row["size"] == part["size"])
        closer = [row["method"] for row in same if row["perplexity"] < part["perplexity"]]
        if closer:
            text += f" At {part['size']}, {part['method']} is further away than {', '.join(closer)}."
    return text
