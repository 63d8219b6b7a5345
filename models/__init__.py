"""Small trained models, with calibration and held-out data.

Each has an ONNX file, unlabeled calibration data and labeled held-out data; the script of the same name trains
it from scratch, and `manifest.toml` holds provenance and checksums.  Reading them needs numpy alone.  The files are a
distribution of their own, `onnxgrail-models`, which the extra `demo` installs; in the repository they are in `data/`.
"""

from __future__ import annotations

import importlib.util
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from onnxgrail.errors import MissingExtraError, UsageError

__all__ = ["Embedded", "load", "manifest", "names", "score"]

_BESIDE = Path(__file__).resolve().parent / "data"
_PACKAGE = "onnxgrail_models"

Array = npt.NDArray[Any]
Run = Callable[[dict[str, Array]], Sequence[Array]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedded:
    """An embedded model: its files and its metric."""

    name: str
    model: Path
    calibration: Path
    heldout: Path
    metric: Literal["accuracy", "perplexity"]


_METRICS: dict[str, Literal["accuracy", "perplexity"]] = {
    "char_llama": "perplexity",
    "digits_resnet": "accuracy",
    "digits_vit": "accuracy",
}


def names() -> tuple[str, ...]:
    """Return the names that `load` takes."""
    return tuple(_METRICS)


def load(name: str) -> Embedded:
    """Return the files of an embedded model.

    Raises:
        UsageError: there is no model of that name.
        MissingExtraError: the files are not installed.
    """
    if name not in _METRICS:
        raise UsageError(f"no embedded model is called {name!r}", hint=f"There are {', '.join(names())}")
    files = folder()
    return Embedded(
        name=name,
        model=files / f"{name}.onnx",
        calibration=files / f"{name}.calib.npz",
        heldout=files / f"{name}.heldout.npz",
        metric=_METRICS[name],
    )


def folder() -> Path:
    """Return the folder of the files: that of the repository, or else that of the installed `onnxgrail-models`.

    Raises:
        MissingExtraError: there is neither.
    """
    if _BESIDE.is_dir():
        return _BESIDE
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:  # a folder that only has the name has no origin
        raise MissingExtraError("the embedded models are not installed", hint="Run: pip install 'onnxgrail[demo]'")
    return Path(spec.origin).parent


def manifest() -> Mapping[str, Any]:
    """Read `manifest.toml`: provenance, license, checksums and dense metric, by model name.

    Raises:
        MissingExtraError: the files are not installed.
    """
    return tomllib.loads((folder() / "manifest.toml").read_text(encoding="utf-8"))


def score(embedded: Embedded, run: Run, *, batch_size: int = 64) -> float:
    """Return the metric of a model on the held-out data of `embedded`.

    Accuracy is the share of samples whose largest logit is the label (higher is better).  Perplexity is
    exp(mean negative log-likelihood of the labels) (lower is better, 1 is perfect).

    Args:
        embedded: gives the data and the metric.
        run: maps a feed to the outputs, the first of which holds the logits `(..., classes)`.
        batch_size: samples per call of `run`.
    """
    samples = scores(embedded, run, batch_size=batch_size)
    mean = float(samples[:, 0].sum() / samples[:, 1].sum())
    if embedded.metric == "accuracy":
        return mean
    # The perplexity of a ruined model can exceed the range of floats; infinity is then the correct result.
    return math.exp(mean) if mean < 700.0 else math.inf


def scores(embedded: Embedded, run: Run, *, batch_size: int = 64) -> Array:
    """Return the terms of the metric by sample: (samples, 2), their sum and the number of labels.

    Args:
        embedded: gives the data and the metric.
        run: maps a feed to the outputs, the first of which holds the logits `(..., classes)`.
        batch_size: samples per call of `run`.
    """
    with np.load(embedded.heldout, allow_pickle=False) as archive:
        arrays: dict[str, Array] = {key: archive[key] for key in archive.files}
    labels = arrays.pop("labels")
    found = []
    for start in range(0, len(labels), batch_size):
        rows = slice(start, start + batch_size)
        logits = np.asarray(run({key: array[rows] for key, array in arrays.items()})[0], dtype=np.float64)
        right = labels[rows].reshape(len(logits), -1)
        if embedded.metric == "accuracy":
            sums = (logits.argmax(axis=-1) == labels[rows]).reshape(right.shape).sum(axis=1)
        else:
            sums = _negative_log_likelihood(logits, labels[rows]).reshape(right.shape).sum(axis=1)
        found.append(np.stack([sums, np.full(len(right), right.shape[1])], axis=1).astype(np.float64))
    return np.concatenate(found)


def _negative_log_likelihood(logits: Array, labels: Array) -> Array:
    """Return -log softmax(logits)[label] for logits `(..., classes)` and labels `(...)`, shifted to avoid overflow."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    picked = np.take_along_axis(shifted, labels[..., None], axis=-1)[..., 0]
    return np.asarray(np.log(np.exp(shifted).sum(axis=-1)) - picked)
