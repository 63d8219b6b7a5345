"""The gain of the fit to the dense network over plain GRAIL, on trained models and held-out data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.runtime.session import open_session
from tests.shorter import shorter

INNER = ("mlp", "heads")
WHOLE: dict[str, Any] = {"unit_ratio": 0.0, "compensate": "none", "samples": 1, "held_out": 0}
Judge = Callable[..., tuple[float, float]]


@pytest.fixture
def judged(tmp_path: Path) -> Judge:
    """Score on labelled held-out data, and squared error of the outputs as a share of the original ones."""

    def judge(name: str, **choices: Any) -> tuple[float, float]:
        found = shorter(name, tmp_path) if name == "char_llama" else models.load(name)
        target = tmp_path / "o.onnx"
        choices = {"data": found.calibration, "check": False, "force": True} | choices
        onnxgrail.compress(found.model, target, **choices)
        feed = dict(np.load(found.heldout))
        with open_session(found.model) as before, open_session(target) as after:
            (old,), (new,) = (s.run({n: feed[n] for n in feed if n != "labels"}).values() for s in (before, after))
            score = models.score(found, lambda one: list(after.run(one).values()))
        return float(score), float(np.square(new - old).sum() / np.square(old).sum())

    return judge


def test_hidden_channels_of_the_digits(judged: Judge) -> None:
    """A tenth of the error at half the channels, and hardly a digit lost where GRAIL loses most of them."""
    common: dict[str, Any] = {"blocks": ("conv",), "selector": "l1"}
    grail, best = (judged("digits_resnet", unit_ratio=0.5, compensate=c, **common) for c in ("grail", "best"))
    assert best[1] <= 0.1 * grail[1]
    grail, best = (judged("digits_resnet", unit_ratio=0.7, compensate=c, **common) for c in ("grail", "best"))
    assert grail[0] < 0.6
    assert best[0] >= 0.98
    assert judged("digits_resnet", unit_ratio=0.85, compensate="best", **common)[0] >= 0.95


def test_perplexity_of_the_llama(judged: Judge) -> None:
    common: dict[str, Any] = {"unit_ratio": 0.5, "blocks": INNER, "samples": 64}
    dense, grail, best = (
        judged("char_llama", **choices)[0]
        for choices in (WHOLE, {**common, "compensate": "grail"}, {**common, "compensate": "best"})
    )
    assert best - dense <= 0.65 * (grail - dense)


@pytest.mark.parametrize(
    ("name", "blocks", "selector"),
    [
        ("digits_resnet", ("conv", "stream"), "l1"),
        ("digits_resnet", ("conv", "stream"), "obs"),
        ("digits_vit", INNER, "l1"),
        ("digits_vit", INNER, "obs"),
        ("char_llama", INNER, "obs"),
    ],
)
def test_few_samples_do_no_harm(name: str, blocks: tuple[str, ...], selector: str, judged: Judge) -> None:
    """Sixteen samples cannot tell much: what they do tell must not make it worse than the GRAIL that it starts from."""
    found = models.load(name)
    data = {key: array[:16] for key, array in np.load(found.calibration).items()}
    common: dict[str, Any] = {"data": data, "unit_ratio": 0.5, "blocks": blocks, "selector": selector}
    grail = judged(name, compensate="grail", closed_loop=False, **common)[0]
    best = judged(name, compensate="best", **common)[0]
    assert best >= 0.98 * grail if found.metric == "accuracy" else best <= 1.02 * grail
