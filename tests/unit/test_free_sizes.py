"""Sizes of named dimensions: which are the same in all feeds, and what the check of a deep model makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxgrail import compress
from onnxgrail.calibration.both import Pair, run_both
from onnxgrail.calibration.feeds.signature import Input, free_sizes
from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.errors import ModelError
from onnxgrail.finishing import verify
from onnxgrail.graph.io.serial import to_bytes
from tests.tiny import feed, mlp

IDS, MASK = (
    Input(name=name, dtype=np.dtype(np.int64), shape=shape)
    for name, shape in (("ids", ("batch", "tokens", 3)), ("mask", ("batch", None)))
)


def fed(batch: int, tokens: int, masks: int | None = None) -> dict[str, Any]:
    return {"ids": np.zeros((batch, tokens, 3)), "mask": np.zeros((masks or batch, tokens))}


@pytest.mark.parametrize(
    ("feeds", "wanted"),
    [
        ([fed(2, 5)], {"batch": 2, "tokens": 5}),
        ([fed(2, 5), fed(2, 7)], {"batch": 2}),
        ([fed(2, 5), fed(1, 5)], {"tokens": 5}),
        ([fed(2, 5, masks=4)], {"tokens": 5}),
        ([], {}),
    ],
    ids=["all", "lengths differ", "a short batch", "one name, two sizes", "nothing"],
)
def test_what_all_feeds_agree_on(feeds: list[dict[str, Any]], wanted: dict[str, int]) -> None:
    assert free_sizes((IDS, MASK), feeds) == wanted


def test_an_input_without_rank_says_nothing() -> None:
    assert free_sizes((Input(name="ids", dtype=np.dtype(np.int64), shape=None),), [fed(2, 5)]) == {}


def test_other_sizes_are_refused_then() -> None:
    """So the sizes really arrive, and only those that hold for all feeds may."""
    model = mlp()
    content = to_bytes(model)
    with open_session(content) as free, open_session(content, Setup(sizes={"N": 2})) as fixed:
        np.testing.assert_array_equal(fixed.run(feed(model, N=2))["y"], free.run(feed(model, N=2))["y"])
        with pytest.raises(ModelError):
            fixed.run(feed(model, N=3))


@pytest.mark.parametrize("fails", [False, True], ids=["holds", "fails"])
def test_a_deep_model_is_checked_with_them_if_it_can(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def noted(pair: Pair, batches: Any, setup: Setup, **choices: Any) -> Any:
        seen.append(setup.sizes)
        if fails and setup.sizes:
            raise ModelError("it contradicts itself")
        return run_both(pair, batches, setup, **choices)

    monkeypatch.setattr(verify, "run_both", noted)
    monkeypatch.setattr(verify, "DEEP", 1)
    model = mlp()
    result = compress(model, data=feed(model, N=8), unit_ratio=0.5, batch_size=4, dry_run=True)
    assert result.report.data["verification"]["ort_load"]
    assert seen == [{"N": 4}, *([{}] if fails else [])]


def test_another_model_is_checked_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(pair: Pair, batches: Any, setup: Setup, **choices: Any) -> Any:
        assert setup.sizes == {}
        return run_both(pair, batches, setup, **choices)

    monkeypatch.setattr(verify, "run_both", noted)
    model = mlp()
    assert compress(model, data=feed(model, N=8), unit_ratio=0.5, dry_run=True).report.data["verification"]["ort_load"]
