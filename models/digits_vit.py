"""Train the embedded vision transformer: four pre-norm blocks on scikit-learn's handwritten digits.

    python -m onnxgrail.models.digits_vit

takes a few minutes on one CPU core and writes `digits_vit.onnx`, its data files and its manifest entry.  The images
and their split are those of `digits_resnet`, at their original size of 8x8 pixels: 16 patches and a class token.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from onnxgrail.models import _artifacts, load, score
from onnxgrail.models.digits_resnet import Digits, Images, digits

NAME = "digits_vit"
SEED = 0
PATCH = 2
WIDTH = 64
DEPTH = 4
HEADS = 4
HIDDEN = 4 * WIDTH
SIDE = 8
EPOCHS = 120
BATCH = 64
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 5e-2
SMOOTHING = 0.1


class Attention(nn.Module):
    """Self-attention with queries, keys and values from one matrix, as vision transformers are usually written."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens `(n, t, width)` to tokens of the same shape."""
        batch, tokens, width = x.shape
        split = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        joined: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return joined


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm and beside a residual connection."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens `(n, t, width)` to tokens of the same shape."""
        x = x + self.attention(self.norm1(x))
        changed: Tensor = x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))
        return changed


class DigitsViT(nn.Module):
    """Patch embedding, class token, learnt positions, blocks, norm and a linear classifier of the class token."""

    def __init__(self, width: int = WIDTH, depth: int = DEPTH, heads: int = HEADS, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (SIDE // PATCH) ** 2, width))
        self.layers = nn.Sequential(*(Layer(width, heads, hidden) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images `(n, 1, 8, 8)` to logits `(n, 10)`."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], dim=1) + self.positions
        logits: Tensor = self.head(self.norm(self.layers(tokens))[:, 0])
        return logits


def original_size(images: Images) -> Images:
    """Undo the doubling of `digits`: every second pixel, `(n, 1, 16, 16)` to `(n, 1, 8, 8)`."""
    return np.ascontiguousarray(images[..., ::2, ::2])


def small_digits() -> Digits:
    """The digits of `digits_resnet` at their original size."""
    doubled = digits()
    return Digits(
        train=original_size(doubled.train),
        train_labels=doubled.train_labels,
        calibration=original_size(doubled.calibration),
        heldout=original_size(doubled.heldout),
        heldout_labels=doubled.heldout_labels,
    )


def moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move, turn and scale every image a little: a transformer has to learn from data what convolutions have built in.

    At most about one pixel, 12 degrees and a tenth; what comes in from outside is background.
    """
    count = len(images)

    def draw(limit: float) -> Tensor:
        return limit * (2.0 * torch.rand(count, generator=generator) - 1.0)

    angle, size = draw(math.radians(12.0)), 1.0 + draw(0.1)
    cosine, sine = torch.cos(angle) * size, torch.sin(angle) * size
    rows = torch.stack([cosine, -sine, draw(0.25), sine, cosine, draw(0.25)], dim=1).reshape(count, 2, 3)
    grid = functional.affine_grid(rows, list(images.shape), align_corners=False)
    # Sampling fills up with zeros; shifting the background to zero first makes that the background.
    return functional.grid_sample(images + 1.0, grid, align_corners=False) - 1.0


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
            logits = model(moved(images[rows], generator))
            loss = functional.cross_entropy(logits, labels[rows], label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        mean = float(np.mean(losses))
        print(f"epoch {epoch + 1}/{epochs}: loss {mean:.4f}", file=sys.stderr, flush=True)
    return mean


def main() -> None:
    """Train, write all files, and print what the manifest records."""
    _artifacts.seed_everything(SEED)
    data = small_digits()
    model = DigitsViT()
    started = time.perf_counter()
    train(model, torch.from_numpy(data.train), torch.from_numpy(data.train_labels))
    seconds = round(time.perf_counter() - started)
    files = load(NAME)
    _artifacts.write_npz(files.calibration, images=data.calibration)
    _artifacts.write_npz(files.heldout, images=data.heldout, labels=data.heldout_labels)
    example = torch.from_numpy(data.calibration[:2])
    _artifacts.export(model, example, files.model, input_name="images", dynamic={0: "batch"})
    with torch.no_grad():
        dense = score(files, lambda feed: [model(torch.from_numpy(feed["images"])).numpy()])
    entry: dict[str, Any] = {
        "script": f"{NAME}.py",
        "task": "handwritten digits, 10 classes",
        "data": "scikit-learn load_digits: UCI Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998)",
        "data_licence": "CC BY 4.0",
        "parameters": _artifacts.parameters(files.model),
        "metric": files.metric,
        "dense": round(dense, 4),
        "train_seconds": seconds,
        "blocks": {"mlp": DEPTH, "heads": DEPTH},
    }
    _artifacts.record(NAME, entry, [Path(files.model), files.calibration, files.heldout])
    print(entry)


if __name__ == "__main__":
    main()
