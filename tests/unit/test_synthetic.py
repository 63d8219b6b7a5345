from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from onnxgrail.calibration.feeds.reading import Sampling
from onnxgrail.calibration.feeds.signature import Input
from onnxgrail.calibration.shapes.dims import choose
from onnxgrail.calibration.shapes.ids import table_rows
from onnxgrail.calibration.shapes.synthetic import synthetic
from onnxgrail.errors import DataError, UsageError

F32, I64 = np.dtype(np.float32), np.dtype(np.int64)


def model(text, **constants):
    tensors = [ir.tensor(value, name=name) for name, value in constants.items() if name in text]
    return ir.from_onnx_text('<ir_version: 8, opset_import: ["" : 17]>\n' + text, initializers=tensors)


def draw(graph, **options):
    taken = {name: options.pop(name) for name in ("samples", "batch_size", "seed") if name in options}
    batches = synthetic(graph, Sampling(**taken), **options)
    return batches, next(iter(batches))


EMBEDDING = "g (int64[B, S] ids) => (float[B, S, 4] y) {{ {before} y = Gather(table, {what}) }}"
TABLE = np.zeros((50, 4), np.float32)


@pytest.mark.parametrize(
    ("before", "what", "rows"),
    [
        ("", "ids", 50),
        ("i = Cast<to = 6>(ids)", "i", 50),
        ("a = Cast<to = 6>(ids) b = Reshape(a, minus)", "b", 50),
        ("i = Add(ids, two)", "i", 48),
        ("i = Sub(ids, two)", "i", 52),
    ],
)
def test_ids_stay_inside_the_table(before, what, rows):
    constants = {"table": TABLE, "two": np.array(2), "minus": np.array([-1])}
    graph = model(EMBEDDING.format(before=before, what=what), **constants)
    assert table_rows(graph, "ids") == rows
    ids = np.concatenate([f["ids"] for f in synthetic(graph, Sampling(samples=200))])
    assert ids.min() >= 3
    assert ids.max() == rows - 1


def test_the_smallest_table_and_a_transposed_one_count():
    text = """g (int64[B, S] ids) => (float[B, S, 4] y) {
        t = Transpose<perm = [1, 0]>(turned) a = Gather(table, ids) b = Gather(t, ids) y = Add(a, b) }"""
    graph = model(text, table=TABLE, turned=np.zeros((4, 7), np.float32))
    assert table_rows(graph, "ids") == 7
    _, feed = draw(graph)
    assert set(np.unique(feed["ids"])) <= set(range(7))


def test_computed_tables_and_unused_inputs_have_no_rows():
    text = "g (int64[B] ids, float[9, 4] t) => (float[B, 4] y) { y = Gather(t, ids) }"
    assert table_rows(model(text), "ids") is None
    assert table_rows(model(text), "absent") is None


def test_fills_by_role():
    text = """g (float[N, 3, H, W] pixel_values, int64[N, S] attention_mask, int64[N, S] token_type_ids,
        int64[N, S] position_ids, bool[N] flag, int64[N] other, float[N, S] loss_mask) => (float[N, 3, H, W] y)
        { y = Identity(pixel_values) }"""
    _, feed = draw(model(text))
    assert feed["pixel_values"].shape == (8, 3, 64, 64)
    assert abs(feed["pixel_values"].std() - 1) < 0.01
    assert (feed["attention_mask"] == 1).all()
    assert (feed["loss_mask"] == 1).all()
    assert (feed["token_type_ids"] == 0).all()
    assert (feed["other"] == 0).all()
    assert feed["flag"].dtype == bool
    assert feed["flag"].all()
    np.testing.assert_array_equal(feed["position_ids"], np.broadcast_to(np.arange(16), (8, 16)))


@pytest.mark.parametrize(("past", "longest"), [("", 12), (", float[N, 2, P, 8] past_key", 7)])
def test_positions_stay_inside_their_table(past, longest):
    text = f"g (int64[N, S] input_ids, int64[N, S] position_ids{past}) => (float[N, S, 4] y) {{"
    graph = model(text + " e = Gather(table, input_ids) p = Gather(few, position_ids) y = Add(e, p) }",
                  table=TABLE, few=np.zeros((12, 4), np.float32))  # fmt: skip
    _, feed = draw(graph)
    assert feed["input_ids"].shape == feed["position_ids"].shape == (8, longest)
    assert feed["position_ids"].max() == 11


def test_same_seed_same_values_and_feeds_differ():
    graph = model("g (float[N, 3] x) => (float[N, 3] y) { y = Identity(x) }")
    one, two = (list(synthetic(graph, Sampling(samples=16, seed=1))) for _ in range(2))
    assert len(one) == 2
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a["x"], b["x"])
    assert not np.array_equal(one[0]["x"], one[1]["x"])
    assert not np.array_equal(one[0]["x"], draw(graph, samples=16, seed=2)[1]["x"])


def test_sample_counts_and_the_warning():
    graph = model("g (float[N, 3] x) => (float[N, 3] y) { y = Identity(x) }")
    batches, feed = draw(graph, samples=5, batch_size=8)
    assert batches.samples == 5
    assert batches.synthetic
    assert len(feed["x"]) == 5
    assert "no --data" in batches.notes[0]
    fixed, feed = draw(model("g (float[2, 3] x) => (float[2, 3] y) { y = Identity(x) }"), samples=6)
    assert (len(fixed), fixed.samples, len(feed["x"])) == (3, 6, 2)


def shapes(*entries, **options):
    signature = tuple(Input(name=n, dtype=d, shape=s) for n, d, s in entries)
    return choose(signature, batch=2, input_shapes=options.get("input_shapes", {}), sizes=options.get("sizes", {}))


def test_key_value_cache_and_mask_agree():
    for total in ("total_sequence_length", "past_sequence_length + sequence_length", None):
        found = shapes(
            ("attention_mask", I64, ("batch", total)),
            ("input_ids", I64, ("batch", "sequence_length")),
            ("past_key_values.0.key", F32, ("batch", 2, "past_sequence_length", 8)),
        )
        assert found.past == 5
        assert found.shapes["attention_mask"] == (2, 21)
        assert found.shapes["past_key_values.0.key"] == (2, 2, 5, 8)


def test_names_mean_one_size_and_different_names_differ():
    found = shapes(
        ("a", I64, ("batch", "enc_seq")), ("b", I64, ("batch", "dec_seq")), ("c", F32, ("enc_seq", 4))
    ).shapes
    assert found["a"][1] == found["c"][0] != found["b"][1]


def test_unnamed_axes():
    found = shapes(("a", I64, (None, None)), ("b", I64, (None, None)), ("x", F32, (None, None, None, None))).shapes
    assert found == {"a": (2, 16), "b": (2, 16), "x": (2, 3, 64, 64)}


def test_given_shapes_and_sizes_win():
    entries = ("x", F32, ("n", 3, "h", "w")), ("y", F32, ("n", "h"))
    found = shapes(*entries, input_shapes={"x": (1, 3, 224, 200)}).shapes
    assert found == {"x": (1, 3, 224, 200), "y": (1, 224)}
    assert shapes(*entries, sizes={"n": 7, "h": 9, "w": 11}).shapes["x"] == (7, 3, 9, 11)
    for wrong in ({"z": (1,)}, {"x": (1, 3)}, {"x": (1, 4, 8, 8)}):
        with pytest.raises(UsageError):
            shapes(*entries, input_shapes=wrong)


def test_what_cannot_be_drawn():
    with pytest.raises(DataError, match="declares no shape"):
        shapes(("x", F32, None))
    graph = model("g (string[N] x) => (string[N] y) { y = Identity(x) }")
    with pytest.raises(DataError, match="holds text, which cannot be random"):
        draw(graph)


@pytest.mark.parametrize(
    ("op", "inputs", "width"),
    [
        ("GroupQueryAttention", ["q", "", "", "past"], 6),
        ("GroupQueryAttention", ["q", "k", "k", "past"], 12),
        ("MultiHeadAttention", ["q", "k", "k", "", "", "", "past"], 12),
    ],
)
def test_caches_are_as_wide_as_the_heads(op, inputs, width):
    heads = {"num_heads": 4, "kv_num_heads": 2} if op == "GroupQueryAttention" else {"num_heads": 4}
    node = helper.make_node(op, inputs, ["y"], domain="com.microsoft", **heads)
    shapes = {"q": ["B", "S", 48], "k": ["B", "S", 24], "past": ["B", 2, "P", "W"]}
    given = [helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()]
    graph = helper.make_graph([node], "g", given, [helper.make_tensor_value_info("y", 1, None)])
    assert draw(ir.from_proto(helper.make_model(graph)))[1]["past"].shape[-1] == width


def test_caches_are_as_wide_as_what_is_put_behind_them():
    text = """g (float[B, 2, S, 7] k, float[B, 2, past_len, W] past) => (float[B, 2, T, 7] y) {
        y = Concat<axis = 2>(past, k) }"""
    _, feed = draw(model(text))
    assert feed["past"].shape == (8, 2, 5, 7)
