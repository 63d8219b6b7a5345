from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnxgrail
from onnxgrail.calibration.runtime.session import Setup, open_session, runtime
from onnxgrail.calibration.runtime.wording import reason
from onnxgrail.commands.compare import compare
from onnxgrail.errors import DataError, MissingExtraError, ModelError, UsageError
from onnxgrail.fidelity import add_batch, finish, looks_like_logits, sums
from onnxgrail.fidelity.goals import Goals
from onnxgrail.fidelity.sums import distances
from tests.tiny import tiny

RNG = np.random.default_rng(0)


def score(wanted, got, *, mask=None, name="y"):
    return finish(add_batch({}, {name: wanted}, {name: got}, mask=mask))[0]


def test_equal_outputs_are_perfect():
    a = RNG.standard_normal((5, 7)).astype(np.float32)
    result = score(a, a)
    assert result.cosine == pytest.approx(1)
    assert (result.nmse, result.max_abs, result.agreement, result.broken) == (0, 0, 1, 0)
    assert result.kl == pytest.approx(0)


def test_figures_against_the_definitions():
    a, b = (RNG.standard_normal((5, 3, 4)) for _ in range(2))
    result = score(a, b)
    rows = [
        x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in zip(a.reshape(5, -1), b.reshape(5, -1), strict=True)
    ]
    assert result.cosine == pytest.approx(np.mean(rows))
    assert result.nmse == pytest.approx(((a - b) ** 2).sum() / (a**2).sum())
    assert result.max_abs == pytest.approx(np.abs(a - b).max())
    assert result.kl is None


@settings(max_examples=30)
@given(cut=st.integers(1, 9), seed=st.integers(0, 9))
def test_batches_add_up(cut, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, 10, 6))
    sums = add_batch({}, {"logits": a[:cut]}, {"logits": b[:cut]})
    sums = add_batch(sums, {"logits": a[cut:]}, {"logits": b[cut:]})
    parts, whole = finish(sums)[0], score(a, b, name="logits")
    for field in ("samples", "cosine", "nmse", "max_abs", "agreement", "kl"):
        assert getattr(parts, field) == pytest.approx(getattr(whole, field))


def test_zero_rows():
    zeros, ones = np.zeros((2, 3)), np.ones((2, 3))
    assert score(zeros, zeros).cosine == 1
    assert score(zeros, zeros).nmse == 0
    assert score(ones, zeros).cosine == 0
    assert score(ones, zeros).nmse == 1
    assert score(zeros, ones).nmse == float("inf")


def test_broken_values_are_counted_and_never_hidden():
    a, b = np.ones((4, 3)), np.ones((4, 3))
    b[1, 2] = np.nan
    result = score(a, b)
    assert result.broken == 1
    assert result.nmse == float("inf")
    assert result.cosine == pytest.approx(0.75)


def test_masked_logits_of_minus_infinity_agree():
    a = np.array([[1.0, -np.inf, 2.0]])
    result = score(a, a.copy(), name="logits")
    assert (result.nmse, result.broken, result.agreement) == (0, 0, 1)
    assert result.cosine == pytest.approx(1)
    assert result.kl == pytest.approx(0)


def test_padding_is_left_out():
    a, b = np.ones((2, 3, 4)), np.ones((2, 3, 4))
    b[0, 2] = 100
    mask = np.array([[True, True, False], [True, True, True]])
    assert score(a, b).nmse > 1
    assert score(a, b, mask=mask, name="logits").nmse == 0
    assert score(a, b, mask=mask, name="logits").agreement == 1


def test_divergence_of_logits_and_of_probabilities():
    a, b = RNG.standard_normal((2, 4, 5))
    p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (a, b))
    expected = (p * np.log(p / q)).sum(axis=1).mean()
    assert score(a, b).kl == pytest.approx(expected)
    assert score(p, q).kl == pytest.approx(expected, rel=1e-6)
    assert score(a, b).agreement == np.mean(a.argmax(1) == b.argmax(1))


def test_integer_outputs_are_compared_by_equality():
    result = score(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5]))
    assert (result.cosine, result.nmse, result.agreement) == (None, None, 0.75)


def test_which_outputs_look_like_logits():
    assert looks_like_logits("y", np.zeros((2, 10)))
    assert looks_like_logits("lm_logits", np.zeros((2, 5, 10)))
    for name, shape in [("pooled", (2, 10)), ("y", (2, 5, 10)), ("y", (2, 1)), ("y", (2,))]:
        assert not looks_like_logits(name, np.zeros(shape))


def test_scalar_outputs():
    assert score(np.float64(2), np.float64(1)).max_abs == 1


def test_shapes_must_agree():
    with pytest.raises(ModelError, match=r"got shape \[2, 4\], expected \[2, 3\]"):
        score(np.zeros((2, 3)), np.zeros((2, 4)))


# ------------------------------------------------------------------------------------------------------- models


def write(path, scale=1.0, name="x", kind="float[N, 3]"):
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g ({kind} {name}) => (float[N, 3] y) <float[1] s = {{{scale}}}> {{ y = Mul({name}, s) }}"""
    onnx.save(onnx.parser.parse_model(text), path)
    return path


def test_two_files(tmp_path):
    a, b = write(tmp_path / "a.onnx"), write(tmp_path / "b.onnx", 0.5)
    np.savez(tmp_path / "d.npz", x=np.ones((11, 3), np.float32))
    result = compare(a, b, data=tmp_path / "d.npz", batch_size=4, min_cosine=0.9, max_nmse=0.1)
    assert result.outputs[0].samples == 11
    assert result.outputs[0].nmse == pytest.approx(0.25)
    assert [(g.name, g.passed) for g in result.gates] == [("min_cosine", True), ("max_nmse", False)]
    assert not result.gates_passed
    assert result.a.bytes == a.stat().st_size
    assert result.a.params == 1
    data = json.loads(result.to_json())
    assert data["outputs"][0]["name"] == "y"
    assert data["b"]["path"] == str(b)


def test_the_loss_that_compress_limits_is_a_gate(tmp_path):
    a, b = write(tmp_path / "a.onnx"), write(tmp_path / "b.onnx", 0.9)
    rows = RNG.standard_normal((40, 3)).astype(np.float32)
    result = compare(a, b, data=rows, max_loss=0.1)
    wanted = float(np.mean(np.square(0.1 * rows).sum(axis=1)) / np.mean(np.square(rows).sum(axis=1)))
    assert result.loss is not None
    assert result.loss.samples == 40
    assert result.loss.mean == pytest.approx(0.45 * wanted, rel=0.2)
    assert result.loss.mean < result.loss.bound < 0.1
    assert [(g.name, g.value, g.passed) for g in result.gates] == [("max_loss", result.loss.bound, True)]
    assert not compare(a, b, data=rows, max_loss=result.loss.mean).gates_passed
    assert f"{result.loss.bound:.2%}" in str(result)
    assert json.loads(result.to_json())["loss"]["bound"] == result.loss.bound
    assert compare(a, b).loss is None
    with pytest.raises(UsageError, match="--max-loss needs --data"):
        compare(a, b, max_loss=0.1)


def test_two_files_on_drawn_data(tmp_path):
    a = write(tmp_path / "a.onnx")
    result = compare(a, a, samples=4)
    assert result.calibration["synthetic"]
    assert result.gates_passed
    assert result.outputs[0].nmse == 0


def test_models_that_differ_in_inputs(tmp_path):
    with pytest.raises(ModelError, match=r"takes z float32\[N, 3\], expected x"):
        compare(write(tmp_path / "a.onnx"), write(tmp_path / "b.onnx", name="z"))


def test_misuse_is_one_line(tmp_path):
    a = write(tmp_path / "a.onnx")
    (tmp_path / "t.onnx").write_text("text")
    np.savez(tmp_path / "d.npz", z=np.ones((2, 5), np.float32))
    for call, kind in [
        (lambda: compare(a, tmp_path / "absent.onnx"), ModelError),
        (lambda: compare(a, tmp_path / "t.onnx"), ModelError),
        (lambda: compare(a, a, data=tmp_path / "d.npz"), DataError),
        (lambda: compare(a, a, providers=("NoSuchProvider",)), UsageError),
        (lambda: compare(a, a, providers=("CUDAExecutionProvider",)), UsageError),
    ]:
        with pytest.raises(kind) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_session(tmp_path):
    path = write(tmp_path / "a.onnx", 2.0)
    with open_session(path, Setup(threads=1)) as session:
        assert (session.inputs, session.output_names) == (("x",), ("y",))
        out = session.run({"x": np.ones((1, 3), np.float32), "extra": np.zeros(1)})
        np.testing.assert_array_equal(out["y"], [[2, 2, 2]])
        with pytest.raises(ModelError, match=r"ONNX Runtime failed on the feed x\[1, 4\]"):
            session.run({"x": np.ones((1, 4), np.float32)})
        with pytest.raises(ModelError, match="no value for input 'x'"):
            session.run({})
    with pytest.raises(ModelError, match="closed"):
        session.run({"x": np.ones((1, 3), np.float32)})
    with open_session(path.read_bytes(), Setup(optimise=False), outputs=["y"]) as session:
        assert session.output_names == ("y",)
    with pytest.raises(ModelError, match="no output 'q'"):
        open_session(path, outputs=["q"])
    with pytest.raises(ModelError, match="ONNX Runtime cannot run this model"):
        open_session(b"text")


def test_reason_drops_codes_and_source_lines():
    text = "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid\n dimensions"
    assert reason(RuntimeError(text)) == "Got invalid dimensions"


def test_both_runtimes_installed(monkeypatch):
    monkeypatch.setattr("onnxgrail.calibration.runtime.session.version_of", lambda name: "1.0")
    with pytest.raises(MissingExtraError, match="pip uninstall -y onnxruntime onnxruntime-gpu"):
        runtime()


def test_no_runtime(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'onnxgrail\[cpu\]'"):
        runtime()


@pytest.mark.parametrize("call", [onnxgrail.bench, onnxgrail.compare])
@pytest.mark.parametrize(("name", "value"), [("seed", -1), ("sequence_length", 0)])
def test_numbers_beyond_their_limits_are_named(call, name, value):
    with pytest.raises(UsageError, match=rf"^{name} must be at least \d, got {value}"):
        call("no.onnx", "file.onnx", **{name: value})


@pytest.mark.parametrize("data", [None, {"x": np.ones((6, 4), np.float32)}])
@pytest.mark.parametrize("turned", [False, True])
def test_a_model_of_a_fixed_batch_beside_one_of_any(turned, data):
    weights = {"w": np.eye(4, 3, dtype=np.float32)}
    models = [
        ir.to_proto(tiny(f"float[{batch},4] x => float[{batch},3] y", "y = MatMul(x, w)", weights))
        for batch in ("N", 2)
    ]
    one, two = models[::-1] if turned else models
    found = compare(one, two, data=data)
    assert found.outputs[0].samples == (6 if data else found.calibration["samples"])
    assert found.a.macs == found.b.macs == 12
    rows = onnxgrail.bench(one, two, data=data, batch_sizes=(1, 4), rounds=2).rows
    assert [row.batch_size for row in rows] == [2, 2]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("block", [1, 7, 40, 130])
def test_blocks_of_a_large_sample_give_the_same(monkeypatch, block, whole):
    rng = np.random.default_rng(0)
    one, other = (rng.standard_normal((3, 6, 5)).astype(np.float32) for _ in range(2))
    if whole:
        one, other = (one * 2).astype(np.int64), (other * 2).astype(np.int64)
    other = other if whole else np.where(rng.random(other.shape) < 0.02, np.nan, other)
    mask = rng.random((3, 6)) < 0.7
    goals = Goals(tokens=rng.integers(0, 5, (3, 6)), scores="y")
    wanted = distances(one, other, name="y", mask=mask, goals=goals)
    monkeypatch.setattr(sums, "BLOCK", block)
    found = distances(one, other, name="y", mask=mask, goals=goals)
    for name in sums.PER_SAMPLE:
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-9)
    assert found.hits.rows == wanted.hits.rows
    assert found.hits.right_b == wanted.hits.right_b
    assert found.total().cosine == pytest.approx(wanted.total().cosine)
