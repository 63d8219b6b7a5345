"""Train the embedded vision transformer: four pre-norm blocks on scikit-learn's handwritten digits.

    python -m onnxgrail.models.digits_vit

takes a few minutes on one CPU core and writes `digits_vit.onnx`, its data files and its manifest entry.  The images
and their split are those of `digits_resnet`, at their original size of 8x8 pixels: 16 patches and a class token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from onnxgrail.models import _artifacts, load
from onnxgrail.models._digits import SEED, describe, digits, fit, trained

NAME = "digits_vit"
PATCH = 2
WIDTH = 64
DEPTH = 4
HEADS = 4
HIDDEN = 4 * WIDTH
SIDE = 8
EPOCHS = 120
LEARNING_RATE = 2e-3
SMOOTHING = 0.1
LARGEST_GRADIENT = 1.0


class Attention(nn.Module):
    """Self-attention with queries, keys and values from one matrix, as is usual in vision transformers."""

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
    """Attention and an MLP, each after a norm and with a residual connection."""

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
    """Patch embedding, class token, learned positions, blocks, norm and a linear classifier of the class token."""

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


def moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move, turn and scale every image a little, because transformers lack the invariances of convolutions.

    At most about one pixel, 12 degrees and a tenth; the border is filled with background.
    """
    count = len(images)

    def draw(limit: float) -> Tensor:
        return limit * (2.0 * torch.rand(count, generator=generator) - 1.0)

    angle, size = draw(math.radians(12.0)), 1.0 + draw(0.1)
    cosine, sine = torch.cos(angle) * size, torch.sin(angle) * size
    rows = torch.stack([cosine, -sine, draw(0.25), sine, cosine, draw(0.25)], dim=1).reshape(count, 2, 3)
    grid = functional.affine_grid(rows, list(images.shape), align_corners=False)
    # Sampling fills with zeros; shifting the background to zero before makes that the background.
    return functional.grid_sample(images + 1.0, grid, align_corners=False) - 1.0


def train(model: nn.Module, images: Tensor, labels: Tensor, *, epochs: int = EPOCHS) -> float:
    """Fit `model`; return the mean loss of the last epoch."""
    loss: float = fit(
        model, images, labels, epochs=epochs, rate=LEARNING_RATE, move=moved, smoothing=SMOOTHING, clip=LARGEST_GRADIENT
    )
    return loss


def main() -> None:
    """Train, write all files, and print the manifest entry."""
    _artifacts.seed_everything(SEED)
    files, model = load(NAME), DigitsViT()
    seconds = trained(files, model, digits(), train)
    describe(files, {"dense": _artifacts.metric(files, model)}, seconds, {"mlp": DEPTH, "heads": DEPTH})


if __name__ == "__main__":
    main()
