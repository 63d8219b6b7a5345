"""What the tests of export name as `nets.py:function`; a copy of it is run as a user's file would be."""

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
