"""Common code of the image models: the handwritten digits, the training loop, and the output files.

The digits (Alpaydin and Kaynak, UCI Machine Learning Repository, CC BY 4.0) come with scikit-learn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from onnxgrail.models import Embedded, _artifacts

SEED = 0
BATCH = 64
WEIGHT_DECAY = 5e-2
HELD_OUT = 400
CALIBRATION = 256

Images = npt.NDArray[np.float32]
Move = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Digits:
    """Images `(n, 1, h, w)` in [-1, 1] with labels `(n,)`; calibration images are part of the training images."""

    train: Images
    train_labels: npt.NDArray[np.int64]
    calibration: Images
    heldout: Images
    heldout_labels: npt.NDArray[np.int64]


def digits(factor: int = 1) -> Digits:
    """Load, enlarge, scale and split the digits, 8x8 pixels times `factor`; the split depends only on `SEED`."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    scaled = (images / 8.0 - 1.0).astype(np.float32).reshape(-1, 1, 8, 8)
    pixels = scaled.repeat(factor, axis=2).repeat(factor, axis=3)
    order = np.random.default_rng(SEED).permutation(len(pixels))
    heldout, train = order[:HELD_OUT], order[HELD_OUT:]
    return Digits(
        train=pixels[train],
        train_labels=labels[train].astype(np.int64),
        calibration=pixels[train[:CALIBRATION]],
        heldout=pixels[heldout],
        heldout_labels=labels[heldout].astype(np.int64),
    )


def fit(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    rate: float,
    move: Move,
    smoothing: float = 0.0,
    clip: float | None = None,
) -> float:
    """Fit `model` with AdamW and a one-cycle learning rate; return the mean loss of the last epoch.

    Args:
        model: maps images to logits.
        images: `(n, 1, h, w)`.
        labels: `(n,)`.
        epochs: passes over the images.
        rate: the highest learning rate.
        move: augments a batch.
        smoothing: of the labels.
        clip: largest norm of a gradient, None for no limit.
    """
    generator = torch.Generator().manual_seed(SEED)
    batches = len(images) // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * batches)
    mean = float("nan")
    model.train()
    for epoch in range(epochs):
        losses = []
        for rows in torch.randperm(len(images), generator=generator)[: batches * BATCH].split(BATCH):
            logits = model(move(images[rows], generator))
            loss = functional.cross_entropy(logits, labels[rows], label_smoothing=smoothing)
            optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        mean = float(np.mean(losses))
        print(f"epoch {epoch + 1}/{epochs}: loss {mean:.4f}", file=sys.stderr, flush=True)
    return mean


def trained(
    files: Embedded, model: nn.Module, data: Digits, train: Callable[[nn.Module, Tensor, Tensor], float]
) -> int:
    """Train a model and write its files; return the seconds that training took."""
    started = time.perf_counter()
    train(model, torch.from_numpy(data.train), torch.from_numpy(data.train_labels))
    seconds = round(time.perf_counter() - started)
    heldout = {"images": data.heldout, "labels": data.heldout_labels}
    _artifacts.write(files, model, {"images": data.calibration}, heldout, dynamic={0: "batch"})
    return seconds


def describe(files: Embedded, judged: Mapping[str, float], seconds: int, blocks: Mapping[str, int]) -> None:
    """Write the manifest entry of a model for digits."""
    _artifacts.describe(
        files,
        task="handwritten digits, 10 classes",
        data="scikit-learn load_digits: UCI Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998)",
        data_licence="CC BY 4.0",
        judged=judged,
        seconds=seconds,
        blocks=blocks,
    )
