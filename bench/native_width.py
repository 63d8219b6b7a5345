"""Time narrowed streams against models that were built at the narrow width: `python -m bench.native_width`.

Six layers of width 512 with random weights, whose streams are turned and narrowed to 256; heads and neurons stay. One
thread, processor time, all models in turn. Needs torch, transformers and openvino; prints JSON.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import openvino
import torch
import transformers

import onnxgrail
from onnxgrail.calibration.observe import observe
from onnxgrail.core import Feed
from onnxgrail.graph.cost.counting import macs
from onnxgrail.graph.trace.tracer import trace
from tests.turned import orthogonal, turned, without

WIDTH, NARROW, TOKENS, LAYERS, ROUNDS = 512, 256, 128, 6, 40
Run = Callable[[], object]


def _llama(width: int) -> Any:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    sizes = {"hidden_size": width, "intermediate_size": 2048, "num_hidden_layers": LAYERS, "vocab_size": 1000}
    return transformers.LlamaModel(transformers.LlamaConfig(**sizes, **heads, use_cache=False))


def _t5(width: int) -> Any:
    config = transformers.T5Config(d_model=width, d_kv=64, d_ff=2048, num_layers=LAYERS, num_heads=8, vocab_size=1000)
    return transformers.T5EncoderModel(config)


class First(torch.nn.Module):
    """The first output alone."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Any, mask: Any) -> Any:
        """Run it."""
        return self.inner(input_ids=ids, attention_mask=mask)[0]


def main() -> None:
    """Measure all models and print the rows."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="native-") as folder:
        for name, make in {"Llama": _llama, "T5 encoder": _t5}.items():
            rows += [{"model": name, **row} for row in measured(make, Path(folder))]
    print(json.dumps({"version": onnxgrail.__version__, "rows": rows}, indent=1))


def measured(make: Callable[[int], Any], folder: Path) -> list[dict[str, Any]]:
    """Return a row per runtime: milliseconds, and what is reached of the gain of a native model and of the MACs."""
    files = [folder / f"{name}.onnx" for name in ("dense", "narrowed", "native")]
    for width, file in ((WIDTH, files[0]), (NARROW, files[2])):
        _export(make(width), file)
    dense = ir.load(files[0])
    feed: Feed = {v.name or "": np.ones((1, TOKENS), np.int64) for v in dense.graph.inputs}
    ir.save(without(*turned(dense, feed, orthogonal(WIDTH)), NARROW), files[1])
    ideal = _macs(files[0], feed) / _macs(files[1], feed)
    rows = []
    for runtime, runs in {"ONNX Runtime": _sessions(files, feed), "OpenVINO": _compiled(files, feed)}.items():
        before, after, native = timed(runs)
        gain = before / after
        rows.append(
            {
                "runtime": runtime,
                "dense_ms": before,
                "narrowed_ms": after,
                "native_ms": native,
                "share_of_native": round((gain - 1) / (before / native - 1), 3),
                "share_of_macs": round((gain - 1) / (ideal - 1), 3),
            }
        )
    return rows


def _export(module: Any, file: Path) -> None:
    ids = torch.ones(1, TOKENS, dtype=torch.int64)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(First(module).eval(), (ids, ids), file, dynamo=True, external_data=False, verbose=False)


def _macs(file: Path, feed: Feed) -> int:
    model = ir.load(file)
    return macs(model, trace(model, observe(model, feed)))


def _sessions(files: Sequence[Path], feed: Feed) -> list[Run]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    sessions = [ort.InferenceSession(file, options, providers=["CPUExecutionProvider"]) for file in files]
    return [lambda one=one: one.run(None, feed) for one in sessions]  # type: ignore[misc]


def _compiled(files: Sequence[Path], feed: Feed) -> list[Run]:
    core, settings = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    requests = [core.compile_model(file, "CPU", settings).create_infer_request() for file in files]
    return [lambda one=one: one.infer(feed) for one in requests]  # type: ignore[misc]


def timed(runs: Sequence[Run]) -> list[float]:
    """Return the median milliseconds of processor time of each, all run in turn."""
    spent: list[list[float]] = [[] for _ in runs]
    for turn in range(ROUNDS + 3):
        for run, times in zip(runs, spent, strict=True):
            started = time.process_time()
            run()
            if turn >= 3:
                times.append((time.process_time() - started) * 1e3)
    return [round(statistics.median(times), 2) for times in spent]


if __name__ == "__main__":
    main()
