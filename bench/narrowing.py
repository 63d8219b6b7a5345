"""Narrow one block of the embedded digits model at every width, for the page that shows how narrowing and repair work.

    python -m bench.narrowing > bench/results/narrowing.json

For every width: which channels go, the error of the layer that reads them and the accuracy of the model, both on
held-out images, for channels that are removed, removed and repaired, merged and repaired, and with the default, which
refits layers downstream too.  `docs/narrowing_page.py` writes the page and the picture.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import onnxgrail
from onnxgrail import models
from onnxgrail.fidelity.intervals import of_count

MODEL, BLOCK, WIDTH = "digits_resnet", "blocks.0.conv", 32
OUTPUT = "getitem_6"  # of the consumer, `blocks.0.conv2`
WAYS: dict[str, dict[str, str]] = {
    "removed": {"selector": "wanda", "compensate": "none"},
    "repaired": {"selector": "wanda", "compensate": "grail"},
    "merged": {"reducer": "fold", "compensate": "grail"},
    "default": {"selector": "wanda", "compensate": "best"},
}
SHOWN = ("removed", "repaired")  # ways of which the page has an image
IMAGE = 3  # of the held-out images
LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz+-"

Array = np.ndarray[Any, Any]


def measure(widths: Sequence[int] = range(WIDTH - 1, 0, -1)) -> dict[str, Any]:
    """Return the figures of the page at these widths, and those of the original."""
    embedded = models.load(MODEL)
    with np.load(embedded.heldout) as file:
        images, labels = file["images"], file["labels"]
    with tempfile.TemporaryDirectory(prefix="narrowing-") as folder:
        dense, scores = outputs(onnx.load(embedded.model), images)
        channel = int(np.argmax(np.square(dense).sum(axis=(0, 2, 3))))
        top = float(np.abs(dense[IMAGE, channel]).max())
        steps = []
        for width in widths:
            file = Path(folder) / "small.onnx"
            step: dict[str, Any] = {"width": width}
            for way in WAYS:
                step |= narrowed(embedded, way, width, file)
                found, now = outputs(onnx.load(file), images)
                step[way] = {"error": error(found, dense), **accuracy(now, labels)}
                if way in SHOWN:
                    step[way]["map"] = drawn(found[IMAGE, channel], top)
            steps.append(step)
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "model": MODEL,
        "block": BLOCK,
        "width": WIDTH,
        "samples": {"calibration": samples(embedded), "held_out": len(labels)},
        "dense": {
            **accuracy(scores, labels),
            "map": drawn(dense[IMAGE, channel], top),
            "input": drawn((images[IMAGE, 0] + 1) / 2, 1.0),
            "side": int(dense.shape[-1]),
        },
        "steps": steps,
    }


def narrowed(embedded: models.Embedded, way: str, width: int, file: Path) -> dict[str, Any]:
    """Narrow the block in one way; return its channels that stay, or the group of each channel."""
    result = onnxgrail.compress(
        embedded.model,
        file,
        data=embedded.calibration,
        held_out=0,
        unit_ratio=(WIDTH - width) / WIDTH,
        include=f"^{re.escape(BLOCK)}$",
        allocate="uniform",
        round_to=1,
        check=False,
        force=True,
        **WAYS[way],
    )
    block = next(entry for entry in result.report.data["blocks"] if entry["name"] == BLOCK)
    if block["kept"] != width:
        raise SystemExit(f"{BLOCK} has {block['kept']} channels, expected {width}")
    producer = next(member for member in block["members"] if member["role"] == "producer")
    if way == "merged":
        return {"groups": producer["cluster"]}
    return {"kept": producer["kept"]}


def outputs(model: onnx.ModelProto, images: Array) -> tuple[Array, Array]:
    """Return the output of the consumer and of the model for all images."""
    model.graph.output.append(onnx.helper.make_tensor_value_info(OUTPUT, onnx.TensorProto.FLOAT, None))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    opened = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found, scores = opened.run([OUTPUT, opened.get_outputs()[0].name], {"images": images})
    return found, scores


def error(found: Array, dense: Array) -> float:
    """Return the squared error as a share of the squared output."""
    return round(float(np.square(found - dense).sum() / np.square(dense).sum()), 4)


def accuracy(scores: Array, labels: Array) -> dict[str, Any]:
    """Return the share of right answers with its 95 % interval."""
    right = int((scores.argmax(axis=1) == labels).sum())
    return {
        "accuracy": round(right / len(labels), 4),
        "interval": [round(end, 4) for end in of_count(right, len(labels)) or ()],
    }


def drawn(values: Array, top: float) -> str:
    """Return an image as one character per pixel, from -top to top."""
    steps = np.clip(np.rint((values / top + 1) / 2 * (len(LEVELS) - 1)), 0, len(LEVELS) - 1).astype(int)
    return "".join(LEVELS[step] for step in steps.ravel())


def samples(embedded: models.Embedded) -> int:
    """Return the number of calibration images."""
    with np.load(embedded.calibration) as file:
        return len(file["images"])


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
    print()
