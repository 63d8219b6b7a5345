"""Models that the tests of export name as `nets.py:function`; a copy of this file is run as a user's file would be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor


@dataclass
class Sizes:
    channels: int = 16
    classes: int = 5


class Net(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, sizes.channels, 3, padding=1)
        self.second = nn.Conv2d(sizes.channels, sizes.channels, 3)
        self.head = nn.Linear(sizes.channels, sizes.classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.second(self.first(image).relu()).relu().mean((2, 3)))


class Encoder(nn.Module):
    """Several inputs, one of them no tensor, and nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)

    def forward(self, ids: Tensor, bias: Tensor, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.layer(self.embed(ids) + bias) * scale
        return {"hidden": hidden, "pooled": (hidden.sum(1), [hidden.mean(1)]), "cache": object()}


class Branch(nn.Module):
    """A branch that depends on values: no exporter can write it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Loose(nn.Module):
    """Whole only for its first batch: a trace fixes what went through a list."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones_like(torch.tensor(x.tolist()))


class Pairs(nn.Module):
    """Takes exactly two samples."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x
        return first - second


class Noise(nn.Module):
    """Never the same."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(4)


class Held(nn.Module):
    """Data that no graph can hold."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor(sorted(x.flatten().tolist())).to_sparse()


def net() -> Any:
    torch.manual_seed(1)
    return Net(Sizes()), torch.randn(1, 3, 12, 12)


def bare() -> Any:
    return Net(Sizes())


VALUE = Net(Sizes())


def encoder() -> Any:
    return Encoder(), {"ids": torch.ones(2, 5, dtype=torch.int64), "bias": torch.randn(2, 5, 16), "scale": 0.5}


def branch() -> Any:
    return Branch(), torch.ones(2, 4)


def loose() -> Any:
    return Loose(), torch.randn(2, 4)


def pairs() -> Any:
    return Pairs(), torch.randn(2, 4)


def noise() -> Any:
    return Noise(), torch.randn(2, 4)


def held() -> Any:
    return Held(), torch.randn(2, 4)


def number() -> Any:
    return 3, torch.ones(2)


def wrong() -> Any:
    return Net(Sizes()), {"picture": torch.ones(2, 3, 12, 12)}


def small() -> Any:
    return Net(Sizes()), torch.ones(2, 4, 12, 12)


def boom() -> Any:
    raise ValueError("not\ntoday")


@dataclass
class Answer:
    scores: Tensor
    rest: Any


class Packed(nn.Module):
    """Tensors inside of a mapping and of a list, and a class of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, batch: dict[str, Tensor], *, more: list[Tensor], factors: tuple[int, ...] = (1, 1)) -> Answer:
        total = sum(self.layer(tensor) * factor for tensor, factor in zip(more, factors, strict=True))
        return Answer(self.layer(batch["x"]) + batch["y"] + total, (total,))


def packed() -> Any:
    batch = {"x": torch.randn(2, 6), "y": torch.randn(2, 5)}
    return Packed(), {"batch": batch, "more": [torch.randn(2, 6), torch.randn(2, 6)], "factors": (2, 3)}


def compiled() -> Any:
    return torch.compile(Net(Sizes())), torch.randn(1, 3, 12, 12)


def script() -> Any:
    module = Net(Sizes()).eval()
    return torch.jit.trace(module, torch.randn(1, 3, 12, 12)), torch.randn(1, 3, 12, 12)


class Halves(nn.Module):
    """Takes maps of even sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 3, 2, 1), nn.ConvTranspose2d(4, 3, 2, 2)

    def forward(self, image: Tensor) -> Tensor:
        return image + self.up(self.down(image).relu())


def halves() -> Any:
    return Halves(), torch.randn(1, 3, 16, 16)


class Twelve(nn.Module):
    """Runs at one size of its map and at no other."""

    def forward(self, image: Tensor) -> Tensor:
        if image.shape[-1] != 12:
            raise ValueError("not twelve")
        return image * 2


def twelve() -> Any:
    return Twelve(), torch.randn(2, 3, 12)
