"""The choice of blocks."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.core import Block, Kind, Recipe
from onnxgrail.errors import UsageError
from onnxgrail.recipe.selection import selected


def block(name: str, kind: Kind = "mlp", units: int = 16, size: int = 1, nodes: tuple[str, ...] = ()) -> Block:
    return Block(
        name=name,
        kind=kind,
        units=units,
        unit_size=size,
        slots=(),
        probes=(),
        ids=np.arange(1, units + 1),
        span=(0, 1),
        nodes=nodes,
    )


def test_kinds_and_patterns_choose_blocks() -> None:
    blocks = [
        block("encoder.0.mlp", nodes=("encoder.0.fc1", "encoder.0.fc2")),
        block("encoder.1.mlp", nodes=("encoder.1.fc1",)),
        block("encoder.0.heads", "heads"),
        block("stem.stream", "stream"),
    ]

    def chosen(**options: object) -> list[str]:
        return [b.name for b in selected(blocks, Recipe(**options))]  # type: ignore[arg-type]

    assert chosen() == [b.name for b in blocks]
    assert chosen(blocks=("mlp", "heads")) == ["encoder.0.mlp", "encoder.1.mlp", "encoder.0.heads"]
    assert chosen(blocks=("stream",)) == ["stem.stream"]
    assert chosen(include=r"encoder\.0\.") == ["encoder.0.mlp", "encoder.0.heads"]
    assert chosen(include="fc2$") == ["encoder.0.mlp"]
    assert chosen(exclude="fc1") == ["encoder.0.heads", "stem.stream"]
    assert chosen(include="encoder", exclude="heads") == ["encoder.0.mlp", "encoder.1.mlp"]


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_broken_pattern_is_named(option: str) -> None:
    with pytest.raises(UsageError, match=rf"--{option} '\('"):
        selected([block("a")], Recipe(**{option: "("}))  # type: ignore[arg-type]
