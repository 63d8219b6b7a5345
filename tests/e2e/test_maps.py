"""Classifiers as skl2onnx writes them: ZipMap makes a list of maps from class to probability, labels may be texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner

import onnxgrail
from onnxgrail.calibration.observe import observe
from onnxgrail.cli import main
from onnxgrail.errors import ModelError
from onnxgrail.fidelity import Tally
from onnxgrail.graph.cuts.steps import compared
from onnxgrail.graph.io.model_file import load
from onnxgrail.graph.io.tails import cut

EXACT: dict[str, Any] = {"unit_ratio": 0.5, "round_to": 1, "compensate": "none", "selector": "l2"}
SHAPES = {"w0": (6, 16), "b0": (1, 16), "w1": (16, 12), "b1": (1, 12), "w2": (12, 3), "b2": (1, 3)}
BODY = """
    m0 = MatMul(X, w0)
    a0 = Add(m0, b0)
    r0 = Relu(a0)
    m1 = MatMul(r0, w1)
    a1 = Add(m1, b1)
    r1 = Relu(a1)
    m2 = MatMul(r1, w2)
    a2 = Add(m2, b2)
    probabilities = Softmax<axis=1>(a2)
    index = ArgMax<axis=1>(probabilities)
    picked = ai.onnx.ml.ArrayFeatureExtractor(classes, index)
    label = Reshape(picked, flat)
"""
ZIPPED = "    proba = ai.onnx.ml.ZipMap<{}>(probabilities)\n"
KINDS = {
    "numbers": ("classlabels_int64s=[3, 1, 7]", "int64", np.array([3, 1, 7])),
    "texts": ('classlabels_strings=["no", "yes", "may be"]', "string", np.array(["no", "yes", "may be"], dtype=object)),
}
INPUT = {"X": np.random.default_rng(1).standard_normal((64, 6)).astype(np.float32)}


def classifier(kind: str, *outputs: str) -> onnx.ModelProto:
    """A multilayer perceptron with the outputs `label` and `proba`, or only some of them."""
    attribute, key, classes = KINDS[kind]
    types = {"label": f"{key}[N] label", "proba": f"seq(map({key}, float[])) proba"}
    signature = ", ".join(types[name] for name in outputs or types)
    head = '<ir_version: 8, opset_import: ["" : 15, "ai.onnx.ml" : 1]>'
    text = f"{head}\nmlp (float[N,6] X) => ({signature}) {{{BODY}{ZIPPED.format(attribute)}}}"
    proto: onnx.ModelProto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    constants = {**weights, "classes": classes, "flat": np.array([-1])}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    return proto


def run(model: onnx.ModelProto | Path) -> dict[str, Any]:
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, INPUT), strict=True))


def masked(proto: onnx.ModelProto, report: onnxgrail.Report) -> onnx.ModelProto:
    """The original whose consumers read zeros in the place of what was dropped."""
    whole = onnx.ModelProto.FromString(proto.SerializeToString())
    for member in (m for block in report.data["blocks"] for m in block["members"] if m["role"] == "consumer"):
        tensor = next(t for t in whole.graph.initializer if t.name == member["initializer"])
        array = onnx.numpy_helper.to_array(tensor).copy()
        dropped = np.setdiff1d(np.arange(array.shape[member["axis"]]), member["kept"])
        np.moveaxis(array, member["axis"], 0)[dropped] = 0
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return whole


@pytest.mark.parametrize("outputs", [("label", "proba"), ("proba",)], ids=["both", "maps"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_classifier_is_narrowed_and_the_maps_stay(kind: str, outputs: tuple[str, ...], tmp_path: Path) -> None:
    proto, output = classifier(kind, *outputs), tmp_path / "small.onnx"
    result = onnxgrail.compress(proto, output, data=INPUT, **EXACT)
    assert [block["kept_units"] for block in result.report.data["blocks"]] != []
    small = onnx.load(output)
    onnx.checker.check_model(small, full_check=True)
    assert list(small.graph.output) == list(proto.graph.output)
    shapes = {t.name: tuple(t.dims) for t in small.graph.initializer}
    assert (shapes["w0"], shapes["w1"], shapes["w2"]) == ((6, 8), (8, 6), (6, 3))
    wanted, got = run(masked(proto, result.report)), run(output)
    for a, b in zip(wanted["proba"], got["proba"], strict=True):
        assert b == pytest.approx(a, abs=1e-6)
    assert "label" not in wanted or list(wanted["label"]) == list(got["label"])


@pytest.mark.parametrize("kind", KINDS)
def test_maps_and_texts_are_compared(kind: str, tmp_path: Path) -> None:
    proto, output = classifier(kind), tmp_path / "small.onnx"
    result = onnxgrail.compress(proto, output, data=INPUT, **EXACT)
    label, proba = result.report.data["verification"]["outputs"]
    assert (label["name"], label["verdicts"][0]["kind"]) == ("label", "labels")
    assert (proba["name"], proba["verdicts"][0]["kind"]) == ("proba", "classes")
    assert 0 < proba["cosine"] < 1
    whole, small = run(proto), run(output)
    between = onnxgrail.compare(proto, output, data=INPUT)
    assert between.outputs[0].agreement == np.mean(whole["label"] == small["label"])
    (note,) = [n for n in result.report.data["notes"] if "zipmap" in n]
    assert (
        note
        == "output proba is a map, which few runtimes know: skl2onnx writes a tensor with options={'zipmap': False}"
    )


def test_inspect_and_other_ways_out(tmp_path: Path) -> None:
    source, output = tmp_path / "mlp.onnx", tmp_path / "small.onnx"
    onnx.save(classifier("numbers"), source)
    done = CliRunner().invoke(main, ["inspect", str(source)])
    assert done.exit_code == 0
    assert "2 blocks" in done.output
    assert "options={'zipmap': False}" in done.output
    for options in ({"quantize": "fp16"}, {"quantize": "int8-dynamic"}, {"quantize": "int8"}):
        result = onnxgrail.compress(source, output, data=INPUT, unit_ratio=0.5, force=True, **options)
        assert isinstance(run(output)["proba"][0], dict)
        assert list(onnx.load(output).graph.output) == list(onnx.load(source).graph.output)
        assert list(result.proto().graph.output) == list(onnx.load(source).graph.output)


def test_simplify(tmp_path: Path) -> None:
    pytest.importorskip("onnxslim")
    proto, output = classifier("texts"), tmp_path / "small.onnx"
    onnxgrail.compress(proto, output, data=INPUT, simplify=True, **EXACT)
    assert list(onnx.load(output).graph.output) == list(proto.graph.output)
    assert isinstance(run(output)["proba"][0], dict)


def test_the_proof_looks_in_front_of_a_map() -> None:
    model = load(classifier("numbers", "proba"))
    assert compared(model, (), observe(model, INPUT)) == ("probabilities",)


def test_an_input_that_is_a_map() -> None:
    text = (
        '<ir_version: 8, opset_import: ["" : 15, "ai.onnx.ml" : 1]>\n'
        "g (map(int64, float[]) x) => (float[] y) { y = ai.onnx.ml.CastMap(x) }"
    )
    with pytest.raises(ModelError, match="the input 'x' is a map"):
        load(onnx.parser.parse_model(text))


def test_tools_are_given_a_model_without_its_tail() -> None:
    model = load(classifier("numbers"))
    core, _ = cut(model)
    assert [v.name for v in core.graph.outputs] == ["label", "probabilities"]
    assert [v.name for v in model.graph.outputs] == ["label", "proba"]


@pytest.mark.parametrize(
    "end",
    ["s = SequenceConstruct(x, h)", "s = SequenceConstruct(h)\n  n = SequenceLength(s)"],
    ids=["reads-an-input", "is-read"],
)
def test_a_tail_that_cannot_stand_alone_stays(end: str) -> None:
    outputs = "seq(float[]) s, int64 n" if "n =" in end else "seq(float[]) s"
    text = f'<ir_version: 8, opset_import: ["" : 15]>\ng (float[N,4] x) => ({outputs}) {{ h = Relu(x)\n  {end} }}'
    model = load(onnx.parser.parse_model(text))
    assert cut(model)[0] is model


def test_what_has_no_distance_is_named() -> None:
    tally = Tally()
    same = {"y": np.ones((2, 3), np.float32), "pieces": [np.ones(2)], "none": None}
    tally.add(same, same)
    assert [(r.name, r.not_compared) for r in tally.results()] == [
        ("y", ""),
        ("pieces", "a sequence"),
        ("none", "no value"),
    ]
