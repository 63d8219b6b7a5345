"""Biases that several layers read: a change of one needs a copy, which takes bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from tests.tiny import tiny

ROWS = {"x": np.random.default_rng(1).standard_normal((64, 32)).astype(np.float32)}
DEPTH = 6


def saved(body: list[str], sizes: dict[str, tuple[int, ...]], path: Path) -> Path:
    """A model that reads `x` and computes `y`."""
    last = sizes[max(sizes)][-1]
    model = tiny(f"float[N,32] x => float[N,{last}] y", "\n".join(body), sizes, recorded=False)
    onnx.save(ir.to_proto(model), path)
    return path


def small(path: Path, **choices: Any) -> tuple[int, dict[str, Any]]:
    """The bytes of the file, and the report."""
    target = path.with_name("small.onnx")
    report = onnxgrail.compress(path, target, data=ROWS, held_out=0, force=True, **choices).report.data
    assert report["model"]["bytes_after"] == target.stat().st_size
    return target.stat().st_size, report


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with one bias, as tools that join equal constants write them."""
    body, sizes, last = [], {"b": (32,)}, "x"
    for n in range(DEPTH):
        end = "y" if n == DEPTH - 1 else f"c{n}"
        body += [f"a{n} = MatMul({last}, w{n})", f"s{n} = Add(a{n}, b)", f"{end} = Tanh(s{n})"]
        sizes[f"w{n}"], last = (32, 32), end
    return saved(body, sizes, tmp_path_factory.mktemp("shared") / "m.onnx")


@pytest.mark.parametrize("choices", [{"target_size": "40%"}, {"ratio": 0, "quantize": "int4"}])
def test_biases_that_layers_share_change_only_where_no_size_limits_them(shared: Path, choices: dict[str, Any]) -> None:
    size, report = small(shared, **choices)
    found = onnx.load(shared.with_name("small.onnx"))
    biases = [tensor.name for tensor in found.graph.initializer if tensor.name.startswith("b")]
    limited = "target_size" in choices
    assert size <= report["model"]["budget"]["limit"] if limited else len(biases) > 1
    assert len(biases) == 1 or not limited
    assert {one["rounding"] for one in report["quantization"]["matrices"]} == {"carried"}


@pytest.mark.parametrize("choices", [{"target_params": "60%"}, {"ratio": 0.4}])
def test_biases_that_an_identity_passes_are_replaced(choices: dict[str, Any], tmp_path: Path) -> None:
    """Exporters write equal biases as one, which others read through Identity."""
    body, sizes, last = ["b1 = Identity(b)", "b2 = Identity(b)"], {"b": (32,)}, "x"
    for n in range(3):
        end = "y" if n == 2 else f"c{n}"
        body += [f"u{n} = MatMul({last}, v{n})", f"r{n} = Relu(u{n})", f"a{n} = MatMul(r{n}, w{n})"]
        body += [f"s{n} = Add(a{n}, b{n or ''})", f"{end} = Tanh(s{n})"]
        sizes |= {f"v{n}": (32, 48), f"w{n}": (48, 32)}
        last = end
    path = saved(body, sizes, tmp_path / "m.onnx")
    _, report = small(path, **choices)
    found = onnx.load(path.with_name("small.onnx")).graph
    assert report["model"]["budget"] is None or report["model"]["params_after"] <= report["model"]["budget"]["limit"]
    assert not {f"a{n}/unshifted" for n in range(3)} & {name for node in found.node for name in node.output}
    biases = {node.input[1] for node in found.node if node.op_type == "Add" and node.output[0].startswith("s")}
    assert (len(biases) == 3) == ("ratio" in choices)


@pytest.mark.parametrize("goal", ["params", "size"])
@pytest.mark.parametrize("share", [50, 60, 70])
def test_targets_hold_where_a_bias_is_narrowed_for_many_layers(goal: str, share: int, tmp_path: Path) -> None:
    """Steps of a recurrent layer, unrolled: each has a weight of its own, as the exporter of torch writes it."""
    body, sizes, last = [], {"b": (48,), "o": (48, 8)}, "x"
    for n in range(DEPTH):
        body += [f"a{n} = Gemm({last}, w{n}, b)", f"c{n} = Tanh(a{n})"]
        sizes[f"w{n}"], last = (48 if n else 32, 48), f"c{n}"
        body += [f"s{n} = Add(c{n}, c{n - 1})"] if n else []
        last = f"s{n}" if n else last
    path = tmp_path / "m.onnx"
    signature = "float[N,32] x => float[N,8] y"
    onnx.save(ir.to_proto(tiny(signature, "\n".join([*body, f"y = MatMul({last}, o)"]), sizes, recorded=False)), path)
    _, report = small(path, **{f"target_{goal}": f"{share}%"})
    budget = report["model"]["budget"]
    assert budget["achieved"] <= budget["limit"]


def test_sizes_are_used_up_where_biases_are_shared(shared: Path) -> None:
    for share in range(25, 60, 10):
        size, report = small(shared, target_size=f"{share}%")
        assert size <= report["model"]["budget"]["limit"]
