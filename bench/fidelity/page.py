"""Write `docs/fidelity.md` from the JSON: tables, figures and the method of measurement."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench import against_uniform, equal_params
from bench.fidelity import summary
from bench.fidelity.methods import DATA_FREE, REPAIRS, SIM_BASES, SIM_REPAIRS, efforts, every, further, named
from bench.fidelity.plots import figure
from bench.fidelity.subjects import SUBJECTS
from bench.published import page as published

Data = Mapping[str, Any]
ARROWS = {"accuracy": "accuracy in %, ↑", "perplexity": "perplexity, ↓", "1 - cosine": "1 − cosine in ‰, ↓"}

INTRO = """\
# Fidelity by method and ratio

This page shows the quality of every method at every ratio on held-out data, with onnxsim for comparison.
`python -m bench.fidelity` measures what is missing in `bench/results/fidelity.json` and writes this page from it.

| part of a table | meaning |
| --- | --- |
| row | the selector (`l1`, `l2`, `wanda`, ...) or `fold`, then the compensation |
| `none` | pruned only |
| `grail-open` | every block measured in the original model |
| `grail-closed` | every block measured downstream of the blocks already narrowed |
| `best` | the default compensation |
| column | the `--unit-ratio`; widths are not rounded here, so the ratio is exact |
| cell | the median over calibration draws, on held-out data; each draw uses another half of the samples, and rows \
that read no data need one draw; the best of a column is bold |
| `latency` | dense latency divided by the new one, on one thread (processor time of a batch of 8, medians of \
{rounds} runs in turn); it depends on the widths only and is measured once for each set of widths |

The figures show the worst and the best draw as a band. Without rounding, convolutions can be slower than the dense
ones; `--round-to 8`, the default, prevents this.

{date}, {machine}, ONNX Runtime {onnxruntime}, Python {python}.
"""

HARM = """\
## Where compensation is worse than none

Cases in which the median is worse than that of the same widths without compensation, by more than the spread over
draws and by more than two held-out images, or half a percent of perplexity.

| model | compensation | compared | worse | the worst of them |
| --- | --- | ---: | ---: | --- |
"""

SIM = """\
onnxsim{version} (`apply_structured_pruning` and `apply_structured_wanda_pruning`, alone and with
`apply_pruning_finetune`, which refits `MatMul` and `Gemm` only) at the same sparsity. It has no choice of blocks,
so these are the layers that it finds, and every cell shows its change of parameters.
"""


FURTHER = """\
Methods with gradients on top of `wanda` `best`; `wandapp`, which selects units by gradients; and `grasp`, which
replaces layers by low-rank pairs until the share of parameters is removed. In brackets: the change of parameters and
the seconds of the whole call.
"""
EFFORT = """\
The efforts of `--effort`, one draw, {date}. `max` may choose other widths of the same cost (`--allocate
global`), and refines with torch. In brackets: the change of parameters and the seconds of the whole call, on a busy
machine.
"""


def page(data: Data) -> str:
    """Return the whole page."""
    parts = [
        INTRO.format(
            rounds=data["settings"]["rounds"],
            **{name: data["environment"][name] for name in ("date", "machine", "onnxruntime", "python")},
        )
    ]
    if data["skipped"]:
        names = ", ".join(f"`{name}`" for name in grouped(data["skipped"]))
        parts.append(f"Not measured, because the installed version does not have them: {names}.\n")
    parts.append(HARM + "".join(_harm_rows(data)))
    if equal_params.RESULTS.exists():
        parts.append(equal_params.table(json.loads(equal_params.RESULTS.read_text(encoding="utf-8"))["rows"]))
    if against_uniform.RESULTS.exists():
        parts.append(against_uniform.table(json.loads(against_uniform.RESULTS.read_text(encoding="utf-8"))))
    if published.RESULTS.exists():
        parts.append(published.table(json.loads(published.RESULTS.read_text(encoding="utf-8"))))
    parts += [_subject(data, name) for name in SUBJECTS if name in data["subjects"]]
    return "\n".join(parts)


def grouped(names: Sequence[str]) -> list[str]:
    """Return methods by name, with one word for a selector or a compensation that is missing completely."""
    rest = set(names)
    words = []
    for base in dict.fromkeys(method.base for method in every()):
        whole = {method.name for method in every() if method.base == base}
        if whole <= rest:
            words.append(base)
            rest -= whole
    for repair in REPAIRS:
        present = {f"{m.base}/{repair}" for m in every() if m.base not in words and not m.external}
        if present and present <= rest:
            words.append(repair)
            rest -= present
    return [*words, *sorted(rest)]


def _harm_rows(data: Data) -> Iterable[str]:
    for subject in (name for name in SUBJECTS if name in data["subjects"]):
        about = data["subjects"][subject]
        for repair in REPAIRS:
            found = summary.harm(data, subject, repair)
            if repair == "none" or not found.pairs:
                continue
            worst = ""
            if found.worse:
                base, ratio, one, two = found.worse[0]
                worst = f"`{base}` {ratio:g}: {score(one, about)} → {score(two, about)}"
            yield f"| {subject} | `{repair}` | {found.pairs} | {len(found.worse)} | {worst} |\n"


def _subject(data: Data, name: str) -> str:
    about = data["subjects"][name]
    points = summary.series(data, name)
    ratios = sorted({ratio for line in points.values() for ratio in line})
    own = [f"{base}/{repair}" for base in summary.bases(points) for repair in REPAIRS if f"{base}/{repair}" in points]
    blocks = " and ".join(f"`{kind}`" for kind in about["blocks"])
    text = (
        f"## {name}\n\nBlocks: {blocks}.  {draws(data, name)} of {about['calibration_samples']} samples.  Dense: "
        f"{score(about['score'], about)} ({ARROWS[about['metric']]}), {about['params']:,} parameters, "
        f"{_millions(about['macs'])} MACs.\n\n![{name}](img/{figure(name)})\n\n"
    )
    lines = [*_sizes(data, name, points, own, ratios), *_scores(points, own, ratios, about)]
    text += _table([f"{about['metric']} {ARROWS[about['metric']][-1]}", *(f"{ratio:g}" for ratio in ratios)], lines)
    dates = sorted({data["dates"][m.name] for m in efforts() if m.name in data.get("dates", {})})
    text += _beside("effort", EFFORT.format(date=" to ".join(dates)), [m.name for m in efforts()], points, about)
    slow = [m.name for m in further() if m.name in points]
    text += _beside("further", FURTHER, ["wanda/best", *slow], points, about) if slow else ""
    return text + _onnxsim(data, name, points, ratios)


def _beside(word: str, text: str, names: Sequence[str], points: Mapping[str, summary.Series], about: Data) -> str:
    """Return a table of methods with their cost, at the ratios of those after the first; empty if there are none."""
    measured = [name for name in names if name in points]
    ratios = sorted({ratio for name in measured[1:] for ratio in points[name]})
    if not ratios:
        return ""
    lines = [
        [f"`{name.split('/')[0]}` {name.split('/')[1]}", *(_priced(points[name].get(r), about) for r in ratios)]
        for name in measured
    ]
    return "\n" + text + "\n" + _table([word, *(f"{ratio:g}" for ratio in ratios)], lines)


def _priced(point: summary.Point | None, about: Data) -> str:
    if point is None:
        return ""
    return f"{score(point.score, about)} ({_change(point.params, about['params'])}, {point.seconds:.0f} s)"


def draws(data: Data, subject: str) -> str:
    """Return the number of draws of the cells that read data, in words."""
    counts = Counter(
        (cell["method"], cell["ratio"])
        for cell in data["cells"]
        if cell["subject"] == subject and cell["method"] not in DATA_FREE | {m.name for m in named()}
    )
    few, many = (f(counts.values(), default=0) for f in (min, max))
    return f"{few} draw{'s' * (few != 1)}" if few == many else f"{few} to {many} draws"


def _sizes(
    data: Data, name: str, points: Mapping[str, summary.Series], own: Sequence[str], ratios: Sequence[float]
) -> list[list[str]]:
    """Return parameters, MACs and latency by ratio, as a range if methods differ."""
    about = data["subjects"][name]
    rows: dict[str, list[str]] = {"parameters": [], "MACs": [], "latency": []}
    for ratio in ratios:
        here = [points[method][ratio] for method in own if ratio in points[method]]
        rows["parameters"].append(_range(_change(p.params, about["params"]) for p in here))
        rows["MACs"].append(_range(_change(p.macs, about["macs"]) for p in here if p.macs is not None))
        times = [summary.milliseconds(data, name, shape) for shape in sorted({p.shape for p in here})]
        faster = [dense / slim for slim, dense in filter(None, times)]
        rows["latency"].append(_range(f"{value:.2f}×" for value in sorted(faster)))
    return [[f"*{label}*", *cells] for label, cells in rows.items()]


def _scores(
    points: Mapping[str, summary.Series], methods: Sequence[str], ratios: Sequence[float], about: Data
) -> list[list[str]]:
    best = {
        ratio: min(summary.loss(points[m][ratio].score, about["metric"]) for m in methods if ratio in points[m])
        for ratio in ratios
        if any(ratio in points[m] for m in methods)
    }
    lines = []
    for method in methods:
        cells = []
        for ratio in ratios:
            point = points[method].get(ratio)
            text = score(point.score, about) if point else ""
            first = point is not None and summary.loss(point.score, about["metric"]) <= best[ratio]
            cells.append(f"**{text}**" if first else text)
        base, repair = method.split("/")
        lines.append([f"`{base}` {repair}", *cells])
    return lines


def _onnxsim(data: Data, name: str, points: Mapping[str, summary.Series], ratios: Sequence[float]) -> str:
    """Return the table of onnxsim on the same model, if it was installed."""
    about, faults = data["subjects"][name], summary.faults(data, name)
    lines = []
    for method in (f"{base}/{repair}" for base in SIM_BASES for repair in SIM_REPAIRS):
        base, repair = method.split("/")
        label = f"`{base}` {repair}"
        if method in faults:
            lines.append([label, f"no file: {faults[method]}", *[""] * (len(ratios) - 1)])
        elif method in points:
            lines.append([label, *(_pruned(points[method].get(ratio), about) for ratio in ratios)])
    if not lines:
        return ""
    return (
        "\n"
        + SIM.format(version=f" {version}" if (version := data["environment"]["onnxsim"]) else "")
        + "\n"
        + _table(["onnxsim", *(f"{ratio:g}" for ratio in ratios)], lines)
    )


def _pruned(point: summary.Point | None, about: Data) -> str:
    if point is None:
        return ""
    return f"{score(point.score, about)} ({point.note or _change(point.params, about['params'])})"


def score(value: float | None, about: Data) -> str:
    """Format a metric."""
    if value is None or not math.isfinite(value):
        return "∞"
    if about["metric"] == "accuracy":
        return f"{100 * value:.1f}"
    if about["metric"] == "perplexity":
        return f"{value:.2f}" if value < 100 else f"{value:.0f}" if value < 1e4 else f"{value:.0e}"
    return f"{1000 * value:.1f}"


def _change(after: int, before: int) -> str:
    return f"{after / before - 1:+.0%}".replace("%", " %").replace("-", "−").replace("+0 %", "0 %")


def _range(texts: Iterable[str]) -> str:
    """Return one text, or the first and the last of several."""
    different = list(dict.fromkeys(texts))
    return " … ".join(dict.fromkeys((different[0], different[-1]))) if different else ""


def _millions(count: int | None) -> str:
    return "uncounted" if count is None else f"{count / 1e6:.2f} M"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
