"""`--refine`: blocks, then the whole, moved towards the original network on data it has not seen."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.cli import main
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.methods.refine import distill, laco
from onnxgrail.torchgraph import fit as fitting
from onnxgrail.torchgraph.ops import OPS
from tests.e2e.test_kv_io import decoder
from tests.e2e.test_kv_io import feeds as cache_feed
from tests.tiny import mlp, numbers, tiny, two_ends

STATUS = {"ok", "plain", "skipped"}
BATCH = 8  # rows per batch, the default


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps than users get."""
    monkeypatch.setattr(laco, "EPOCHS", 8)
    monkeypatch.setattr(laco, "STEPS", 80)
    monkeypatch.setattr(distill, "STEPS", 120)


def data(rows: int = 96, width: int = 5, seed: int = 1) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)}


def fitted(given: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of the batches that compensation is fitted to if a refinement follows: four of five."""
    return {name: array[np.arange(len(array)) // BATCH % 5 != 4] for name, array in given.items()}


def refined(model: Any, refine: str = "", given: Any = None, **choices: Any) -> onnxgrail.report.result.Result:
    """Half of every MLP gone, and refined."""
    common: dict[str, Any] = {
        "unit_ratio": 0.5,
        "round_to": 1,
        "blocks": ("mlp",),
        "check": False,
        "held_out": 0,
        "compensate": "grail",
        "selector": "wanda",  # the elimination leaves little to refine
    }
    return onnxgrail.compress(
        ir.to_proto(model), data=data() if given is None else given, **{**common, "refine": refine or "none", **choices}
    )


def error(dense: ir.Model, slim: ir.Model, given: dict[str, Any]) -> float:
    """Squared error of the outputs, as a share."""
    with open_session(to_bytes(dense)) as a, open_session(to_bytes(slim)) as b:
        wanted, got = (s.run(given)["y"].astype(np.float64) for s in (a, b))
    return float(np.square(got - wanted).sum() / np.square(wanted).sum())


@pytest.mark.parametrize("refine", ["laco", "distill", "laco,distill"])
@pytest.mark.parametrize("compensate", ["none", "best"])
def test_it_brings_the_outputs_closer_on_fresh_data(refine: str, compensate: str) -> None:
    model = mlp(3, 16)
    before, after = (refined(model, r, compensate=compensate) for r in ("", refine))
    fresh = data(seed=5)
    was, now = (error(model, one.model, fresh) for one in (before, after))
    assert now <= was if (compensate, refine) == ("best", "laco") else now < 0.9 * was  # its fits leave layers nothing
    entries = after.report.data["refines"]
    assert [e["kind"] for e in entries if e["block"] == "model"] == refine.split(",")
    assert all(e["after"] <= e["before"] for e in entries if e["before"] is not None)
    assert {e["outcome"]["status"] for e in entries} <= STATUS
    assert after.report.data["timing"]["refine"] > 0


def test_laco_has_an_entry_per_block() -> None:
    entries = refined(mlp(3, 16), "laco").report.data["refines"]
    assert len(entries) == 6
    first, *others, whole = entries
    assert (first["outcome"]["status"], first["outcome"]["reason"]) == ("skipped", "as in the original network")
    assert all(e["epochs"] >= 8 and e["seconds"] > 0 for e in others)
    assert whole["block"] == "model"
    assert whole["outcome"]["status"] == "ok"


def test_outputs_that_are_made_on_the_way_are_goals_too() -> None:
    entries = refined(two_ends(), "laco").report.data["refines"]
    assert entries[-1]["outcome"]["status"] == "ok"
    assert entries[-1]["after"] < entries[-1]["before"]


def test_what_is_reported_is_what_the_weights_do() -> None:
    """Every fifth batch of eight is held out: the entry of the model is the error there."""
    model, given = mlp(2, 16), data()
    found = refined(model, "laco")
    held = {"x": np.concatenate([given["x"][8 * k : 8 * k + 8] for k in (4, 9)])}
    from onnxgrail.fidelity import measure

    with open_session(to_bytes(model)) as a, open_session(to_bytes(found.model)) as b:
        sums = measure(a.run(held)["y"], b.run(held)["y"], name="y")
    assert found.report.data["refines"][-1]["after"] == pytest.approx(sums.kl / sums.rows, rel=1e-3)


@pytest.mark.parametrize("refine", ["laco", "distill"])
def test_what_does_not_help_is_taken_back(refine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laco, "RATE", 1e5)
    monkeypatch.setattr(distill, "RATE", 1e5)
    model = mlp(2, 16)
    plain, found = refined(model, given=fitted(data())), refined(model, refine)
    assert {e["outcome"]["status"] for e in found.report.data["refines"]} <= {"plain", "skipped"}
    assert numbers(plain) == numbers(found)


@pytest.mark.parametrize("compensate", ["grail", "best"])
def test_compensation_has_not_seen_the_samples_that_judge_a_refinement(
    compensate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights fitted to them too would look better on them than on other samples, and the refinement worse."""
    monkeypatch.setattr(laco, "RATE", 1e5)
    model, given = mlp(2, 16), data()
    others = {"x": np.where(np.isin(given["x"], fitted(given)["x"]), given["x"], 9 * given["x"])}
    one, two = (refined(model, "laco", given=some, compensate=compensate) for some in (given, others))
    assert numbers(one) == numbers(two)


def test_blocks_that_come_closer_are_taken_back_where_the_model_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([1.0, 2.0])
    monkeypatch.setattr("onnxgrail.methods.refine.refinement.Refinement.apart", lambda *_: next(errors))
    model = mlp(2, 16)
    plain, found = refined(model, given=fitted(data())), refined(model, "laco")
    *_, whole = found.report.data["refines"]
    assert whole["outcome"] == {"status": "plain", "reason": laco.TAKEN_BACK, "clamped": 0}
    assert numbers(plain) == numbers(found)


def test_a_seed_gives_the_same_weights_again() -> None:
    one, two, other = (numbers(refined(mlp(2, 16), "laco,distill", seed=seed)) for seed in (3, 3, 4))
    assert one == two
    assert one != other


def test_the_budget_of_seconds_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laco, "EPOCHS", 100_000)
    monkeypatch.setattr(distill, "STEPS", 10_000_000)
    found = refined(mlp(2, 16), "laco,distill", budget_seconds=1.0)
    assert found.report.data["timing"]["refine"] < 10
    assert sum(e["epochs"] for e in found.report.data["refines"]) > 0


def test_no_kind_takes_the_time_of_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laco, "EPOCHS", 100_000)
    monkeypatch.setattr(distill, "STEPS", 10_000_000)
    entries = refined(mlp(2, 16), "laco,distill", budget_seconds=2.0).report.data["refines"]
    spent = {e["kind"]: e for e in entries if e["block"] == "model"}
    assert spent["laco"]["seconds"] < 1.6
    assert spent["distill"]["epochs"] > 0
    assert spent["distill"]["after"] < spent["distill"]["before"]
    alone = refined(mlp(2, 16), "norms,distill", budget_seconds=1.0).report.data["refines"]
    assert alone[0]["outcome"]["status"] == "skipped"  # what it leaves is there for the next
    assert alone[1]["seconds"] > 0.7


def test_an_op_without_gradient_costs_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OPS, ("", "Mish"))
    text = """
        a = MatMul(x, w0)
        b = Relu(a)
        c = MatMul(b, v0)
        s = Add(c, x)
        d = MatMul(s, w1)
        e = Mish(d)
        f = MatMul(e, v1)
        y = Add(f, s)
    """
    weights = {"w0": (5, 16), "v0": (16, 5), "w1": (5, 16), "v1": (16, 5)}
    found = refined(tiny("float[N,5] x => float[N,5] y", text, weights, opset=18), "laco,distill")
    first, second, _, whole = found.report.data["refines"]
    assert first["outcome"]["status"] == "ok"
    for entry in (second, whole):
        assert entry["outcome"] == {"status": "skipped", "reason": "no gradient through Mish", "clamped": 0}


def test_a_function_that_differs_from_the_runtimes_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, ("", "Relu"), lambda _, x: x.clamp(min=0) * 1.1)
    entries = refined(mlp(1, 16), "laco").report.data["refines"]
    assert any("disagree" in e["outcome"]["reason"] for e in entries)


def test_one_batch_is_not_enough() -> None:
    (entry,) = refined(mlp(1, 16), "laco", given=data(8)).report.data["refines"]
    assert entry["outcome"]["status"] == "skipped"
    assert "--batch-size" in entry["outcome"]["reason"]


def test_only_one_block_is_in_torch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = fitting.trainable

    def seen(piece: ir.Model) -> Any:
        sizes.append(len(list(piece.graph)))
        return real(piece)

    monkeypatch.setattr(fitting, "trainable", seen)
    largest = []
    for depth in (3, 6):
        sizes.clear()
        refined(mlp(depth, 8), "laco")
        largest.append(max(sizes))
    assert largest == [5, 5]


@pytest.mark.parametrize("kind", ["float16", "double"])
def test_weights_keep_their_type(kind: str) -> None:
    dtype = {"float16": np.float16, "double": np.float64}[kind]
    text = "a = MatMul(x, w)\nb = Relu(a)\nc = MatMul(b, v)\ny = Add(c, x)"
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(6, 16)).astype(dtype), "v": (rng.normal(size=(16, 6)) / 4).astype(dtype)}
    model = tiny(f"{kind}[N,6] x => {kind}[N,6] y", text, weights)
    given = {"x": data(96, 6)["x"].astype(dtype)}
    plain, found = refined(model, given=fitted(given)), refined(model, "laco", given=given)
    assert {v.const_value.numpy().dtype for v in found.model.graph.initializers.values()} == {np.dtype(dtype)}
    fresh = {"x": data(96, 6, seed=7)["x"].astype(dtype)}
    assert error(model, found.model, fresh) < error(model, plain.model, fresh)


@pytest.mark.parametrize(("reducer", "compensate"), [("prune", "best"), ("fold", "best"), ("fold", "grail")])
def test_narrowed_streams_aim_at_the_channels_that_are_left(reducer: str, compensate: str) -> None:
    found = models.load("digits_resnet")
    choices = {
        "unit_ratio": 0.5,
        "blocks": ("conv", "stream"),
        "check": False,
        "reducer": reducer,
        "compensate": compensate,
    }
    choices["data"] = found.calibration
    entries = onnxgrail.compress(found.model, dry_run=True, refine="laco", **choices).report.data["refines"]
    blocks = [e for e in entries if e["block"].startswith("blocks.")]
    assert len(blocks) == 3
    for entry in blocks:
        assert entry["outcome"]["status"] == "ok"
        assert entry["after"] < entry["before"] < 0.5  # of other channels it would be far off


def test_logits_are_compared_as_distributions() -> None:
    """Rows of scores may be shifted as a whole, which costs the squared error and not the divergence."""
    y = torch.randn(4, 7)
    assert float(fitting.divergence(y + 3, y, probable=False)) == pytest.approx(0, abs=1e-6)
    wanted = torch.nn.functional.kl_div(
        torch.log_softmax(-y, -1), torch.log_softmax(y, -1), log_target=True, reduction="batchmean"
    )
    assert float(fitting.divergence(-y, y, probable=False)) == pytest.approx(float(wanted))
    shares = torch.softmax(y, -1), torch.softmax(-y, -1)
    assert float(fitting.divergence(shares[1], shares[0], probable=True)) == pytest.approx(float(wanted), rel=1e-5)


def test_without_torch_only_refining_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else real(name, *rest))
    refined(mlp(1, 8))
    with pytest.raises(onnxgrail.MissingExtraError, match="torch"):
        refined(mlp(1, 8), "laco")
    path = tmp_path / "m.onnx"
    path.write_bytes(to_bytes(mlp(1, 8)))
    done = CliRunner().invoke(main, ["compress", str(path), "--ratio=0.3", "--refine", "laco"])
    assert done.exit_code == 1
    assert "pip install 'onnxgrail[torch]'" in done.output


def test_the_command_line_says_what_came_of_it(tmp_path: Any) -> None:
    path, given = tmp_path / "m.onnx", tmp_path / "d.npz"
    path.write_bytes(to_bytes(mlp(2, 16)))
    np.savez(given, **data())
    words = [
        "compress",
        str(path),
        "--ratio=0.3",
        "--data",
        str(given),
        "--refine",
        "laco,distill",
        "--budget-seconds",
        "20",
    ]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "Refine laco: held-out error" in done.output
    assert "Refine distill: held-out error" in done.output


@pytest.mark.parametrize("inner", ["heads", "qk,vo"])
@pytest.mark.parametrize("refine", ["laco", "distill"])
def test_caches_that_lost_heads_are_fed_as_they_are_now(refine: str, inner: str) -> None:
    rows = [{n: a + 0.1 * k if a.dtype.kind == "f" else a for n, a in cache_feed().items()} for k in range(6)]
    choices: dict[str, Any] = {"unit_ratio": 0.5, "round_to": 1, "check": False, "kv_io": True}
    choices["blocks"] = ("mlp", *inner.split(","))
    entries = onnxgrail.compress(ir.to_proto(decoder()), data=rows, refine=refine, **choices).report.data["refines"]
    assert any(e["outcome"]["status"] == "ok" for e in entries)
    assert all(e["after"] <= e["before"] for e in entries if e["before"] is not None)


def test_a_very_narrow_resnet_sees_again() -> None:
    """On images that neither fit nor choice has seen."""
    found = models.load("digits_resnet")
    choices: dict[str, Any] = {
        "unit_ratio": 0.85,
        "blocks": ("conv", "stream"),
        "check": False,
        "data": found.calibration,
    }
    right = {}
    with np.load(found.heldout) as file:
        images, labels = file["images"], file["labels"]
    for refine in ("none", "laco,distill"):
        model = onnxgrail.compress(found.model, dry_run=True, refine=refine, **choices).model
        with open_session(to_bytes(model)) as session:
            right[refine] = float((session.run({"images": images})["logits"].argmax(1) == labels).mean())
    assert right["laco,distill"] > max(0.93, right["none"] + 0.03)
