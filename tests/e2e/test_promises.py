"""Promises for every model: nothing moves that was not asked to move."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest

import onnxgrail
from tests.command import in_a_process, said
from tests.command import run as cli
from tests.contract.attention import attention
from tests.tiny import tiny

from . import nets
from .decorated import decorated, differences, leaves, values

NETS = {
    "mlp": (nets.mlp, nets.vectors),
    "convnet": (nets.convnet, nets.images),
    "transformer": (nets.transformer, lambda: nets.tokens(padded=True)),
    "decorated": (decorated, nets.vectors),
}
# What the format library changes and nobody can read anything from.
HARMLESS = re.compile(r"/graph/node\[second\]/output$")  # an empty name at the end
CALL = re.compile(  # a local function is written out where it is called
    r"/functions|/opset_import(/order|\[local\])|/graph/node\[s\]/(name|op_type|doc_string|domain|metadata_props)"
)
WEIGHT_INFO = re.compile(r"/graph/value_info(/order$|\[(w\d|b\d|unused|top)\])")
RECIPE = re.compile(r"/metadata_props(/order$|\[onnxgrail\.recipe\])")  # every run says how it went
WEIGHT_NOTES = re.compile(r"/graph/initializer\[\w+\]/(doc_string|metadata_props)")
WIDTHS = re.compile(r"/graph/value_info\[(z|h|m)\d\]/type/tensor_type/shape/dim\[#1\]/dim_value$")


def run(model: Any, feed: nets.Arrays) -> dict[str, Any]:
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


def saved(folder: Path, name: str) -> tuple[Path, Path, nets.Arrays]:
    """A net and its data as files."""
    make, draw = NETS[name]
    onnx.save(make(), folder / "m.onnx")
    np.savez(folder / "d.npz", **draw())
    return folder / "m.onnx", folder / "d.npz", draw()


def command(*words: object) -> Any:
    return cli("compress", "--ratio=0.3", *words)


def digest(path: Path) -> tuple[str, int]:
    return hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns


# ----------------------------------------------------------------------------------------- nothing asked, nothing done


@pytest.mark.parametrize("name", NETS)
def test_ratio_zero_changes_no_bit(name: str, tmp_path: Path) -> None:
    model, data, feed = saved(tmp_path, name)
    result = command(model, "--ratio", 0, "--data", data)
    assert result.exit_code == 0, result.output
    slim = tmp_path / "m.compressed.onnx"
    before, after = run(model, feed), run(slim, feed)
    assert list(before) == list(after)
    for key, array in before.items():
        assert array.tobytes() == after[key].tobytes()
    assert values(onnx.load(model)) == values(onnx.load(slim))


@pytest.mark.parametrize("choice", [{"compensate": "none"}, {"reducer": "fold"}, {"closed_loop": False}])
def test_ratio_zero_changes_no_bit_with_any_method(choice: dict[str, Any]) -> None:
    model, feed = nets.transformer(), nets.tokens()
    result = onnxgrail.compress(model, data=feed, unit_ratio=0, **choice)
    slim = onnx.ModelProto.FromString(nets.to_bytes(result.model))
    np.testing.assert_array_equal(run(model, feed)["y"], run(slim, feed)["y"])
    assert result.report.data["model"]["achieved_ratio"] == 0


def test_blocks_that_were_not_asked_for_keep_their_bytes(tmp_path: Path) -> None:
    """Fits of layers further down change weights of others, unless they are left out."""
    model, data, _ = saved(tmp_path, "transformer")
    choices = ("--blocks", "mlp", "--include", "u0", "--fit", "prior,affine,blend,patch", "--no-check")
    assert command(model, *choices, "--data", data).exit_code == 0
    before, after = values(onnx.load(model)), values(onnx.load(tmp_path / "m.compressed.onnx"))
    assert {n for n in before if before[n] != after[n]} == {"up0", "up0_bias", "down0", "down0_bias"}


# ---------------------------------------------------------------------------------------------------------- same bytes


def test_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    model, data, _ = saved(tmp_path, "transformer")
    ways = (("wanda", "prune", "auto"), ("random", "prune", "uniform"), ("wanda", "fold", "uniform"))
    for selector, reducer, allocate in ways:
        outputs = [tmp_path / f"{selector}.{reducer}.{k}.onnx" for k in range(2)]
        for output in outputs:
            words = (model, output, "--data", data, "--selector", selector, "--reducer", reducer, "--samples", 13)
            assert command(*words, "--allocate", allocate).exit_code == 0
        assert outputs[0].read_bytes() == outputs[1].read_bytes()
    seeds = [tmp_path / f"seed{seed}.onnx" for seed in (1, 2)]
    for seed, output in enumerate(seeds, start=1):
        words = (model, output, "--data", data, "--selector", "random", "--seed", seed, "--allocate", "uniform")
        assert command(*words).exit_code == 0
    assert seeds[0].read_bytes() != seeds[1].read_bytes()


def measured_weights() -> onnx_ir.Model:
    """A chain of layers, and an output with the sizes of all its weights."""
    layers = "".join(
        f"h{k} = MatMul(x{k}, w{k})\nx{k + 1} = Relu(h{k})\ns{k} = Shape(w{k})\nt{k} = Cast<to=1>(s{k})\n"
        for k in range(6)
    )
    ends = f"z = Concat<axis=0>({', '.join(f't{k}' for k in range(6))})\ny = MatMul(x6, w6)"
    return tiny("float[N,8] x0 => float[] y, float[] z", layers + ends, {f"w{k}": (8, 8) for k in range(7)})


def test_processes_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file, _ = saved(tmp_path, "decorated")
    measured, bent = tmp_path / "measured.onnx", tmp_path / "bent.onnx"
    onnx_ir.save(measured_weights(), measured)
    bends = "v4 = Relu(v3)\nv5 = Tanh(v4)\nv6 = Elu(v5)\n"  # three nodes that depend on the basis; one is named
    onnx_ir.save(attention(softmax=f"{bends}a3 = Softmax<axis=-1>(a2)\no0 = MatMul(a3, v6)"), bent)
    written = []
    for seed in ("0", "1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        names = {"data": model, "random": model, "sizes": measured}
        outputs = {tmp_path / f"{seed} {name}.onnx": source for name, source in names.items()}
        calls = [["compress", str(source), str(output), "--ratio=0.3", "-q"] for output, source in outputs.items()]
        calls[0] += ["--data", str(file)]
        calls += [["inspect", str(bent), "--report", str(tmp_path / f"{seed}.json")]]
        assert [(code, said(text)) for code, text in in_a_process([(tmp_path, c) for c in calls])] == [(0, "")] * 4
        written.append([path.read_bytes() for path in (*outputs, tmp_path / f"{seed}.json")])
    assert written[0] == written[1] == written[2]


def test_the_input_is_never_touched(tmp_path: Path) -> None:
    model, data, _ = saved(tmp_path, "mlp")
    (tmp_path / "external").mkdir()
    linked = tmp_path / "external" / "m.onnx"
    onnx.save(onnx.load(model), linked, save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    files = [model, linked, linked.with_name("m.onnx.data"), data]
    before = [digest(f) for f in files]
    for source in (model, linked):
        assert command(source, "--data", data).exit_code == 0
        for words in ((), ("--dry-run",), ("--save-as-external-data",)):
            assert command(source, "--data", data, "--allocate=uniform", "--force", *words).exit_code == 0
        assert command(source, source, "--force").exit_code == 1
    assert [digest(f) for f in files] == before


# --------------------------------------------------------------------------------------------- everything else is kept


def changes(tmp_path: Path, name: str = "decorated", **choices: Any) -> dict[str, tuple[Any, Any]]:
    model, data, _ = saved(tmp_path, name)
    onnxgrail.compress(model, data=data, **choices)
    found = differences(onnx.load(model), onnx.load(tmp_path / "m.compressed.onnx"))
    return {
        path: pair
        for path, pair in found.items()
        if not HARMLESS.search(path) and not CALL.match(path) and not RECIPE.match(path)
    }


def test_everything_but_the_narrowed_weights_is_kept(tmp_path: Path) -> None:
    found = changes(tmp_path, unit_ratio=0.5)
    weights = {f"/graph/initializer[{n}]/{part}" for n in ("w0", "b0", "w1", "b1") for part in ("dims", "raw_data")}
    weights |= {f"/graph/initializer[w2]/{part}" for part in ("dims", "raw_data")}
    weights.add("/graph/initializer[b2]/raw_data")  # the fit moves the bias of what reads them
    widths = {path for path in found if WIDTHS.search(path)}
    assert len(widths) == 5
    rest = {p for p in found if not (WEIGHT_INFO.search(p) or WEIGHT_NOTES.search(p))}
    assert rest == weights | widths


def test_ratio_zero_keeps_everything(tmp_path: Path) -> None:
    found = changes(tmp_path, unit_ratio=0)
    assert not {p for p in found if not (WEIGHT_INFO.search(p) or WEIGHT_NOTES.search(p))}


@pytest.mark.parametrize("ratio", [0, 0.5])
def test_functions_are_written_out(ratio: float, tmp_path: Path) -> None:
    model, data, feed = saved(tmp_path, "decorated")
    onnxgrail.compress(model, data=data, unit_ratio=ratio)
    slim = onnx.load(tmp_path / "m.compressed.onnx")
    assert not slim.functions
    (node,) = [n for n in slim.graph.node if "s" in n.output]
    assert (node.domain, node.op_type, list(node.input)) == ("", "Mul", ["x", "gain"])
    np.testing.assert_array_equal(run(model, feed)["second"], run(tmp_path / "m.compressed.onnx", feed)["second"])


@pytest.mark.parametrize("ratio", [0, 0.5])
def test_weights_keep_their_notes(ratio: float, tmp_path: Path) -> None:
    assert not {p for p in changes(tmp_path, unit_ratio=ratio) if WEIGHT_NOTES.search(p)}


@pytest.mark.parametrize("ratio", [0, 0.5])
def test_no_value_info_is_invented(ratio: float, tmp_path: Path) -> None:
    assert not {p for p in changes(tmp_path, unit_ratio=ratio) if WEIGHT_INFO.search(p)}


def test_the_walk_sees_every_kind_of_change() -> None:
    paths = [path for path, _ in leaves(decorated())]
    for part in ("ir_version", "opset_import", "producer_name", "model_version", "domain", "functions", "denotation"):
        assert any(part in path for path in paths), part
    for part in ("doc_string", "metadata_props", "dim_param", "quantization_annotation", "input[x]", "output[second]"):
        assert any(part in path for path in paths), part
    other = decorated()
    other.graph.node[0].attribute[0].i = 0
    other.functions[0].node[0].op_type = "Add"
    other.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    del other.graph.output[0]
    assert len(differences(decorated(), other)) >= 4


def test_only_shapes_move_in_a_transformer(tmp_path: Path) -> None:
    found = changes(tmp_path, "transformer", unit_ratio=0.5, blocks=("mlp", "heads"))
    nodes = {p for p in found if p.startswith("/graph/node")}
    assert nodes == {f"/graph/node[{n}{k}_s]/input" for n in "qkv" for k in range(2)}  # the shape they are cut to
    assert not {p for p in found if not p.startswith(("/graph/node", "/graph/initializer", "/graph/value_info"))}


def test_dynamic_axes_still_move(tmp_path: Path) -> None:
    model, data, _ = saved(tmp_path, "transformer")
    assert command(model, "--data", data, "--ratio", 0.5, "--no-check").exit_code == 0
    for batch, length in ((1, 1), (3, 17)):
        feed = {"ids": np.zeros((batch, length), np.int64), "attention_mask": np.ones((batch, length), np.int64)}
        assert run(tmp_path / "m.compressed.onnx", feed)["y"].shape == (batch, length, 6)


# ------------------------------------------------------------------------------------------------------------- no data


@pytest.mark.parametrize("name", NETS)
def test_without_data_it_works_and_says_what_that_costs(name: str, tmp_path: Path) -> None:
    model, _, feed = saved(tmp_path, name)
    result = command(model, "--ratio", 0.3)
    assert result.exit_code == 0, result.output
    warning = said(result.stderr).splitlines()[0]
    assert warning.startswith("Warning: no --data: ")
    assert "random inputs; expect clearly worse outputs on real ones" in warning
    assert not re.search(r"\d", warning), "a number of another model"
    assert run(tmp_path / "m.compressed.onnx", feed).keys() == run(model, feed).keys()
    assert "asked 30.0 %" in result.stdout
    assert command(model, "--ratio", 0.3, "--force", "-q").stderr == ""


@pytest.mark.parametrize("compensate", ["none", "grail"])
def test_the_order_of_units_does_not_matter(compensate: str) -> None:
    """Hidden units in another order are the same network, and stay that when half of them go."""
    model = nets.mlp(dtype=np.float64)
    moved = onnx.ModelProto()
    moved.CopyFrom(model)
    weights = nets.weights_of(model)
    rng = np.random.default_rng(0)
    for k in range(3):
        order = rng.permutation(weights[f"b{k}"].size)
        for name, axis in ((f"w{k}", k % 2 == 1), (f"b{k}", 0), (f"w{k + 1}", (k + 1) % 2 == 0)):
            weights[name] = np.take(weights[name], order, axis=int(axis))
    for tensor in moved.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(weights[tensor.name], tensor.name))
    feed = nets.vectors(dtype=np.float64)
    first, second = (
        onnxgrail.compress(
            m, data=feed, unit_ratio=0.5, round_to=1, compensate=compensate, blocks=("mlp",), check=False
        )
        for m in (model, moved)
    )
    ran = [run(onnx_ir.to_proto(r.model), feed) for r in (first, second)]
    np.testing.assert_allclose(ran[0]["y"], ran[1]["y"], rtol=1e-6, atol=1e-8)
