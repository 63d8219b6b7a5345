"""Draw a figure per subject: a panel per selector, a line per compensation, a band between worst and best split."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.fidelity import summary
from bench.fidelity.methods import REPAIRS, SIM_REPAIRS

COLOURS = {
    "none": "#888888",
    "grail-open": "#4c9be8",
    "grail-closed": "#c0392b",
    "best": "#2e8b57",
    "finetune": "#4c9be8",
}
HEIGHT, WIDTH, DPI = 2.7, 2.5, 75
CEILING = 100.0
"""Upper limit of the axis as a multiple of the dense perplexity; larger values would flatten the rest."""


def write(data: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw all subjects and return the files; empty without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no figures: matplotlib is not installed", file=sys.stderr)
        return []
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    return [draw(data, name, folder / figure(name)) for name in data["subjects"]]


def figure(subject: str) -> str:
    """Return the file name of a subject's figure."""
    return f"fidelity-{subject}.png"


def draw(data: Mapping[str, Any], subject: str, path: Path) -> Path:
    """Draw a row of panels with a common scale."""
    from matplotlib import pyplot as plt

    points, about = summary.series(data, subject), data["subjects"][subject]
    panels = [*summary.bases(points), *sorted({m.split("/")[0] for m in points if m.startswith("onnxsim")})]
    picture, axes = plt.subplots(1, len(panels), figsize=(WIDTH * len(panels), HEIGHT), sharey=True, squeeze=False)
    for axis, base in zip(axes[0], panels, strict=True):
        for repair in [*REPAIRS, *SIM_REPAIRS[1:]]:
            if f"{base}/{repair}" in points:
                _line(axis, points[f"{base}/{repair}"], repair)
        axis.axhline(about["score"], color="black", linewidth=0.8, linestyle=":")
        axis.set_title(base, fontsize=9)
        axis.set_xlabel("ratio", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=6, frameon=False)
    axes[0][0].set_ylabel(about["metric"], fontsize=8)
    if about["metric"] == "perplexity":
        axes[0][0].set_yscale("log")
        axes[0][0].set_ylim(0.9 * about["score"], CEILING * about["score"])
    picture.tight_layout(pad=0.4)
    picture.savefig(path, dpi=DPI, metadata={"Software": None})
    plt.close(picture)
    return path


def _line(axis: Any, line: summary.Series, repair: str) -> None:
    ratios = sorted(line)
    shown = [min(line[ratio].score, 1e30) for ratio in ratios]
    low, high = ([min(getattr(line[r], side), 1e30) for r in ratios] for side in ("low", "high"))
    assert all(math.isfinite(value) for value in shown)
    axis.plot(ratios, shown, color=COLOURS[repair], linewidth=1.2, marker=".", markersize=4, label=repair)
    axis.fill_between(ratios, low, high, color=COLOURS[repair], alpha=0.2, linewidth=0)
