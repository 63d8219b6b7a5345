"""Train two networks of dense convolutions on drawn shapes, for `bench.ranks`; needs torch.

    python -m bench.trained_convs FOLDER

Ten classes: five shapes with two textures each, colors at random, with noise. Writes `resnet.onnx` (2.8 million
parameters, 17 convolutions) and `vgg.onnx` (0.4 million, 7 convolutions), with 320 samples each for calibration and 680
others, and prints the accuracy on the latter.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

STEPS, BATCH, SIZE = 1500, 32, 48
CALIBRATION, HELD_OUT = 320, 680
RATE = 2e-3


def main() -> None:
    """Train, export and judge both networks."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name, make in (("resnet", resnet), ("vgg", vgg)):
        torch.manual_seed(0)
        network = trained(make())
        images, classes = drawn(CALIBRATION + HELD_OUT, torch.Generator().manual_seed(7))
        with torch.no_grad():
            right = (network(images[CALIBRATION:]).argmax(1) == classes[CALIBRATION:]).float().mean().item()
        print(f"{name}: {right:.1%} of {HELD_OUT} right")
        for part, some in (("calib", slice(CALIBRATION)), ("heldout", slice(CALIBRATION, None))):
            np.savez(folder / f"{name}.{part}.npz", images=images[some].numpy())
        torch.onnx.export(
            network,
            (images[:2],),
            str(folder / f"{name}.onnx"),
            input_names=["images"],
            output_names=["logits"],
            dynamic_axes={"images": {0: "n"}, "logits": {0: "n"}},
            dynamo=False,
        )


def trained(network: nn.Module) -> nn.Module:
    """Train a network, with a rate that falls to nothing."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(network.parameters(), RATE, weight_decay=0.01)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        images, classes = drawn(BATCH, generator)
        loss = nn.functional.cross_entropy(network(images), classes)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return network.eval()


def drawn(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw (count, 3, size, size) images, and their classes."""

    def between(low: float, high: float) -> Tensor:
        return torch.rand(count, 1, 1, generator=generator) * (high - low) + low

    line = torch.linspace(-1, 1, SIZE)
    down, right = torch.meshgrid(line, line, indexing="ij")
    classes = torch.randint(0, 10, (count,), generator=generator)
    x, y, size, turn = between(-0.4, 0.4), between(-0.4, 0.4), between(0.3, 0.55), between(0, 3.14)
    u = (right - x) * turn.cos() + (down - y) * turn.sin()
    v = (down - y) * turn.cos() - (right - x) * turn.sin()
    a, b = u.abs(), v.abs()
    cross = torch.minimum(torch.maximum(a, 3 * b), torch.maximum(3 * a, b))
    forms = torch.stack([(u**2 + v**2).sqrt(), torch.maximum(a, b), a + b, torch.maximum(0.45 * a, 1.6 * b), cross])
    inside = (forms[classes % 5, torch.arange(count)] < size).float()
    pitch, slope = between(8, 14), between(0, 3.14)
    stripes = torch.sin(pitch * (right * slope.cos() + down * slope.sin()))
    checks = torch.sin(pitch * right) * torch.sin(pitch * down)
    texture = torch.where((classes < 5).view(-1, 1, 1), stripes, checks)
    front, back = (torch.rand(count, 3, 1, 1, generator=generator) * 0.6 for _ in range(2))
    images = torch.where(inside[:, None] > 0, front + 0.4 * texture[:, None], back)
    return images + 0.1 * torch.randn(count, 3, SIZE, SIZE, generator=generator), classes


def layer(read: int, made: int, stride: int = 1) -> nn.Sequential:
    """A convolution with a normalization and an activation."""
    return nn.Sequential(nn.Conv2d(read, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made), nn.ReLU())


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, read: int, made: int, stride: int) -> None:
        """Make the layers."""
        super().__init__()
        self.first = layer(read, made, stride)
        self.second = nn.Sequential(nn.Conv2d(made, made, 3, 1, 1, bias=False), nn.BatchNorm2d(made))
        same = read == made and stride == 1
        self.short = nn.Identity() if same else nn.Sequential(nn.Conv2d(read, made, 1, stride), nn.BatchNorm2d(made))

    def forward(self, x: Tensor) -> Tensor:
        """Add both ways."""
        return nn.functional.relu(self.second(self.first(x)) + self.short(x))


def resnet() -> nn.Module:
    """A ResNet-18 with half of the channels."""
    parts, read = [layer(3, 32, 2)], 32
    for made, stride in ((32, 1), (64, 2), (128, 2), (256, 2)):
        parts += [Residual(read, made, stride), Residual(made, made, 1)]
        read = made
    return nn.Sequential(*parts, *head(read))


def vgg() -> nn.Module:
    """Seven convolutions in a row."""
    widths = ((3, 32, 1), (32, 32, 2), (32, 64, 1), (64, 64, 2), (64, 128, 1), (128, 128, 2), (128, 128, 1))
    return nn.Sequential(*(layer(*one) for one in widths), *head(128))


def head(read: int) -> tuple[nn.Module, ...]:
    """Means over the image, and scores of ten classes."""
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(read, 10)


if __name__ == "__main__":
    main()
