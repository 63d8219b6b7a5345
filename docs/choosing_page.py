"""Write `docs/choosing.md` from the measurements: `python docs/choosing_page.py`.

The words are those of `docs/templates/choosing.md`.  Every number is read from `bench/results/*.json`, or is part of a
table that is copied from another page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "bench" / "results"
SUBJECTS = (
    "digits_resnet-conv",
    "digits_resnet-conv-stream",
    "digits_vit-mlp",
    "digits_vit-mlp-heads",
    "char_llama-mlp",
    "char_llama-mlp-heads",
)
REPAIRS = ("none", "grail-open", "grail-closed", "best")
DUELS = (("grail-closed", "none"), ("best", "none"), ("best", "grail-closed"), ("grail-closed", "grail-open"))
CHOICES = ("l1", "l2", "wanda", "flap", "obs", "fold")
SAME = {"accuracy": 0.005, "perplexity": 0.005}  # of all images; of the perplexity
EFFORTS = ("fast", "normal", "max")
COSTS = ("MiniLM", "MiniLM, best", "resnet50", "vit_b_32")

Scores = dict[tuple[str, str, float], float]


def page() -> str:
    """Return the whole page."""
    parts = {**fidelity(load("fidelity.json")), **encoder(load("minilm_best.json")), **speed(load("speed.json"))}
    parts |= selection(load("selection_speed.json"))
    parts |= {name: quoted(f"{name}.md") for name in ("refine", "grasp", "ic")}
    template = (DOCS / "templates" / "choosing.md").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]].rstrip("\n"), template)


def load(name: str) -> Any:
    """Read one file of results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Return a Markdown table; columns after the first `left` are numbers."""
    rules = ["---"] * left + ["---:"] * (len(heads) - left)
    return "".join(f"| {' | '.join(row)} |\n" for row in [heads, rules, *rows])


def origin(environment: Any) -> str:
    """Return date and machine of a measurement."""
    return f"{environment['date']}, {environment['machine']}"


# ------------------------------------------------------------------------------------------------------- fidelity


def fidelity(data: Any) -> dict[str, str]:
    """Return the parts about methods on the embedded models."""
    scores = scores_of(data)
    metrics = {subject: data["subjects"][subject]["metric"] for subject in SUBJECTS}
    near, lines = nearest(metrics, scores)
    pairs = {duel: [(f"{choice}/{duel[0]}", f"{choice}/{duel[1]}") for choice in CHOICES] for duel in DUELS}
    return {
        "fidelity_origin": origin(data["environment"]),
        "efforts": by_method(metrics, scores, {effort: f"effort/{effort}" for effort in EFFORTS}, (0.3, 0.5)),
        "repairs": by_method(metrics, scores, {repair: f"wanda/{repair}" for repair in REPAIRS}, (0.3, 0.5, 0.8)),
        "choices": ", ".join(f"`{choice}`" for choice in CHOICES),
        "duels": "".join(said(duel, compared(metrics, scores, those)) for duel, those in pairs.items()),
        "units": by_method(metrics, scores, {choice: f"{choice}/best" for choice in CHOICES}, (0.5, 0.8)),
        "lines": str(lines),
        "near": ", ".join(f"`{choice}` {times}" for choice, times in sorted(near.items(), key=lambda item: -item[1])),
        "blind": by_method(metrics, scores, {c: f"{c}/none" for c in ("l1", "l2", "fold")}, (0.1, 0.2, 0.3)),
        "blind_duel": said(("fold", "l2"), compared(metrics, scores, [("fold/none", "l2/none")])),
    }


def scores_of(data: Any) -> Scores:
    """Return the median over calibration draws, by subject, method and ratio."""
    draws: dict[tuple[str, str, float], list[float]] = {}
    for cell in data["cells"]:
        if cell["subject"] in SUBJECTS:
            draws.setdefault((cell["subject"], cell["method"], cell["ratio"]), []).append(cell["score"])
    return {key: median(values) for key, values in draws.items()}


def ratios_of(scores: Scores) -> list[float]:
    """Return all ratios, ascending."""
    return sorted({ratio for _, _, ratio in scores})


def shown(value: float | None, metric: str) -> str:
    """Format a score."""
    if value is None:
        return ""
    return f"{100 * value:.1f}" if metric == "accuracy" else f"{value:.2f}"


def by_method(metrics: dict[str, str], scores: Scores, methods: dict[str, str], ratios: Sequence[float]) -> str:
    """Return a table with one line per subject and ratio; the best value of a line is bold."""
    lines = []
    for subject, metric in metrics.items():
        better, arrow = (max, "↑") if metric == "accuracy" else (min, "↓")
        for ratio in ratios:
            found = [scores.get((subject, method, ratio)) for method in methods.values()]
            top = shown(better(value for value in found if value is not None), metric)
            cells = [f"**{text}**" if text == top else text for text in (shown(value, metric) for value in found)]
            lines.append([f"{subject}, {metric} {arrow}", f"{ratio:g}", *cells])
    return table(["model and blocks", "ratio", *(f"`{name}`" for name in methods)], lines)


def compared(metrics: dict[str, str], scores: Scores, pairs: Iterable[tuple[str, str]]) -> tuple[int, int, int]:
    """Count how often the first method of a pair is closer than the second, as close, and further away."""
    counts = [0, 0, 0]
    for one, two in pairs:
        for subject, metric in metrics.items():
            for ratio in ratios_of(scores):
                a, b = scores.get((subject, one, ratio)), scores.get((subject, two, ratio))
                if a is not None and b is not None:
                    gain = a - b if metric == "accuracy" else (b - a) / b
                    counts[1 if abs(gain) <= SAME[metric] + 1e-9 else 0 if gain > 0 else 2] += 1
    return counts[0], counts[1], counts[2]


def said(names: tuple[str, str], counts: tuple[int, int, int]) -> str:
    """Return one line of a list."""
    closer, same, further = counts
    return f"- `{names[0]}` against `{names[1]}`: closer {closer} times, the same {same}, further away {further}.\n"


def nearest(metrics: dict[str, str], scores: Scores) -> tuple[dict[str, int], int]:
    """Count how often each selector is the closest with `best`, or nearly; return it with the number of cases."""
    near, lines = dict.fromkeys(CHOICES, 0), 0
    for subject, metric in metrics.items():
        for ratio in ratios_of(scores):
            found = {c: v for c in CHOICES if (v := scores.get((subject, f"{c}/best", ratio))) is not None}
            top = max(found.values()) if metric == "accuracy" else min(found.values())
            room = SAME[metric] * (1 if metric == "accuracy" else top) + 1e-9
            lines += 1
            for choice, value in found.items():
                near[choice] += abs(value - top) <= room
    return near, lines


# --------------------------------------------------------------------------------------------------------- others


def encoder(data: Any) -> dict[str, str]:
    """Return the parts about methods on a sentence encoder."""
    rows = []
    for row in data["rows"]:
        options = [f"--{name} {row[name]}" for name in ("selector", "compensate", "allocate") if name in row]
        cells = [f"{1000 * row['one_minus_cosine']:.1f}", f"{row['share']:.2f}", f"{row['seconds']:.0f}"]
        rows.append([f"`{' '.join(options)}`", row["blocks"], f"{row['ratio']:g}", *cells])
    heads = ["options", "blocks", "ratio", "1 − cosine in ‰ ↓", "of `grail`", "seconds"]
    return {"minilm_origin": f"{data['date']}, {data['cpu']}", "encoder": table(heads, rows, left=2)}


def speed(data: Any) -> dict[str, str]:
    """Return the parts about the cost of compression and the speed of its results."""
    costs = [
        [name.removesuffix(", best"), "`best`" if name.endswith(", best") else "`grail`", *cells]
        for name in COSTS
        for row in [data["rows"][name]]
        for cells in [[f"{row['seconds']:.1f}", f"{row['ratio']:.1f}", f"{row['anonymous']:.0f}"]]
    ]
    gains = [
        [row["name"], f"{row['dense_ms']:.1f}", f"{row['slim_ms']:.1f}", f"{row['gain']:.2f}×", f"{row['ideal']:.2f}×"]
        for row in data["rows"].values()
        if row["group"] == "latency"
    ]
    return {
        "speed_origin": origin(data["environment"]),
        "speed_samples": str(data["rows"]["MiniLM"]["samples"]),
        "cost": table(["model", "compensate", "seconds", "passes", "MB"], costs, left=2),
        "gains": table(["model", "dense ms", "narrowed ms", "faster", "MACs"], gains),
    }


def selection(data: Any) -> dict[str, str]:
    """Return the parts about the cost of selection."""
    rows = [
        [str(row["width"]), f"`{row['way']}`", f"{row['seconds']:.1f}", f"{row['cpu_seconds']:.1f}"]
        for row in data["rows"]
    ]
    heads = ["units", "way", "seconds", "processor seconds"]
    return {"selection_date": data["date"], "selection": table(heads, rows, left=2)}


def quoted(name: str) -> str:
    """Return the first table of the section `Results` of another page."""
    section = (DOCS / name).read_text(encoding="utf-8").split("## Results\n")[1]
    found = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert found is not None, f"{name} has no table there"
    return found[0]


if __name__ == "__main__":
    (DOCS / "choosing.md").write_text(page(), encoding="utf-8")
