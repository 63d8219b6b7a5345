"""Graphs in torch: numbers as in ONNX Runtime, gradients as finite differences say."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")

from onnxgrail import models
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.errors import ModelError, UnsupportedOpError
from onnxgrail.graph.io.model_file import load
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.torchgraph.call import as_array
from onnxgrail.torchgraph.program import check, distance, program_of, tensors
from tests.tiny import feed, mlp, tiny

SHIPPED = ("char_llama", "digits_resnet", "digits_vit")


def shipped(name: str, samples: int = 3) -> tuple[ir.Model, dict[str, Any]]:
    found = models.load(name)
    model = load(found.model)
    with np.load(found.calibration) as file:
        return model, {v.name or "": file[v.name or ""][:samples] for v in model.graph.inputs}


def compared(model: ir.Model, given: dict[str, Any]) -> float:
    """The largest relative difference to ONNX Runtime over all outputs."""
    with open_session(to_bytes(model)) as session:
        wanted = session.run(given)
    with torch.no_grad():
        got = program_of(model).run(tensors(given))
    return max(distance(as_array(got[n], np.dtype(np.float64)), w.astype(np.float64)) for n, w in wanted.items())


def slope(model: ir.Model, given: dict[str, Any], names: list[str]) -> tuple[float, float]:
    """Along one random direction of all these values at once: by gradients, and by central differences."""
    program = program_of(model, floats=torch.float64)
    start = tensors(given, torch.float64)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        values = program.run(start, names)
        ends = program.run(start)
    pull = {n: torch.randn(y.shape, generator=draw, dtype=y.dtype) for n, y in ends.items()}
    step = {n: torch.randn(x.shape, generator=draw, dtype=x.dtype) * x.std(correction=0) for n, x in values.items()}

    def pulled(override: dict[str, Any]) -> Any:
        return sum((y * pull[n]).sum() for n, y in program.run(start, override=override).items())

    leaves = {n: x.clone().requires_grad_() for n, x in values.items()}
    pulled(leaves).backward()
    by_gradient = sum(float((x.grad * step[n]).sum()) for n, x in leaves.items())
    size = 1e-6
    with torch.no_grad():
        up, down = (float(pulled({n: x + sign * size * step[n] for n, x in values.items()})) for sign in (1, -1))
    return by_gradient, (up - down) / (2 * size)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_models_run_as_in_the_runtime(name: str) -> None:
    assert compared(*shipped(name)) < 1e-6


@pytest.mark.parametrize("name", SHIPPED)
def test_gradients_of_all_weights(name: str) -> None:
    model, given = shipped(name)
    names = [n for n, v in model.graph.initializers.items() if v.dtype == ir.DataType.FLOAT and v.const_value.size > 1]
    assert len(names) > 10
    found, wanted = slope(model, given, names)
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("name", "op"), [("char_llama", "Softmax"), ("digits_resnet", "Conv"), ("digits_vit", "Gelu")])
def test_gradients_of_activations_in_between(name: str, op: str) -> None:
    model, given = shipped(name)
    nodes = [n.outputs[0].name or "" for n in model.graph if n.op_type == op]
    found, wanted = slope(model, given, nodes[len(nodes) // 2 :][:1])
    assert found == pytest.approx(wanted, rel=1e-5)


def test_a_weight_that_two_nodes_read_gets_the_sum_of_their_gradients() -> None:
    model = tiny("float[N,4] x => float[N,4] y", "a = MatMul(x, w)\nb = Tanh(a)\ny = MatMul(b, w)", {"w": (4, 4)})
    found, wanted = slope(model, feed(model), ["w"])
    assert found == pytest.approx(wanted, rel=1e-5)


def test_an_override_replaces_what_is_computed() -> None:
    model = mlp(2)
    given = tensors(feed(model))
    program = program_of(model)
    half = program.run(given, ["x1"])["x1"]
    whole = program.run(given)["y"]
    assert torch.equal(program.run({}, ["y"], override={"x1": half})["y"], whole)
    assert not torch.allclose(program.run(given, ["y"], override={"x1": half + 1})["y"], whole)


def test_only_what_is_needed_is_run() -> None:
    model = mlp(3)
    program = program_of(model)
    assert len(program._plan(frozenset({"x2"}), ("y",))) < len(program._plan(frozenset({"x"}), ("y",)))
    with pytest.raises(KeyError):
        program.run({}, ["y"])


def test_weights_share_the_memory_of_the_graph() -> None:
    model = mlp(1)
    own = {name: value.const_value.numpy().copy() for name, value in model.graph.initializers.items()}
    for name, array in own.items():
        array.flags.writeable = name != "stem"  # as those of mapped files
        model.graph.initializers[name].const_value = ir.Tensor(array)
    program = program_of(model)
    assert {n: w.data_ptr() for n, w in program.weights.items()} == {n: a.ctypes.data for n, a in own.items()}


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "double"])
def test_other_types(kind: str) -> None:
    """Each against the same numbers in single precision."""
    rng = np.random.default_rng(0)
    text = "a = MatMul(x, w)\nb = Gelu(a)\nc = LayerNormalization(b, s)\ny = Softmax(c)"
    weights = {"w": rng.normal(size=(4, 8)), "s": rng.normal(size=8)}
    names = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16, "double": ir.DataType.DOUBLE}
    dtype = names[kind].numpy()
    model = tiny(f"{kind}[N,4] x => {kind}[N,8] y", text, {n: w.astype(dtype) for n, w in weights.items()})
    x = rng.normal(size=(3, 4)).astype(dtype)
    found = program_of(model).run(tensors({"x": x}))["y"]
    assert str(found.dtype) == f"torch.{kind}".replace("double", "float64")
    exact = program_of(model, floats=torch.float64).run(tensors({"x": x}, torch.float64))["y"]
    gap = distance(as_array(found, np.dtype(np.float64)), as_array(exact, np.dtype(np.float64)))
    assert gap < {"float16": 5e-3, "bfloat16": 3e-2, "double": 1e-12}[kind]
    assert (gap > 1e-6) == (kind != "double")


def test_an_op_that_is_not_known_is_named() -> None:
    text = "a, b = LSTM<hidden_size=4>(x, w, r)\ny = Relu(b)"
    model = tiny("float[S,N,3] x => float[1,N,4] y", text, {"w": (1, 16, 3), "r": (1, 16, 4)})
    with pytest.raises(UnsupportedOpError, match="LSTM") as caught:
        program_of(model)
    assert caught.value.op == "LSTM"
    assert caught.value.hint


def test_a_variant_that_is_not_known_is_named() -> None:
    text = "y, z = MaxPool<kernel_shape=[2,2]>(x)"
    model = tiny("float[N,3,6,6] x => float[] y, int64[] z", text, {})
    with pytest.raises(UnsupportedOpError, match="MaxPool"):
        program_of(model).run(tensors(feed(model)))


def test_the_guard_lets_equal_numbers_pass_and_no_others() -> None:
    wanted = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    assert check({"y": torch.from_numpy(wanted)}, {"y": wanted}, "part") == 0
    with pytest.raises(ModelError, match="disagree"):
        check({"y": torch.from_numpy(wanted) * 1.01}, {"y": wanted}, "part")
    with pytest.raises(ModelError, match="disagree"):
        check({"y": torch.from_numpy(wanted).T}, {"y": wanted}, "part")
    with pytest.raises(ModelError, match="disagree"):
        check({"y": torch.from_numpy(wanted) * float("nan")}, {"y": wanted}, "part")
