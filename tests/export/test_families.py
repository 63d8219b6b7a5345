"""Small transformers as exporters write them: their streams turn and lose channels, and two runtimes agree on it.

Exports take seconds each: run with ONNXGRAIL_EXPORTS=1.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

torch = pytest.importorskip("torch")
if not os.environ.get("ONNXGRAIL_EXPORTS"):
    pytest.skip("takes minutes: set ONNXGRAIL_EXPORTS=1", allow_module_level=True)
transformers = pytest.importorskip("transformers")
openvino = pytest.importorskip("openvino", reason="openvino is not installed: extra `test` has it")

from onnxruntime.transformers import optimizer

import onnxgrail
from onnxgrail.graph.cost.counting import parameters
from onnxgrail.graph.io.model_file import load
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.rotate.restore import restore
from tests.oracle import check_same, run
from tests.turned import found_in, orthogonal, projected, turned, without

WIDTH, KEPT = 32, 21
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": WIDTH, "intermediate_size": 64}
DECODER = {**LAYERS, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "use_cache": False}
Made = tuple[Any, dict[str, Any]]


def _ids(length: int) -> Any:
    return torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(length))


def _text(net: Any) -> Made:
    return net, {"input_ids": _ids(7), "attention_mask": torch.ones(2, 7, dtype=torch.int64)}


def _gpt2() -> Made:
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 16}
    return _text(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False)))


def _vit() -> Made:
    config = transformers.ViTConfig(**LAYERS, image_size=16, patch_size=4)
    return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def _whisper() -> Made:
    sizes = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "max_source_positions": 12}
    config = transformers.WhisperConfig(d_model=WIDTH, **sizes, num_mel_bins=8)
    encoder = transformers.models.whisper.modeling_whisper.WhisperEncoder(config)
    return encoder, {"input_features": torch.randn(2, 8, 24)}


def _t5() -> Made:
    config = transformers.T5Config(d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=50)
    config.use_cache = False
    return transformers.T5ForConditionalGeneration(config), {"input_ids": _ids(7), "decoder_input_ids": _ids(5)}


def _t5_encoder() -> Made:
    return _text(transformers.T5EncoderModel(_t5()[0].config))


def _qwen3() -> Made:
    return _text(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER)))


def _gemma3(layers: int = 2) -> Made:
    sizes = {**DECODER, "num_hidden_layers": layers, "query_pre_attn_scalar": 8, "sliding_window": 8}
    return _text(transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes)))


MAKERS: dict[str, Callable[[], Made]] = {
    "gpt2": _gpt2,
    "vit": _vit,
    "whisper encoder": _whisper,
    "t5": _t5,
    "t5 encoder": _t5_encoder,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}


OPTIMIZED = {"gpt2": "gpt2", "vit": "vit", "whisper encoder": "bart", "t5": "t5", "t5 encoder": "t5"}
OPTIMIZED |= {"qwen3": "qwen3", "gemma3": "qwen3"}  # kinds of models that ONNX Runtime's own tool knows


class First(torch.nn.Module):
    """The first output alone, of inputs given in order."""

    def __init__(self, inner: Any, names: list[str]) -> None:
        super().__init__()
        self.inner, self.names = inner, names

    def forward(self, *inputs: Any) -> Any:
        return self.inner(**dict(zip(self.names, inputs, strict=True)))[0]


def exported(made: Made, form: str, path: Path, kind: str = "") -> tuple[ir.Model, dict[str, Any]]:
    """The model as an exporter writes it, or with the fused nodes of ONNX Runtime or of its tool, and its inputs."""
    inner, inputs = made
    net = First(inner, list(inputs)).eval()
    for parameter in net.parameters():  # fresh gains are one and fresh shifts zero
        parameter.data += 0.05 * torch.randn_like(parameter)
    dynamo, version = "dynamo" in form, {"opset_version": 20 if "dynamo" in form else 17}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net, tuple(inputs.values()), path, dynamo=dynamo, external_data=False, verbose=False, **version
        )
    if form == "fused":
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(path)
        options.log_severity_level = 3
        ort.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    if "optimized" in form:
        sizes = {"num_heads": 4, "hidden_size": WIDTH, "opt_level": 0, "use_gpu": False}
        optimizer.optimize_model(str(path), model_type=kind, **sizes).save_model_to_file(str(path))
    model = load(path)
    return model, {v.name or "": a.numpy() for v, a in zip(model.graph.inputs, inputs.values(), strict=True)}


def by_openvino(model: ir.Model, feed: dict[str, Any]) -> dict[str, Any]:
    """Outputs by name from a second runtime."""
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(to_bytes(model)), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return {value.name or "": found for value, found in zip(model.graph.outputs, compiled(feed).values(), strict=True)}


@pytest.mark.parametrize("form", ["dynamo", "torchscript", "fused", "dynamo, optimized", "torchscript, optimized"])
@pytest.mark.parametrize("name", MAKERS)
def test_streams_turn_and_lose_channels(name: str, form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, feed = exported(MAKERS[name](), form, tmp_path / "m.onnx", OPTIMIZED[name])
    want, basis = run(model, feed), orthogonal(WIDTH)
    other, survey = turned(model, feed, basis)
    slim = without(other, survey, KEPT)
    restore(other)
    check_same(run(other, feed), want)
    less = run(slim, feed)
    check_same(less, run(projected(model, feed, basis[:, :KEPT]), feed))
    assert all(np.abs(less[key] - array).max() > 1e-2 * np.abs(array).max() for key, array in want.items())
    for one, outputs in ((model, want), (other, want), (slim, less)):
        check_same(by_openvino(one, feed), outputs)


def test_a_stream_with_many_normalized_writers_is_narrowed_within_the_budget(tmp_path: Path) -> None:
    model, feed = exported(_gemma3(layers=6), "dynamo", tmp_path / "m.onnx")
    found = found_in(model, feed)
    assert not found.refusals
    assert sum("basis" in name for name in found.model.graph.initializers) == 12  # two a layer
    ids = {name: np.concatenate([array] * 8) for name, array in feed.items()}
    result = onnxgrail.compress(tmp_path / "m.onnx", data=ids, target_params="85%", blocks=("stream",), round_to=1)
    budget = result.report.data["model"]["budget"]
    assert 0.97 * budget["limit"] < budget["achieved"] <= budget["limit"]
    assert budget["achieved"] == parameters(result.model)
