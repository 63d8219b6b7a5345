"""Widths from a ratio, and the choice of blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxgrail.core import Block, Kind, Recipe
from onnxgrail.errors import UsageError
from onnxgrail.plan import kept_units, selected, widths


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


@pytest.mark.parametrize(
    ("units", "size", "ratio", "round_to", "kept"),
    [
        (64, 1, 0.0, 8, 64),
        (100, 1, 0.0, 8, 100),  # nothing changes, whatever the multiple
        (64, 1, 0.3, 1, 45),  # 0.3 x 64 = 19.2 go
        (10, 1, 0.25, 1, 7),  # 2.5 go: half is rounded up
        (64, 1, 0.3, 8, 48),  # 44.8 is nearer to 48 than to 40
        (64, 1, 0.5, 8, 32),
        (64, 1, 0.99, 8, 8),  # one multiple stays
        (100, 1, 0.05, 8, 96),
        (100, 1, 0.01, 8, 96),
        (103, 1, 0.001, 8, 103),  # 104 would be nearest
        (15, 1, 0.5, 8, 7),  # two multiples do not fit
        (16, 1, 0.5, 8, 8),
        (12, 64, 0.3, 8, 8),  # heads of 64 features are multiples already: 3.6 go, rounded
        (12, 64, 0.0, 8, 12),
        (4, 2, 0.5, 8, 2),  # 8 features are 4 heads; two such steps do not fit
        (8, 2, 0.5, 8, 4),
        (2, 64, 0.9, 8, 1),
        (7, 1, 1.0, 1, 1),
    ],
)
def test_kept_units(units: int, size: int, ratio: float, round_to: int, kept: int) -> None:
    assert kept_units(units, size, ratio, round_to) == kept


@given(st.integers(2, 4096), st.integers(1, 256), st.floats(0.001, 0.999), st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_what_stays(units: int, size: int, ratio: float, round_to: int) -> None:
    kept = kept_units(units, size, ratio, round_to)
    assert 1 <= kept <= units
    step = round_to // np.gcd(round_to, size)
    if step > 1 and units >= 2 * step:
        assert kept == units or (kept * size) % round_to == 0
        assert abs(kept - units * (1 - ratio)) <= step
    else:
        assert abs(kept - max(1, units * (1 - ratio))) <= 0.5 + 1e-9


@given(st.integers(2, 300), st.sampled_from([1, 8]), st.lists(st.floats(0.01, 0.99), min_size=2, max_size=5))
def test_more_goes_at_a_higher_ratio(units: int, round_to: int, ratios: list[float]) -> None:
    kept = [kept_units(units, 1, r, round_to) for r in sorted(ratios)]
    assert kept == sorted(kept, reverse=True)


def test_widths_by_name() -> None:
    blocks = [block("a", units=64), block("b", "heads", units=12, size=64)]
    assert widths(blocks, 0.5, 8) == {"a": 32, "b": 6}


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
