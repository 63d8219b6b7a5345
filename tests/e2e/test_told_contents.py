"""The user may say what an output holds; its loss then follows that, and not what its values and its name suggest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.core import Array
from onnxgrail.errors import UsageError
from onnxgrail.fidelity.clues import Clues
from onnxgrail.fidelity.kinds import parts_of
from onnxgrail.graph.io import interop
from tests.command import run
from tests.tiny import tiny

RNG = np.random.default_rng(0)
SAMPLES = RNG.standard_normal((192, 8)).astype(np.float32)
WEIGHTS = {"a": (8, 24), "b": (24, 3), "c": (8, 24), "d": (24, 16)}


def two() -> ir.Model:
    """Return a model with two results, each of an MLP of its own."""
    body = "p = MatMul(x, a)\n q = Relu(p)\n y = MatMul(q, b)\n r = MatMul(x, c)\n s = Relu(r)\n hidden = MatMul(s, d)"
    return tiny("float[N,8] x => float[N,3] y, float[N,16] hidden", body, WEIGHTS)


def within(**choices: Any) -> onnxgrail.Result:
    return onnxgrail.compress(
        two(), data={"x": SAMPLES}, max_loss=0.05, minimize="params", round_to=1, seed=0, **choices
    )


def judging(made: onnxgrail.Result) -> dict[str, Any]:
    """Return the loss of the candidate that was chosen."""
    search = made.report.data["allocation"]["search"]
    loss: dict[str, Any] = search["tried"][search["chosen"]]["loss"]
    return loss


def told(content: str, array: Array) -> tuple[str, str, int | None]:
    (part,) = parts_of("y", [array], Clues(contents={"y": content}))
    assert part.why in ("as --contents says", "rows sum to 1", "logarithms of rows that sum to 1")
    return part.kind, part.form, part.axis


def test_an_output_that_holds_nothing_does_not_judge() -> None:
    usual, one = within(), within(contents={"hidden": "nothing"})
    assert judging(one)["output"] == "y"
    (first, second), (_, other) = (
        [len(block["kept_units"]) for block in made.report.data["blocks"]] for made in (one, usual)
    )
    assert second == 3 < first  # an eighth of the neurons, with which the search ends
    assert other > 3


@pytest.mark.parametrize(
    ("content", "kind", "why"),
    [
        ("classes", "classes", "total variation"),
        ("values", "values", "NMSE"),
        ("embedding", "embedding", "cos"),
    ],
)
def test_the_loss_is_that_of_the_content(content: str, kind: str, why: str) -> None:
    made = within(contents={"y": content, "hidden": "nothing"})
    loss = judging(made)
    assert (loss["kind"], loss["output"]) == (kind, "y")
    assert why in str(made.report)


@pytest.mark.parametrize(("draw", "form"), [(RNG.standard_normal, "binary"), (RNG.random, "probabilities")])
def test_contents_of_any_shape(draw: Any, form: str) -> None:
    assert told("classes", draw((32, 7))) == ("classes", "logits", 1)
    assert told("classes", draw((32, 1))) == ("classes", form, None)
    assert told("classes", draw(32)) == ("classes", form, None)
    assert told("classes", draw((32, 9, 4))) == ("scores", "logits", 2)
    assert told("classes", draw((32, 4, 9, 9))) == ("scores", "logits", 1)
    assert told("classes", draw((32, 1, 9, 9))) == ("scores", form, None)
    assert told("scores", draw((32, 7))) == ("scores", form, None)
    assert told("scores", draw((32, 4, 9, 9))) == ("scores", form, None)
    assert told("embedding", draw((32, 9, 4))) == ("embedding", "values", 2)
    assert told("embedding", draw((32, 7))) == ("embedding", "values", None)
    for shape in ((32,), (32, 7), (32, 9, 4), (32, 4, 9, 9)):
        assert told("values", draw(shape)) == ("values", "values", None)
        assert told("nothing", draw(shape))[0] == "state"


def test_probabilities_need_no_softmax() -> None:
    chances = RNG.dirichlet(np.ones(5), 32)
    assert told("classes", chances) == ("classes", "probabilities", 1)
    assert told("classes", np.log(chances)) == ("classes", "logits", 1)


def test_whole_numbers_may_be_values() -> None:
    counts = RNG.integers(0, 5, (32, 4))
    assert [part.kind for part in parts_of("y", [counts], Clues())] == ["labels"]
    assert told("values", counts) == ("values", "values", None)


def test_what_does_not_suit_the_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no output 'z'. The outputs are y, hidden"):
        within(contents={"z": "values"})
    with pytest.raises(UsageError, match="every output holds nothing"):
        within(contents={"y": "nothing", "hidden": "nothing"})
    with pytest.raises(UsageError, match=r"contents has no 'label'. Choose from classes"):
        within(contents={"y": "label"})
    with pytest.raises(UsageError, match="no output 'z'"):
        onnxgrail.compare(two(), two(), data={"x": SAMPLES}, contents={"z": "values"})


def test_the_command_line_and_the_model_file_repeat_it(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=SAMPLES)
    (tmp_path / "m.onnx").write_bytes(interop.to_bytes(two()))
    for words in (["--contents", "y"], ["--contents", "y=label"], ["--contents", "=values"]):
        refused = run("compress", tmp_path / "m.onnx", tmp_path / "o.onnx", "--data", tmp_path / "x.npz", *words)
        assert (refused.exit_code, "is not NAME=CONTENT" in refused.stderr) == (2, True), refused.stderr
    words = ["--contents", "y=scores", "--contents", "hidden=nothing", "--max-loss", "5%", "--minimize", "params"]
    made = run("compress", tmp_path / "m.onnx", tmp_path / "o.onnx", "--data", tmp_path / "x.npz", *words)
    assert made.exit_code == 0, made.stderr
    same = run("apply", tmp_path / "o.onnx", tmp_path / "m.onnx", tmp_path / "p.onnx", "--data", tmp_path / "x.npz")
    assert same.exit_code == 0, same.stderr
    assert (tmp_path / "o.onnx").read_bytes() == (tmp_path / "p.onnx").read_bytes()


def test_labels_tell_scores_of_classes() -> None:
    """Numbers that vary on their own are no scores, unless the labels say that there are as many classes."""
    numbers = RNG.standard_normal((96, 3))
    assert [part.kind for part in parts_of("y", [numbers], Clues())] == ["values"]
    assert [part.kind for part in parts_of("y", [numbers], Clues(classes=3))] == ["classes"]
    assert [part.kind for part in parts_of("y", [numbers], Clues(classes=4))] == ["values"]
    labels = RNG.integers(0, 3, len(SAMPLES))
    result = onnxgrail.compare(two(), two(), data={"x": SAMPLES, "labels": labels})
    assert [verdict.kind for verdict in result.outputs[0].verdicts] == ["classes"]
