"""The same network with its weights or copies in other nodes: the same blocks, widths, bits and outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.graph.io.serial import to_bytes
from tests.forms import as_nodes
from tests.oracle import check_same, run
from tests.prenorm import prenorm
from tests.tiny import VOCABULARY, tiny

IMAGES = {"x": np.random.default_rng(0).standard_normal((24, 3, 6, 6)).astype(np.float32)}
IDS = {"ids": np.random.default_rng(0).integers(0, VOCABULARY, (24, 5))}


def convolutions() -> ir.Model:
    text = """
        a = Conv(x, w0)
        b = Relu(a)
        c = Conv <pads=[1,1,1,1]> (b, w1)
        d = Relu(c)
        e = Add(b, d)
        f = GlobalAveragePool(e)
        g = Flatten(f)
        h = MatMul(g, w2)
        i = Relu(h)
        y = MatMul(i, w3)"""
    weights = {"w0": (64, 3, 3, 3), "w1": (64, 64, 3, 3), "w2": (64, 256), "w3": (256, 8)}
    return tiny("float[N,3,6,6] x => float[] y", text, weights)


def copy_of(value: ir.Value) -> ir.Node:
    """A node that copies a value, and that all its readers now read."""
    readers = [(use.node, use.idx) for use in value.uses()]
    node = ir.Node("", "Identity", [value])
    for reader, position in readers:
        reader.replace_input_with(position, node.outputs[0])
    return node


def plain(model: ir.Model) -> ir.Model:
    return model


def copied(model: ir.Model) -> ir.Model:
    """The legacy exporter of torch writes this for tied weights."""
    for value in list(model.graph.initializers.values()):
        model.graph.insert_before(model.graph[0], copy_of(value))
    return model


def with_copies(model: ir.Model) -> ir.Model:
    """After every node: exporters leave them for dropouts."""
    for node in list(model.graph):
        (out,) = node.outputs
        if not out.is_graph_output():
            model.graph.insert_after(node, copy_of(out))
    return model


def listed(model: ir.Model) -> ir.Model:
    model.graph.inputs.extend(model.graph.initializers.values())
    return model


FORMS = (plain, as_nodes, copied, with_copies, listed)
NETS: dict[str, tuple[Callable[[], ir.Model], dict[str, Any]]] = {
    "convolutions": (convolutions, IMAGES),
    "transformer": (lambda: prenorm(depth=2), IDS),
}
OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "narrowed": lambda _: {"unit_ratio": 0.25},
    "few bits": lambda _: {"ratio": 0, "quantize": "int4", "block_size": 16},
    "a size": lambda size: {"target_size": round(0.65 * size), "compensate": "grail"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("net", NETS)
def test_other_forms(net: str, options: str, tmp_path: Path) -> None:
    make, data = NETS[net]
    choices, results = OPTIONS[options](len(to_bytes(make()))), {}
    for form in FORMS:
        path = tmp_path / f"{form.__name__}.onnx"
        result = onnxgrail.compress(form(make()), path, data=data, **choices)
        blocks = sorted((b["kind"], b["units"], b["kept"]) for b in result.report.data["blocks"])
        bits = sorted(one["bits"] for one in (result.report.data["quantization"] or {}).get("matrices", ()))
        results[form.__name__] = (blocks, bits, path.stat().st_size, run(result.model, data))
    blocks, bits, size, outputs = results.pop("plain")
    assert blocks
    assert bits or options == "narrowed"
    for name, (others, few, other, found) in results.items():
        assert abs(other - size) < 0.1 * size, name
        assert bool(few) == bool(bits), name
        if options != "a size":  # a few bytes more of names can change what so small a network loses
            assert (others, few) == (blocks, bits), name
            check_same(found, outputs)
