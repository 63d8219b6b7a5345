"""The embedded language model: RMSNorm, rotary positions, grouped-query attention and a gated MLP, four layers deep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.runtime.session import open_session

LLAMA = models.load("char_llama")
Make = Callable[[float, str], tuple[dict[str, Any], float, Path]]


def perplexity(path: Path) -> float:
    """On a part of the held-out text."""
    with open_session(path) as session, np.load(LLAMA.heldout) as file:
        ids, labels = (file[n][:16] for n in ("input_ids", "labels"))
        logits = session.run({"input_ids": ids})["logits"].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    picked = np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return float(np.exp((np.log(np.exp(logits).sum(axis=-1)) - picked).mean()))


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Report, perplexity and file by ratio and compensation; each made once."""
    folder, made = tmp_path_factory.mktemp("llama"), {}

    def make(ratio: float, compensate: str) -> tuple[dict[str, Any], float, Path]:
        if (ratio, compensate) not in made:
            target = folder / f"{ratio}.{compensate}.onnx"
            choices = {"data": LLAMA.calibration, "samples": 32, "check": False}
            result = onnxgrail.compress(LLAMA.model, target, unit_ratio=ratio, compensate=compensate, **choices)
            made[ratio, compensate] = (dict(result.report.data), perplexity(target), target)
        return made[ratio, compensate]

    return make


def test_blocks_are_those_of_the_manifest() -> None:
    expected = models.manifest()["char_llama"]["blocks"]
    assert Counter(b["kind"] for b in onnxgrail.inspect(LLAMA.model).blocks) == expected


@pytest.mark.parametrize("ratio", [0.3, 0.5])
def test_grail_lowers_the_perplexity(ratio: float, make: Make) -> None:
    dense = perplexity(LLAMA.model)
    (_, plain, _), (_, repaired, _) = make(ratio, "none"), make(ratio, "grail")
    assert dense < repaired < plain
    # Most of what pruning lost comes back.
    assert np.log(repaired / dense) < 0.6 * np.log(plain / dense)


def test_attention_goes_by_whole_groups_and_before_the_mlp(make: Make) -> None:
    data, _, target = make(0.5, "grail")
    blocks = data["blocks"]
    assert [b["kind"] for b in blocks] == ["heads", "mlp"] * 4
    weights = {t.name: tuple(t.dims) for t in onnx.load(target).graph.initializer}
    for block in blocks:
        assert block["outcome"]["status"] == "ok"
        assert block["kept"] * 2 == block["units"]
        for member in block["members"]:
            assert len(member["kept"]) % block["kept"] == 0
            assert weights[member["initializer"]][member["axis"]] == len(member["kept"])
    assert blocks[0]["unit_size"] > 1
    assert {len(m["kept"]) for m in blocks[0]["members"] if m["role"] == "producer"} != {blocks[0]["kept"]}


def test_other_lengths_still_run(make: Make) -> None:
    _, _, target = make(0.5, "grail")
    with open_session(target) as session:
        for batch, length in ((1, 1), (2, 33)):
            shape = session.run({"input_ids": np.zeros((batch, length), np.int64)})["logits"].shape
            assert shape[:2] == (batch, length)
