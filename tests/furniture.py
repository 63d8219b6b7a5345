"""Files that how-to pages speak of beside the embedded models: photos, an exported folder, a detector, a cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from tests.tiny import ints, tiny
from tests.unit.samples import tokenizer

ROOT = Path(__file__).resolve().parents[1]
WORDS = [f"w{n}" for n in range(40)]
ENCODER = "int64[batch,seq] input_ids, int64[batch,seq] attention_mask => float[batch,seq,16] last_hidden_state"
RARE = 2.0  # lowers the scores of a detector, so that a metric has few boxes to compare
LAYER = """h = Gather(table, input_ids)
m = Cast<to=1>(attention_mask)
e = Unsqueeze(m, last)
g = Mul(h, e)
u = MatMul(g, up)
r = Relu(u)
last_hidden_state = MatMul(r, down)"""
WEIGHTS = {"table": (44, 16), "up": (16, 32), "down": (32, 16), "last": np.array([2])}
DECODER = (
    "int64[batch,seq] input_ids, int64[batch,past] encoder_attention_mask, float[batch,past,16] encoder_hidden_states"
    " => float[batch,seq,44] logits"
)
STEPS = """m = Cast<to=1>(encoder_attention_mask)
e = Unsqueeze(m, last)
g = Mul(encoder_hidden_states, e)
s = ReduceMean<keepdims=1>(g, middle)
h = Gather(table, input_ids)
a = Add(h, s)
u = MatMul(a, up)
r = Relu(u)
d = MatMul(r, down)
logits = MatMul(d, head)"""
BACKBONE = """a = Conv<kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,2]>(images, w1)
b = Relu(a)
c = Conv<kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,2]>(b, w2)
d = Relu(c)
p = Conv<kernel_shape=[1,1]>(d, w3)
f = Reshape(p, shape)
t = Transpose<perm=[0,2,1]>(f)
center, size, scores = Split<axis=2>(t, parts)
z = Softplus(size)
s = Sigmoid(scores)
output = Concat<axis=2>(center, z, s)"""


def exported(root: Path) -> None:
    """Write a folder as Optimum and transformers.js do, with its tokenizer."""
    (root / "onnx").mkdir(parents=True)
    ir.save(tiny(ENCODER, LAYER, WEIGHTS), root / "onnx" / "encoder_model.onnx")
    ir.save(tiny(ENCODER, LAYER, WEIGHTS, seed=1), root / "onnx" / "encoder_model_quantized.onnx")
    more = {**WEIGHTS, "head": (16, 44), "middle": np.array([1])}
    decoder = ir.to_proto(tiny(DECODER, STEPS, more))
    onnx.save(
        decoder, root / "onnx" / "decoder_model.onnx", save_as_external_data=True, size_threshold=500, location="d.data"
    )
    tokenizer(root / "tokenizer.json", WORDS)
    (root / "config.json").write_text('{"hidden_size": 16}')
    (root / "model.safetensors").write_bytes(b"weights")


def sentences(path: Path, seed: int = 0) -> None:
    """Write sentences of the tokenizer's words, one per line."""
    rng = np.random.default_rng(seed)
    path.write_text("\n".join(" ".join(rng.choice(WORDS, 9)) for _ in range(48)))


def photos(folder: Path) -> None:
    """Write images of digits, such that mean and deviation of 0.5 give what the model was trained with."""
    from PIL import Image

    folder.mkdir()
    with np.load(ROOT / "models" / "data" / "digits_resnet.calib.npz") as file:
        pixels = np.round((file["images"][:64, 0] + 1) / 2 * 255).astype(np.uint8)
    for number, one in enumerate(pixels):
        Image.fromarray(one).save(folder / f"{number:03}.png")


def detector(path: Path) -> None:
    """Write a detector with rows of center, size, objectness and two classes per place, and frames for it."""
    weights = {"w1": (16, 3, 3, 3), "w2": (24, 16, 3, 3), "w3": (7, 24, 1, 1)}
    shapes = {"shape": ints(0, 7, -1), "parts": ints(2, 2, 3)}
    ir.save(tiny("float[batch,3,32,32] images => float[] output", BACKBONE, {**weights, **shapes}), path)
    frames = np.random.default_rng(5).normal(size=(64, 3, 32, 32)).astype(np.float32)
    np.savez(path.with_name("frames.npz"), images=frames)


def ultralytics(path: Path) -> None:
    """Write a detector with the output of Ultralytics: (images, 4 + classes, places), no objectness, and few boxes."""
    weights = {"w1": (16, 3, 3, 3), "w2": (24, 16, 3, 3), "w3": (6, 24, 1, 1)}
    shapes = {"shape": ints(0, 6, -1), "parts": ints(2, 2, 2), "rare": np.array(RARE, np.float32)}
    text = BACKBONE.replace("output = Concat<axis=2>", "rows = Concat<axis=2>")
    text = text.replace("s = Sigmoid(scores)", "low = Sub(scores, rare)\ns = Sigmoid(low)")
    text += "\noutput0 = Transpose<perm=[0,2,1]>(rows)"
    ir.save(tiny("float[batch,3,32,32] images => float[] output0", text, {**weights, **shapes}), path)


def metric(path: Path) -> None:
    """Copy the code of a YOLO metric from its page."""
    section = {"yolo.py": "{#yolo}", "ultra.py": "{#ultralytics}"}[path.name]
    page = (ROOT / "docs" / "metric.md").read_text(encoding="utf-8").partition(section)[2]
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    path.write_text(code[1], encoding="utf-8")


def cached(path: Path) -> None:
    """Write a decoder whose caches are inputs, and data with caches."""
    from tests.e2e.test_kv_io import decoder, feeds

    ir.save(decoder(), path)
    np.savez(path.with_suffix(".npz"), **feeds())


FILES: dict[str, Callable[[Path], None]] = {
    "photos": photos,
    "exported": exported,
    "sentences.txt": sentences,
    "others.txt": lambda path: sentences(path, 1),
    "detector.onnx": detector,
    "yolo.py": metric,
    "ultra.py": metric,
    "yolo11n.onnx": ultralytics,
    "cached.onnx": cached,
}
"""Writers of the files that a page may name."""
