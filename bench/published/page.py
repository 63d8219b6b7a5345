"""The section of `docs/fidelity.md` about published methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LARGE = 100  # from which measures have one decimal
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
    "SlimGPT": (
        "2412.18110",
        "fine-tuning; groups of neurons, which only save time: a 192nd goes at once; whole key-value groups",
    ),
    "MoDeGPT": ("2408.09632", "fine-tuning; energies are summed over the query heads of a group"),
}
NAMES = {
    "char_llama": "char_llama, a small decoder of ours",
    "digits_vit": "digits_vit, a small image classifier of ours",
    "minilm": "minilm (all-MiniLM-L6-v2), a sentence encoder of others with norms after the sums",
}
MEASURES = {
    "perplexity": "the perplexity",
    "total variation": "the total variation between the probabilities and those of the dense model, in %",
    "1 - cosine": "1 − cosine between sentence embeddings and those of the dense model, in ‰",
}
TITLE = """\
## Published methods at equal parameters

Measures on held-out samples, lower is better (`python -m bench.published`). `default` is
`onnxgrail compress --target-params`. The others are short re-implementations of ours in numpy (`bench/published/`), not
the code of the authors. All get the same calibration samples, and none is trained. A size is a share of all parameters
of the file. The steps of a method can be coarse: it never has fewer parameters than the default, and each table says
how many more at most. Matrices on skips and biases that it adds are counted. In brackets: the 95 % interval of how far
its measure is above that of the default, over resampled samples.
"""
MODEL = """
{name}, {params:,} parameters. The measure is {measure}{dense}.
{calibration} calibration and {heldout} held-out samples; methods have at most {most:.1f} % more parameters ({date}).

"""
LIMITS = """
These are small models; large ones can give another order. The default searches the widths of all kinds of blocks by
measured loss and fits all weights, while each published method has one way of narrowing; the rows with `--blocks` have
fewer ways too. The published methods leave embedding and head whole, except SliceGPT. The default also narrows streams
where norms come first, and the table of words of MiniLM, which has half of its parameters; its row `--blocks mlp,heads`
narrows the same parts as they do. Choices that a paper leaves open (the ratio of the first layer of SlimGPT, the
temperature of MoDeGPT and how large I is beside C, scores of FLAP as in the paper or as in its code) are those with the
lowest measure on the calibration data. In models with biases, those of keys are left out and those of values are folded
into the bias of the next matrix, both exactly; scales and shifts of norms that come first are folded too.

| method | paper | left out or changed |
| --- | --- | --- |
"""


def table(data: Mapping[str, Any]) -> str:
    """Return the section."""
    text = TITLE + "".join(_model(name, found) for name, found in data.items()) + LIMITS
    return text + "".join(f"| {name} | arXiv {number} | {what} |\n" for name, (number, what) in PAPERS.items())


def _model(name: str, data: Mapping[str, Any]) -> str:
    """Return the table of a model and what it says."""
    rows = {(row["method"], row["size"]): row for row in data["rows"]}
    sizes = list(dict.fromkeys(row["size"] for row in data["rows"]))
    published = [row for row in data["rows"] if row["method"] in PAPERS and "params" in row]
    most = max(100 * (row["params"] / rows[OURS, row["size"]]["params"] - 1) for row in published)
    calibration, heldout = data["samples"]
    words = {"measure": MEASURES[data["measure"]], "params": data["params"], "date": data["date"], "most": most}
    dense = f", which is {number(data['dense'])} at full size" if data["dense"] else ""
    text = MODEL.format(name=NAMES[name], dense=dense, calibration=calibration, heldout=heldout, **words)
    text += f"| {name} | {' | '.join(f'{size} of the parameters' for size in sizes)} |\n"
    text += f"| --- |{' ---: |' * len(sizes)}\n"
    best = {size: min(row["value"] for row in data["rows"] if row["size"] == size and "value" in row) for size in sizes}
    ours = list(dict.fromkeys(row["method"] for row in data["rows"] if row["method"] not in PAPERS))
    for method in (*ours, *(name for name in PAPERS if name in data["without"] or (name, sizes[0]) in rows)):
        cells = [cell(rows.get((method, size), {"failed": "cannot run"}), best[size]) for size in sizes]
        text += f"| {method} | {' | '.join(cells)} |\n"
    return f"{text}\n{verdict(data)}\n"


def cell(row: Mapping[str, Any], best: float) -> str:
    """Return a measure with its interval, or why there is none; the best is bold."""
    if "failed" in row:
        return str(row["failed"])
    value = number(row["value"]) if row["value"] > best else f"**{number(row['value'])}**"
    return f"{value} ({row['more'][0]:+.2f} to {row['more'][1]:+.2f})" if "more" in row else value


def number(value: float) -> str:
    """Return a measure with three decimals, or with one if it is large."""
    return f"{value:.3f}" if value < LARGE else f"{value:.1f}"


def verdict(data: Mapping[str, Any]) -> str:
    """Say which published methods are better than the default or may be, and which cannot run."""
    published = [row for row in data["rows"] if row["method"] in PAPERS and "value" in row]
    better = [named(row) for row in published if row["more"][1] < 0]
    near = [named(row) for row in published if row["more"][0] <= 0 <= row["more"][1]]
    text = "The default is closer than every published method at every size, and no interval includes 0."
    if better or near:
        text = f"Better than the default: {', '.join(better)}. " if better else ""
        text += f"Not worse than the default, or not certainly: {', '.join(near)}." if near else ""
    for part in (row for row in data["rows"] if row["method"].startswith(f"{OURS},")):
        same = (row for row in published if row["size"] == part["size"])
        closer = [row["method"] for row in same if row["value"] < part["value"]]
        if closer:
            text += f" At {part['size']}, {part['method']} is further away than {', '.join(closer)}."
    return text.strip() + "".join(f" {' and '.join(names)} cannot run: {why}." for why, names in reasons(data))


def named(row: Mapping[str, Any]) -> str:
    """Return the name of a row in a sentence."""
    return f"{row['method']} at {row['size']}"


def reasons(data: Mapping[str, Any]) -> Sequence[tuple[str, list[str]]]:
    """Return the reasons why methods cannot run, with the methods."""
    found: dict[str, list[str]] = {}
    for name, why in data.get("without", {}).items():
        found.setdefault(why, []).append(name)
    return list(found.items())
