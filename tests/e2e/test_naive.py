"""The streamed, guarded implementation gives the weights that the bare formulas give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgrail

from . import naive, nets

WIDTHS = (12, 32, 24, 40, 10)
RATIO = 0.4


@dataclasses.dataclass(frozen=True)
class Case:
    """A net as a model, in numpy and block by block, its data, and how far rounding may take two ways to the weights.

    A float32 net is judged with activations that its runtime rounds to float32; the solve amplifies that by up to 1/α.
    """

    model: Callable[[], onnx.ModelProto]
    run: naive.Run
    parts: Sequence[naive.Part]
    feed: nets.Arrays
    tolerance: float = 1e-6


CASES = {
    "mlp": Case(
        lambda: nets.mlp(WIDTHS, np.float64), nets.run_mlp, naive.mlp_parts(WIDTHS), nets.vectors(dtype=np.float64)
    ),
    "mlp32": Case(lambda: nets.mlp(WIDTHS), nets.run_mlp, naive.mlp_parts(WIDTHS), nets.vectors(), 2e-5),
    "convnet": Case(nets.convnet, nets.run_convnet, naive.CONVNET, nets.images()),
    "transformer": Case(
        lambda: nets.transformer(np.float64), nets.run_transformer, naive.transformer_parts(), nets.tokens()
    ),
    "transformer32": Case(nets.transformer, nets.run_transformer, naive.transformer_parts(), nets.tokens(), 5e-5),
    "padded": Case(
        lambda: nets.transformer(np.float64), nets.run_transformer, naive.transformer_parts(), nets.tokens(padded=True)
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def compressed(model: onnx.ModelProto, feed: Any, **choices: Any) -> tuple[nets.Arrays, list[dict[str, Any]]]:
    """Weights that `compress` makes, and the narrowed blocks of its report."""
    choices = {"unit_ratio": RATIO, "round_to": 1, "check": False, "held_out": 0, "compensate": "grail"} | choices
    result = onnxgrail.compress(model, data=feed, blocks=("conv", "mlp", "heads"), **choices)
    blocks = [b for b in result.report.data["blocks"] if b["outcome"]["reason"] != "not selected"]
    return {n: v.const_value.numpy() for n, v in result.model.graph.initializers.items()}, blocks


def distance(got: nets.Arrays, wanted: nets.Arrays) -> float:
    """Largest relative difference of any float weight; infinite where a shape differs."""
    gaps = []
    for name, array in wanted.items():
        if array.dtype.kind == "f" and array.ndim:
            same = got[name].shape == array.shape
            gaps.append(np.abs(got[name] - array).max() / np.abs(array).max() if same else np.inf)
    return float(max(gaps))


def oracle(case: Case, **choices: Any) -> nets.Arrays:
    weights = nets.weights_of(case.model())
    return naive.grail(weights, case.parts, case.run, case.feed, **{"unit_ratio": RATIO, "closed": True} | choices)


@every_case
def test_the_numpy_nets_are_the_onnx_nets(case: Case) -> None:
    import onnxruntime

    model = case.model()
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = case.run(nets.weights_of(model), case.feed)["y"]
    np.testing.assert_allclose(session.run(["y"], case.feed)[0], wanted, atol=1e-5)


@every_case
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize("selector", ["wanda", "l2"])
def test_equals_naive(case: Case, closed: bool, selector: str) -> None:
    got, blocks = compressed(case.model(), case.feed, closed_loop=closed, selector=selector)
    assert [b["outcome"]["status"] for b in blocks] == ["ok"] * len(case.parts)
    assert distance(got, oracle(case, closed=closed, selector=selector)) < case.tolerance


@pytest.mark.parametrize("name", ["mlp", "convnet"])
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
def test_folding_equals_naive(name: str, closed: bool) -> None:
    case = CASES[name]
    got, blocks = compressed(case.model(), case.feed, closed_loop=closed, reducer="fold")
    clusters = [np.array(b["members"][0]["cluster"]) for b in blocks]
    assert all(np.bincount(c).max() > 1 for c in clusters)
    assert distance(got, oracle(case, closed=closed, clusters=clusters)) < case.tolerance
    assert distance(got, oracle(case, closed=not closed, clusters=clusters)) > 100 * case.tolerance


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_tells_the_loops_apart(name: str) -> None:
    case = CASES[name]
    closed, opened = (oracle(case, closed=c, selector="l2") for c in (True, False))
    assert distance(closed, opened) > 100 * case.tolerance


def test_attention_is_finished_before_the_mlp_of_its_layer() -> None:
    case = CASES["transformer"]
    attention, mlp, *rest = case.parts
    early = dataclasses.replace(case, parts=[mlp, attention, *rest])
    got, _ = compressed(case.model(), case.feed)
    assert distance(got, oracle(early)) > 100 * case.tolerance


@pytest.mark.parametrize("ridge", [0.0, 1e-4, 0.1])
def test_the_ridge_is_the_one_asked_for(ridge: float) -> None:
    case = CASES["mlp"]
    got, _ = compressed(case.model(), case.feed, ridge=ridge, closed_loop=True, selector="wanda")
    assert distance(got, oracle(case, alpha=ridge)) < case.tolerance


@pytest.mark.parametrize("reducer", ["prune", "fold"])
def test_an_identity_gram_without_ridge_is_plain_narrowing(reducer: str) -> None:
    model = nets.mlp((16, 16, 5), np.float64)
    weights = nets.weights_of(model)
    # Inputs that make the hidden activations the unit vectors.
    feed = {"x": np.linalg.solve(weights["w0"], np.eye(16) - weights["b0"][:, None]).T.copy()}
    np.testing.assert_allclose(nets.run_mlp(weights, feed)["h0"], np.eye(16), atol=1e-12)
    choices: dict[str, Any] = {"reducer": reducer, "selector": "l2"}
    got, blocks = compressed(model, feed, ridge=0.0, **choices)
    plain, _ = compressed(model, feed, compensate="none", **choices)
    assert [b["outcome"]["status"] for b in blocks] == ["ok"]
    assert distance(got, plain) < 1e-9
    # A ridge only shrinks such weights, which is worse than leaving them alone.
    guarded, blocks = compressed(model, feed, ridge=0.1, **choices)
    assert [b["outcome"]["status"] for b in blocks] == ["plain"]
    assert distance(guarded, plain) == 0


@pytest.mark.parametrize("name", ["mlp", "convnet"])
@pytest.mark.parametrize("reducer", ["prune", "fold"])
def test_plain_narrowing_selects_or_averages_and_sums(name: str, reducer: str) -> None:
    case = CASES[name]
    got, blocks = compressed(case.model(), case.feed, compensate="none", reducer=reducer, selector="l2")
    clusters = [np.array(b["members"][0]["cluster"]) for b in blocks] if reducer == "fold" else None
    assert distance(got, oracle(case, compensate=False, selector="l2", clusters=clusters)) < 1e-6


# ------------------------------------------------------------------------------------------------ padding and batches


def test_padded_positions_may_hold_anything() -> None:
    case = CASES["padded"]
    mask = case.feed["attention_mask"]
    other = case.feed | {"ids": np.where(mask == 1, case.feed["ids"], (case.feed["ids"] + 7) % 40)}
    assert (other["ids"] != case.feed["ids"]).any()
    got, _ = compressed(case.model(), case.feed)
    assert distance(compressed(case.model(), other)[0], got) < 1e-9
    without = naive.grail(
        nets.weights_of(case.model()),
        case.parts,
        lambda weights, feed: {n: np.where(mask[..., None], a, 0.5) for n, a in case.run(weights, feed).items()},
        case.feed | {"attention_mask": np.ones_like(mask)},
        unit_ratio=RATIO,
        closed=True,
    )
    assert distance(got, without) > 100 * case.tolerance


def test_masking_padding_equals_not_padding() -> None:
    case = CASES["padded"]
    lengths = case.feed["attention_mask"].sum(axis=1)
    single = [{n: a[i : i + 1, :length] for n, a in case.feed.items()} for i, length in enumerate(lengths)]
    assert len(set(lengths.tolist())) > 3
    got, _ = compressed(case.model(), case.feed)
    assert distance(compressed(case.model(), single)[0], got) < case.tolerance


@pytest.mark.parametrize("name", ["mlp", "convnet", "transformer", "padded"])
def test_the_batch_size_does_not_matter(name: str) -> None:
    case = CASES[name]
    one, three, eight = (compressed(case.model(), case.feed, batch_size=size)[0] for size in (1, 3, 8))
    assert distance(one, eight) < 1e-6
    assert distance(three, eight) < 1e-6
