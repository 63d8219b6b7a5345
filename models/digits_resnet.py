"""Train the embedded image model: a small ResNet on scikit-learn's handwritten digits.

    python -m onnxgrail.models.digits_resnet

takes about a minute on one CPU core and writes `digits_resnet.onnx`, its data files and its manifest entry.
The digits (Alpaydin and Kaynak, UCI Machine Learning Repository, CC BY 4.0) come with scikit-learn.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from onnxgrail.models import _artifacts, load, score

NAME = "digits_resnet"
SEED = 0
WIDTHS = (32, 64, 96)
BLOCKS_PER_STAGE = 1
EPOCHS = 16
BATCH = 64
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 5e-2
HELD_OUT = 400
CALIBRATION = 256

Images = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Digits:
    """Images `(n, 1, 16, 16)` in [-1, 1] with labels `(n,)`; calibration images are part of the training images."""

    train: Images
    train_labels: npt.NDArray[np.int64]
    calibration: Images
    heldout: Images
    heldout_labels: npt.NDArray[np.int64]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a residual connection; the channels between them are what pruning removes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map `(n, inputs, h, w)` to `(n, outputs, h / stride, w / stride)`."""
        hidden = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(hidden)) + self.shortcut(x))


class DigitsResNet(nn.Module):
    """Stem, three stages of basic blocks, global average pooling and a linear classifier."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS, blocks_per_stage: int = BLOCKS_PER_STAGE) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU())
        blocks: list[nn.Module] = []
        inputs = widths[0]
        for stage, width in enumerate(widths):
            for position in range(blocks_per_stage):
                stride = 2 if stage > 0 and position == 0 else 1
                blocks.append(BasicBlock(inputs, width, stride))
                inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images `(n, 1, 16, 16)` to logits `(n, 10)`."""
        features = self.blocks(self.stem(x))
        logits: Tensor = self.head(features.mean(dim=(-2, -1)))
        return logits


def digits() -> Digits:
    """Load, double in size, scale and split the digits; the split hangs on `SEED` alone."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    scaled = (images / 8.0 - 1.0).astype(np.float32).reshape(-1, 1, 8, 8)
    # Twice the size leaves the last stage 4x4 positions: at 2x2 its statistics would be too few to be typical.
    pixels = scaled.repeat(2, axis=2).repeat(2, axis=3)
    order = np.random.default_rng(SEED).permutation(len(pixels))
    heldout, train = order[:HELD_OUT], order[HELD_OUT:]
    return Digits(
        train=pixels[train],
        train_labels=labels[train].astype(np.int64),
        calibration=pixels[train[:CALIBRATION]],
        heldout=pixels[heldout],
        heldout_labels=labels[heldout].astype(np.int64),
    )


def shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move a batch `(n, 1, h, w)` by up to two pixels; 1 400 images alone would be learnt by heart."""
    rows, columns = torch.randint(0, 5, (2,), generator=generator).tolist()
    padded = functional.pad(images, (2, 2, 2, 2), value=-1.0)
    return padded[..., rows : rows + images.shape[-2], columns : columns + images.shape[-1]]


def train(model: nn.Module, images: Tensor, labels: Tensor, *, epochs: int = EPOCHS) -> float:
    """Fit `model` with AdamW and a one-cycle learning rate; return the mean loss of the last epoch."""
    generator = torch.Generator().manual_seed(SEED)
    batches = len(images) // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=epochs * batches)
    mean = float("nan")
    model.train()
    for epoch in range(epochs):
        losses = []
        for rows in torch.randperm(len(images), generator=generator)[: batches * BATCH].split(BATCH):
            logits = model(shift(images[rows], generator))
            loss = functional.cross_entropy(logits, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        mean = float(np.mean(losses))
        print(f"epoch {epoch + 1}/{epochs}: loss {mean:.4f}", file=sys.stderr)
    return mean


@torch.no_grad()
def halve_inner_channels(model: DigitsResNet) -> None:
    """Zero, in every block, the half of the inner channels with the smallest weights (l1): pruning without repair."""
    for block in model.blocks:
        assert isinstance(block, BasicBlock)
        scale = block.bn1.weight / torch.sqrt(block.bn1.running_var + block.bn1.eps)
        norms = block.conv1.weight.abs().sum(dim=(1, 2, 3)) * scale.abs()
        block.conv2.weight[:, norms.argsort()[: len(norms) // 2]] = 0.0


def metric(model: nn.Module) -> float:
    """Judge a torch module exactly as an ONNX file is judged."""
    model.eval()
    with torch.no_grad():
        accuracy: float = score(load(NAME), lambda feed: [model(torch.from_numpy(feed["images"])).numpy()])
    return accuracy


def main() -> None:
    """Train, write all files, and print what the manifest records."""
    _artifacts.seed_everything(SEED)
    data = digits()
    model = DigitsResNet()
    started = time.perf_counter()
    train(model, torch.from_numpy(data.train), torch.from_numpy(data.train_labels))
    seconds = round(time.perf_counter() - started)
    files = load(NAME)
    _artifacts.write_npz(files.calibration, images=data.calibration)
    _artifacts.write_npz(files.heldout, images=data.heldout, labels=data.heldout_labels)
    example = torch.from_numpy(data.calibration[:2])
    _artifacts.export(model, example, files.model, input_name="images", dynamic={0: "batch"})
    dense = metric(model)
    halve_inner_channels(model)
    entry: dict[str, Any] = {
        "script": f"{NAME}.py",
        "task": "handwritten digits, 10 classes",
        "data": "scikit-learn load_digits: UCI Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998)",
        "data_licence": "CC BY 4.0",
        "parameters": _artifacts.parameters(files.model),
        "metric": files.metric,
        "dense": round(dense, 4),
        "half_inner_channels_zeroed": round(metric(model), 4),
        "train_seconds": seconds,
        "blocks": {"conv": len(model.blocks), "stream": len(WIDTHS)},
    }
    _artifacts.record(NAME, entry, [Path(files.model), files.calibration, files.heldout])
    print(entry)


if __name__ == "__main__":
    main()
