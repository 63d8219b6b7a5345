"""Train the embedded image model: a small ResNet on scikit-learn's handwritten digits.

    python -m onnxgrail.models.digits_resnet

takes about a minute on one CPU core and writes `digits_resnet.onnx`, its data files and its manifest entry.  The images
are twice their original size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from onnxgrail.models import _artifacts, load
from onnxgrail.models._digits import SEED, describe, digits, fit, trained

NAME = "digits_resnet"
WIDTHS = (32, 64, 96)
BLOCKS_PER_STAGE = 1
EPOCHS = 16
LEARNING_RATE = 3e-3


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a residual connection; pruning removes the channels between them."""

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


def shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move a batch `(n, 1, h, w)` by up to two pixels, because 1,400 images alone would be memorized."""
    rows, columns = torch.randint(0, 5, (2,), generator=generator).tolist()
    padded = functional.pad(images, (2, 2, 2, 2), value=-1.0)
    return padded[..., rows : rows + images.shape[-2], columns : columns + images.shape[-1]]


def train(model: nn.Module, images: Tensor, labels: Tensor, *, epochs: int = EPOCHS) -> float:
    """Fit `model`; return the mean loss of the last epoch."""
    loss: float = fit(model, images, labels, epochs=epochs, rate=LEARNING_RATE, move=shift)
    return loss


@torch.no_grad()
def halve_inner_channels(model: DigitsResNet) -> None:
    """Zero, in every block, the half of the inner channels with the smallest l1 norm: pruning without compensation."""
    for block in model.blocks:
        assert isinstance(block, BasicBlock)
        scale = block.bn1.weight / torch.sqrt(block.bn1.running_var + block.bn1.eps)
        norms = block.conv1.weight.abs().sum(dim=(1, 2, 3)) * scale.abs()
        block.conv2.weight[:, norms.argsort()[: len(norms) // 2]] = 0.0


def main() -> None:
    """Train, write all files, and print the manifest entry."""
    _artifacts.seed_everything(SEED)
    files, model = load(NAME), DigitsResNet()
    # Twice the size leaves 4x4 positions in the last stage: 2x2 would give too few rows for its statistics.
    seconds = trained(files, model, digits(2), train)
    dense = _artifacts.metric(files, model)
    halve_inner_channels(model)
    judged = {"dense": dense, "half_inner_channels_zeroed": _artifacts.metric(files, model)}
    describe(files, judged, seconds, {"conv": len(model.blocks), "stream": len(WIDTHS)})


if __name__ == "__main__":
    main()
