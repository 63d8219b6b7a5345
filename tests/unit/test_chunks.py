"""Which weights may move, and where a graph is cut into blocks."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrail import models
from onnxgrail.graph.cuts.chunks import Chunk, chunks
from onnxgrail.graph.cuts.live import lives
from onnxgrail.graph.fittable.trainable import trainable
from onnxgrail.graph.io.model_file import load
from onnxgrail.graph.trace.facts import Facts, constants
from tests.tiny import mlp, tiny


def cut(model: ir.Model) -> list[Chunk]:
    facts = Facts({}, {}, {}, constants(model), {})
    return chunks(model, trainable(model), lives(model, facts, [1] * len(list(model.graph))))


def test_residual_layers_are_blocks() -> None:
    assert [(c.last, c.heavy) for c in cut(mlp(3))] == [("x0", 1), ("x1", 2), ("x2", 2), ("x3", 2), ("y", 1)]


def test_blocks_cover_the_graph_without_gaps() -> None:
    for name in models.names():
        model = load(models.load(name).model)
        found = cut(model)
        assert [c.begin for c in found] == [0, *(c.end for c in found[:-1])]
        assert found[-1].end == len(list(model.graph))
        weights = trainable(model)
        assert sum(len(weights.within(c.begin, c.end)) for c in found) == len(weights.readers)


def test_a_transformers_layer_is_one_block() -> None:
    found = cut(load(models.load("char_llama").model))
    assert [c.heavy for c in found] == [7, 7, 7, 7, 1]  # four of attention and three of the gated MLP; the head
    assert [c.heavy for c in cut(load(models.load("digits_vit").model))] == [1, 4, 4, 4, 4, 1]


def test_a_residual_block_of_a_convolutional_net_is_one_block() -> None:
    assert [c.heavy for c in cut(load(models.load("digits_resnet").model))] == [1, 2, 3, 3, 1]


def test_weights_are_operands_of_products_and_the_vectors_beside_them() -> None:
    text = """
        e = Gather(table, ids)
        t = Transpose<perm=[1,0]>(w)
        a = MatMul(e, t)
        b = Add(a, bias)
        c = Add(b, mask)
        d = Mul(c, half)
        f = Cast<to=1>(ids)
        g = Mul(f, angles)
        h = Cos(g)
        i = Mul(d, h)
        n = LayerNormalization(i, scale)
        y = MatMul(n, head)
    """
    weights = {
        "table": (7, 4), "w": (6, 4), "bias": (6,), "mask": (6, 6), "half": np.array(0.5, dtype=np.float32),
        "angles": (6,), "scale": (6,), "head": (6, 2),
    }  # fmt: skip
    found = trainable(tiny("int64[6,6] ids => float[] y", text, weights, recorded=False))
    assert set(found.readers) == {"w", "bias", "scale", "head"}
    assert found.matrices == {"w", "head"}
    assert "h" not in found.carriers


def test_what_something_else_reads_stays() -> None:
    text = "e = Gather(w, ids)\na = MatMul(e, v)\nt = Transpose(w)\ny = MatMul(a, t)"
    model = tiny("int64[N] ids => float[] y", text, {"w": (7, 4), "v": (4, 4)}, recorded=False)
    assert set(trainable(model).readers) == {"v"}


def test_a_weight_of_two_blocks_belongs_to_none() -> None:
    text = "a = MatMul(x, w)\nb = Relu(a)\nc = MatMul(b, w)\ny = Relu(c)"
    model = tiny("float[N,4] x => float[] y", text, {"w": (4, 4)}, recorded=False)
    found = trainable(model)
    assert found.readers == {"w": (0, 2)}
    assert [found.within(c.begin, c.end) for c in cut(model)] == [[], []]
    assert found.within(0, 4) == ["w"]
