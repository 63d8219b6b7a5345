"""The embedded vision transformer: packed queries, keys and values, a class token, LayerNorm and GELU, four layers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.runtime.session import open_session

VIT = models.load("digits_vit")


def accuracy(path: Path) -> float:
    with open_session(path) as session:
        return models.score(VIT, lambda feed: list(session.run(feed).values()))


def test_blocks_are_those_of_the_manifest() -> None:
    expected = models.manifest()["digits_vit"]["blocks"]
    assert Counter(b["kind"] for b in onnxgrail.inspect(VIT.model).blocks) == expected


@pytest.mark.parametrize(("ratio", "gain"), [(0.5, 0.04), (0.7, 0.2)])
def test_grail_repairs_what_pruning_broke(ratio: float, gain: float, tmp_path: Path) -> None:
    found = {}
    for compensate in ("none", "grail"):
        target = tmp_path / f"{compensate}.onnx"
        result = onnxgrail.compress(
            VIT.model, target, unit_ratio=ratio, compensate=compensate, data=VIT.calibration, check=False
        )
        found[compensate] = accuracy(target)
        assert all(b["kept"] < b["units"] for b in result.report.data["blocks"])
    assert found["none"] + gain < found["grail"] <= accuracy(VIT.model)
