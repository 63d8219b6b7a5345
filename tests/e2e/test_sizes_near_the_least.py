"""Sizes near the least one, where names of weights count, and what streams need only if they are narrowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxgrail.allocation import choose
from onnxgrail.allocation.choose import with_names
from onnxgrail.allocation.losses import Search
from onnxgrail.allocation.measures import Measure
from onnxgrail.errors import UsageError

from .test_shared_biases import saved, small

DEPTH, WIDTH = 4, 32


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many small layers, so that names take much of a file of few bytes."""
    body, sizes, last = [], {}, "x"
    for n in range(DEPTH):
        long = f"a_long_name_as_exporters_write_it/of_a_layer/{n}"
        body += [f'"{long}/h" = Gemm({last}, w{n}a, b{n}a)', f'"{long}/r" = Relu("{long}/h")']
        end = "y" if n == DEPTH - 1 else f'"{long}/s"'
        body += [f'{end} = Gemm("{long}/r", w{n}b, b{n}b)']
        sizes |= {f"w{n}a": (32, WIDTH), f"b{n}a": (WIDTH,), f"w{n}b": (WIDTH, 32), f"b{n}b": (32,)}
        last = end
    return saved(body, sizes, tmp_path_factory.mktemp("deep") / "m.onnx")


def test_a_size_that_the_narrowest_blocks_meet_is_in_reach(deep: Path) -> None:
    with pytest.raises(UsageError, match="out of reach") as told:
        small(deep, target_size="1000")
    least = int(str(told.value).split(" of ")[-2].split()[-1].replace(",", ""))
    for limit in (least, round(1.02 * least), round(1.2 * least), round(1.5 * least)):
        size, report = small(deep, target_size=str(limit))
        assert size <= limit
        assert size >= 0.95 * limit or limit == least, (size, limit)
        assert report["allocation"]["bits"]


def test_matrices_of_a_stream_count_only_if_it_gets_narrower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, sizes = ["a = MatMul(x, w)", "s0 = Relu(a)"], {"w": (32, 96), "z": (96, 96), "g": (96,)}
    for n in range(2):
        body += [f"n{n} = SimplifiedLayerNormalization <axis=-1, epsilon=0.001> (s{n}, g)"]
        body += [f"h{n} = MatMul(n{n}, u{n})", f"r{n} = Relu(h{n})", f"d{n} = MatMul(r{n}, v{n})"]
        body += [f"s{n + 1} = Add(s{n}, d{n})"]
        sizes |= {f"u{n}": (96, 128), f"v{n}": (128, 96)}
    body += ["l = SimplifiedLayerNormalization <axis=-1, epsilon=0.001> (s2, g)", "y = MatMul(l, z)"]
    path = saved(body, sizes, tmp_path / "m.onnx")
    told = []

    def names(search: Search, measure: Measure) -> tuple[Search, Measure]:
        found = with_names(search, measure)
        told.append((found[0].rungs, measure.before - found[1].before))
        return found

    monkeypatch.setattr(choose, "with_names", names)
    size, _ = small(path, target_size="25%")
    ((rungs, less),) = told
    assert any("basis" in rung.weight for rung in rungs)
    assert all(rung.names < 100 for rung in rungs)
    assert abs(less) < 1000
    assert size <= 0.25 * path.stat().st_size
