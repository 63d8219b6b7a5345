"""Measure how often the upper bound of the loss holds on fresh samples of the embedded digits.

    python bench/bound_on_digits.py > bench/results/bound_on_digits.json

Both networks are compressed at some ratios.  Then some held-out samples are chosen at random to judge, and the bound
from them is compared with the mean loss of all other held-out samples.  JSON on stdout.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.both import Pair, run_both
from onnxgrail.calibration.feeds.data import read_apart
from onnxgrail.calibration.feeds.reading import Sampling
from onnxgrail.calibration.feeds.signature import signature_of
from onnxgrail.fidelity.loss import losses_of, upper_bound
from onnxgrail.graph.io import model_file

MODELS, RATIOS = ("digits_resnet", "digits_vit"), (0.1, 0.3, 0.5)
COUNTS, SEEDS = (8, 16, 32, 64, 128), 200


def main() -> None:
    """Measure, and print the results."""
    rows = [row for name in MODELS for ratio in RATIOS for row in coverage(name, ratio)]
    print(json.dumps({"version": onnxgrail.__version__, "seeds": SEEDS, "rows": rows}, indent=1))


def coverage(name: str, ratio: float) -> list[dict[str, Any]]:
    """Return per number of judging samples the share of seeds for which the bound holds."""
    values = losses(name, ratio)
    rows = []
    for count in COUNTS:
        held, looseness = 0, []
        for seed in range(SEEDS):
            order = np.random.default_rng(seed).permutation(len(values))
            judging, fresh = values[order[:count]], values[order[count:]]
            bound = min(1.0, upper_bound(judging, most=1.0))
            held += bool(fresh.mean() <= bound)
            looseness.append(bound / values.mean())
        median = float(np.median(looseness))
        rows.append(
            {"model": name, "ratio": ratio, "samples": count, "holds": held / SEEDS, "of_mean": round(median, 2)}
        )
    return rows


def losses(name: str, ratio: float) -> Any:
    """Return the loss of every held-out sample."""
    embedded = models.load(name)
    images = {key: array for key, array in np.load(embedded.heldout).items() if key != "labels"}
    batches = read_apart(images, signature_of(model_file.load(embedded.model)), 0, Sampling(batch_size=64))[0]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "small.onnx"
        onnxgrail.compress(embedded.model, file, data=embedded.calibration, ratio=ratio)
        return losses_of(run_both(Pair(embedded.model, file), batches))[0].values


if __name__ == "__main__":
    main()
