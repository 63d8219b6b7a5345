"""Budgets on whole models: what was asked for is kept by the file that is written, and said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.runtime import latency
from onnxgrail.calibration.stream import stream
from onnxgrail.cli import main
from onnxgrail.commands.compare import compare
from onnxgrail.core import Floats, Refusal
from onnxgrail.errors import NothingToCompressError
from onnxgrail.narrowing import ready
from onnxgrail.narrowing.bits import measuring
from onnxgrail.search.trials import losses_of
from tests.shorter import shorter
from tests.tiny import tiny

from . import nets

DIGITS, LLAMA = models.load("digits_resnet"), models.load("char_llama")
PROMISE = 0.01
MEASURED = {"params": "params_after", "macs": "macs_after", "size": "bytes_after"}


def compressed(model: Path, data: Any, target: Path, **choices: Any) -> dict[str, Any]:
    """Return the report of a run, with few samples and a fast method, because budgets depend on neither."""
    choices = {"samples": 32, "compensate": "grail", **choices}
    found: dict[str, Any] = onnxgrail.compress(model, target, data=data, **choices).report.data
    return found


def held(data: dict[str, Any], metric: str, share: float, promise: float = PROMISE) -> None:
    """The budget is met by what the report says of the written file, and nearly spent or spent in coarse steps."""
    model, budget = data["model"], data["model"]["budget"]
    before = model[MEASURED[metric].replace("after", "before")]
    assert budget["metric"] == metric
    assert budget["before"] == pytest.approx(before, rel=1e-6)
    assert budget["limit"] == pytest.approx(share * before, rel=1e-6)
    assert budget["achieved"] == model[MEASURED[metric]]
    assert model["asked_ratio"] is None
    assert (1 - promise) * budget["limit"] <= budget["achieved"] <= budget["limit"]
    assert all(1 <= b["kept"] <= b["units"] for b in data["blocks"])


CASES = [
    *((DIGITS, metric, allocate) for metric in MEASURED for allocate in ("uniform", "depth", "flap")),
    *((LLAMA, metric, allocate) for metric, allocate in zip(MEASURED, ("flap", "depth", "uniform"), strict=True)),
]


@pytest.mark.parametrize(("source", "metric", "allocate"), CASES, ids=lambda value: getattr(value, "name", value))
def test_budgets_are_met_within_one_per_cent(source: Any, metric: str, allocate: str, tmp_path: Path) -> None:
    share = 0.6 if source is DIGITS else 0.7
    target = tmp_path / "o.onnx"
    choices = {f"target_{metric}": f"{share:%}", "allocate": allocate, "only_widths": metric == "size"}
    data = compressed(source.model, source.calibration, target, **choices)
    held(data, metric, share)
    assert data["model"]["bytes_after"] == target.stat().st_size
    assert data["allocation"]["used"] == allocate
    rows = {row["block"]: row for row in data["allocation"]["rounding"]}
    for block in data["blocks"]:
        row = rows[block["name"]]
        assert (row["units"], row["kept"]) == (block["units"], block["kept"])
        assert (row["params"] > 0) == (row["kept"] > row["asked"]) or abs(row["kept"] - row["asked"]) < 0.01
    if allocate == "depth":
        asked = [rows[b["name"]]["asked"] / b["units"] for b in data["blocks"] if b["kind"] in ("conv", "mlp")]
        assert asked[0] > asked[-1]


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_a_small_model_without_rounding(share: float, tmp_path: Path) -> None:
    onnx.save(nets.mlp(), tmp_path / "m.onnx")
    data = compressed(tmp_path / "m.onnx", nets.vectors(), tmp_path / "o.onnx", target_params=f"{share:%}", round_to=1)
    held(data, "params", share, promise=0.02)  # single units weigh more than 1 % here


@pytest.mark.parametrize("name", ["digits_resnet", "char_llama"])
def test_global_beats_uniform_at_equal_macs(name: str, tmp_path: Path) -> None:
    source = shorter(name, tmp_path) if name == "char_llama" else DIGITS
    reports, errors = {}, {}
    for allocate in ("uniform", "global"):
        target = tmp_path / f"{allocate}.onnx"
        samples, ratio = (None, 0.3) if source is DIGITS else (32, 0.5)
        choices = {"unit_ratio": ratio, "selector": "wanda", "compensate": "grail", "allocate": allocate}
        result = onnxgrail.compress(source.model, target, data=source.calibration, samples=samples, **choices)
        reports[allocate] = result.report.data
        with np.load(source.heldout) as file:
            inputs = {
                n: file[n][:256] for n in file.files if n in ("image", "images", "x", "input", "input_ids", "pixels")
            }
        (output,) = compare(source.model, target, data=inputs).outputs
        errors[allocate] = output.verdicts[0].loss
    assert reports["global"]["model"]["macs_after"] <= reports["uniform"]["model"]["macs_after"]
    assert reports["global"]["model"]["asked_ratio"] == ratio
    assert reports["global"]["allocation"]["used"] == "global"
    assert errors["global"] < errors["uniform"]


def test_data_decide_the_widths_and_random_inputs_do_not(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"ratio": 0.3, "compensate": "none"}
    for choices, used in (
        ({}, "global"),
        (plain, "uniform"),
        ({"data": None}, "uniform"),
        ({"unit_ratio": 0.3}, "uniform"),
    ):
        given = {"data": DIGITS.calibration, "ratio": None if "unit_ratio" in choices else 0.3, **choices}
        data = compressed(DIGITS.model, given.pop("data"), tmp_path / "o.onnx", force=True, **given)
        assert (data["allocation"]["asked"], data["allocation"]["used"]) == ("auto", used)


def test_measured_losses_beat_equal_shares(tmp_path: Path) -> None:
    """The default loses at most two thirds of what the same share of every block loses, at the same parameters."""
    model, nmse = models.load("digits_vit"), {}
    with np.load(model.heldout) as file:
        inputs = {name: file[name][:128] for name in file.files if name != "labels"}
    for name in ("auto", "uniform"):
        target = tmp_path / f"{name}.onnx"
        compressed(model.model, model.calibration, target, ratio=0.3, samples=128, allocate=name)
        nmse[name] = compare(model.model, target, data=inputs).outputs[0].nmse
    assert nmse["auto"] < nmse["uniform"] / 1.5


@pytest.mark.parametrize(
    ("case", "best", "count"), [(0, 0, 3), (1, 1, 3), (2, 2, 3), (3, 0, 2)], ids=["path", "between", "even", "worse"]
)
def test_the_candidate_that_loses_least_is_taken(
    case: int, best: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few samples are held out, so half of the others judges, too, and the fits of the candidates do without it.

    Equal shares are not judged where widths halfway to them lose more.
    """
    judged: list[list[Any]] = []
    asked: list[Floats] = []

    def losses(task: Any, candidates: Any, parts: Any) -> Iterator[Floats]:
        real = list(losses_of(task, candidates, parts))
        both = parts.fitted.batches, parts.batches
        fitted, judges = ([len(next(iter(feed.values()))) for feed in part] for part in both)
        assert [one.size for one in real] == [sum(judges)] * 3
        assert sum(fitted) + sum(judges) == 64 + 13
        assert min(sum(fitted), sum(judges) - 13) >= 16
        assert all(0 < one.mean() < 1 for one in real)
        judged.append(list(candidates))
        clear, chance = (np.linspace(-1.0, most, real[0].size) for most in (2.0, 1.2))
        nothing = np.zeros(real[0].size)
        every = [
            [chance, nothing, chance],
            [clear, nothing, nothing],
            [clear, nothing, -clear],
            [nothing, clear, -clear],
        ]
        for one in every[case]:
            asked.append(one)
            yield one

    monkeypatch.setattr(measuring, "losses_of", losses)
    choices: Any = {"ratio": 0.3, "samples": 64, "compensate": "grail" if case else "best"}  # in a quarter of the time
    found = onnxgrail.compress(DIGITS.model, tmp_path / "o.onnx", data=DIGITS.calibration, **choices)
    (candidates,) = judged
    assert len(asked) == count
    assert len({tuple(one.items()) for one in candidates}) == 3
    assert dict(found.report.data["recipe"])["allocate"] == "auto"
    widths = {block["name"]: block["kept"] for block in found.report.data["blocks"]}
    taken = candidates[best]
    units = {block["name"]: block["units"] for block in found.report.data["blocks"]}
    assert widths == {name: taken[name] for name in widths}
    assert all(name.endswith("rank") for name in taken.keys() - units.keys())  # these stay one convolution


def test_blocks_that_fail_the_proof_take_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proved = ready.proved

    def strict(prepared: Any, job: Any, blocks: Any, widths: Any, **options: Any) -> Any:
        assert all(widths[b.name] == b.units // 2 for b in blocks)
        good, _ = proved(prepared, job, blocks[1:], widths, **options)
        return good, (Refusal(value=blocks[0].name, node="", op="", reason="made up"),)

    monkeypatch.setattr(ready, "proved", strict)
    data = compressed(DIGITS.model, DIGITS.calibration, tmp_path / "o.onnx", target_params="60%")
    held(data, "params", 0.6)
    assert data["blocks"][0]["kept"] == data["blocks"][0]["units"]
    assert data["blocks"][0]["name"] not in {row["block"] for row in data["allocation"]["rounding"]}
    assert "made up" in {r["reason"] for r in data["refusals"]}


@pytest.mark.parametrize("ratio", [0.27, 0.29])
def test_units_that_give_nothing_go_first(ratio: float) -> None:
    """All 20 dead neurons together are 0.3 of the parameters; no share of the units that is tried ends with them."""
    rng = np.random.default_rng(5)
    first = rng.standard_normal((20, 64), dtype=np.float32)
    first[:, :20] = 0
    body = "a = MatMul(x, w)\nb = Tanh(a)\nc = MatMul(b, v)\nd = Relu(c)\ny = MatMul(d, u)"
    model = tiny("float[N,20] x => float[N,4] y", body, {"w": first, "v": (64, 48), "u": (48, 4)})
    data = {"x": rng.standard_normal((100, 20), dtype=np.float32)}
    report = onnxgrail.compress(model, data=data, ratio=ratio, round_to=1).report.data
    assert report["model"]["achieved_ratio"] >= ratio
    assert report["verification"]["outputs"][0]["nmse"] < 1e-9


@pytest.mark.parametrize("share", [0.3, 0.15])
def test_weights_in_a_second_file_count_for_a_size(share: float, tmp_path: Path) -> None:
    choices = {"target_size": f"{share:.0%}", "samples": 32, "compensate": "grail", "save_as_external_data": True}
    vit = models.load("digits_vit")
    data = compressed(vit.model, vit.calibration, tmp_path / "o.onnx", **choices)
    budget = data["model"]["budget"]
    assert budget["achieved"] == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert 0.95 * budget["limit"] < budget["achieved"] <= budget["limit"]
    assert not any("target missed" in note for note in data["notes"])


def test_two_convolutions_that_cost_more_than_one_take_nothing_of_a_budget(tmp_path: Path) -> None:
    data = compressed(DIGITS.model, DIGITS.calibration, tmp_path / "o.onnx", target_params="30%", check=False)
    budget = data["model"]["budget"]
    assert 0.98 * budget["limit"] < budget["achieved"] <= budget["limit"]


def test_the_same_twice(tmp_path: Path) -> None:
    for name in "ab":
        compressed(DIGITS.model, DIGITS.calibration, tmp_path / name, target_size="60%", allocate="flap")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_latency_is_asked_measured_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "SECONDS", 0.2)
    llama = shorter("char_llama", tmp_path)
    data = compressed(llama.model, llama.calibration, tmp_path / "o.onnx", target_latency="70%", samples=16)
    budget = data["model"]["budget"]
    assert budget["metric"] == "latency"
    assert budget["limit"] == pytest.approx(0.7 * budget["before"])
    assert 0 < budget["achieved"] <= 1.02 * budget["limit"]
    assert all(b["kept"] % 8 == 0 for b in data["blocks"] if b["kind"] == "mlp")
    assert data["model"]["macs_after"] < 0.95 * data["model"]["macs_before"]


def test_a_budget_the_model_already_keeps_is_nothing_to_do(tmp_path: Path) -> None:
    said = "--target-params 100% allows 221,994 parameters and the model has 221,994 parameters"
    with pytest.raises(NothingToCompressError, match=said):
        compressed(DIGITS.model, DIGITS.calibration, tmp_path / "o.onnx", target_params="100%")
    assert not (tmp_path / "o.onnx").exists()


# --------------------------------------------------------------------------------------------------- statistics


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of probes that each measurement reads."""
    seen: list[int] = []
    measure = stream.Stream.measure

    def counted(self: stream.Stream, probes: Any, *rest: Any) -> Any:
        seen.append(len(probes))
        return measure(self, probes, *rest)

    monkeypatch.setattr(stream.Stream, "measure", counted)
    return seen


def test_kept_statistics_save_the_pass(passes: list[int], tmp_path: Path) -> None:
    kept = tmp_path / "s.npz"
    common: dict[str, Any] = {"compensate": "grail", "closed_loop": False, "unit_ratio": 0.5}
    compressed(DIGITS.model, DIGITS.calibration, tmp_path / "a.onnx", save_stats=kept, **common)
    assert len(passes) == 1  # measured once, kept, and used at once
    compressed(DIGITS.model, DIGITS.calibration, tmp_path / "b.onnx", stats=kept, **common)
    compressed(
        DIGITS.model, DIGITS.calibration, tmp_path / "d.onnx", stats=kept, allocate="flap", selector="l2", **common
    )
    assert len(passes) == 1
    compressed(DIGITS.model, DIGITS.calibration, tmp_path / "c.onnx", stats=kept, target_macs="40%")
    assert len(passes) == 2  # a part of the data, to which two candidates are fitted
    compressed(DIGITS.model, DIGITS.calibration, tmp_path / "e.onnx", **common)
    assert len(passes) == 3
    texts = [(tmp_path / f"{name}.onnx").read_bytes() for name in "abe"]
    assert texts[0] == texts[1] == texts[2]


def test_closed_loop_measures_behind_narrowed_blocks_all_the_same(passes: list[int], tmp_path: Path) -> None:
    kept = tmp_path / "s.npz"
    common = {"ratio": 0.3, "compensate": "grail", "closed_loop": True, "allocate": "uniform", "samples": 8}
    llama = shorter("char_llama", tmp_path)
    compressed(llama.model, llama.calibration, tmp_path / "a.onnx", save_stats=kept, **common)
    first = len(passes)
    assert first == 4  # all at once, then 3 blocks after others; the first one is known
    compressed(llama.model, llama.calibration, tmp_path / "b.onnx", stats=kept, **common)
    assert len(passes) == first + 3
    compressed(llama.model, llama.calibration, tmp_path / "c.onnx", **common)
    texts = [(tmp_path / f"{name}.onnx").read_bytes() for name in "abc"]
    assert texts[0] == texts[1] == texts[2]


def test_statistics_of_other_data_are_refused(tmp_path: Path) -> None:
    kept = tmp_path / "s.npz"
    common = ["compress", str(DIGITS.model), "--ratio=0.3", "--data", str(DIGITS.calibration), "--no-progress"]
    done = CliRunner().invoke(main, [*common, str(tmp_path / "a.onnx"), "--samples", "16", "--save-stats", str(kept)])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(main, [*common, str(tmp_path / "b.onnx"), "--samples", "17", "--stats", str(kept)])
    assert done.exit_code == 1
    assert "were made from other data" in done.stderr
    assert not (tmp_path / "b.onnx").exists()


# ------------------------------------------------------------------------------------------------- command line


def test_asked_and_achieved_are_printed(tmp_path: Path) -> None:
    words = [str(DIGITS.model), str(tmp_path / "o.onnx"), "--data", str(DIGITS.calibration), "--samples", "32"]
    report = tmp_path / "r.json"
    options = ["--target-params", "60%", "--allocate", "flap", "--report", str(report), "--no-progress"]
    done = CliRunner().invoke(main, ["compress", *words, *options])
    assert done.exit_code == 0, done.output
    data = json.loads(report.read_text())
    achieved = data["model"]["budget"]["achieved"]
    assert f"Target params: asked 60% = 133,196, achieved {achieved:,} (" in done.stdout
    assert "Allocation: asked flap, used flap" in done.stdout
    assert "Widths rounded (--round-to 8): " in done.stdout
    assert "Ratio: " not in done.stdout
    assert (data["recipe"]["ratio"], data["recipe"]["target_params"]) == (None, "60%")
