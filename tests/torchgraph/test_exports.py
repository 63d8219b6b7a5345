"""Files of today's exporters, at several opsets: BERT, GPT-2, Llama, ViT, ResNet, MobileNet.

Exports take seconds each and need packages that nothing else needs (transformers, onnxscript, torchvision): run with
ONNXGRAIL_EXPORTS=1.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not os.environ.get("ONNXGRAIL_EXPORTS"):
    pytest.skip("takes minutes: set ONNXGRAIL_EXPORTS=1", allow_module_level=True)

from bench.torchvision_coverage import declare


def _torchvision() -> Any:
    """Also one that was built for another torch: only names of its operators are needed.  None where there is none."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    with contextlib.suppress(RuntimeError):
        return importlib.import_module("torchvision")
    declare()
    return importlib.import_module("torchvision")


torchvision = _torchvision()
transformers = pytest.importorskip("transformers")  # which imports torchvision, too

from onnxgrail.graph.fittable.trainable import trainable
from onnxgrail.graph.io.model_file import load
from tests.torchgraph.test_program import compared, slope

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 50}


def _ids() -> tuple[Any, ...]:
    return (torch.randint(0, 50, (1, 7), generator=torch.Generator().manual_seed(0)),)


def _picture(size: int) -> tuple[Any, ...]:
    return (torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0)),)


def _bert() -> tuple[Any, tuple[Any, ...]]:
    return transformers.BertModel(transformers.BertConfig(**TEXT)), _ids()


def _gpt2() -> tuple[Any, tuple[Any, ...]]:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=16, use_cache=False)
    return transformers.GPT2LMHeadModel(config), _ids()


def _llama() -> tuple[Any, tuple[Any, ...]]:
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2, use_cache=False)
    return transformers.LlamaForCausalLM(config), _ids()


def _vit() -> tuple[Any, tuple[Any, ...]]:
    sizes = {**TEXT, "image_size": 16, "patch_size": 4}
    return transformers.ViTModel(transformers.ViTConfig(**sizes)), _picture(16)


def _resnet() -> tuple[Any, tuple[Any, ...]]:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config), _picture(32)


def _mobilenet() -> tuple[Any, tuple[Any, ...]]:
    if torchvision is None:
        pytest.skip("torchvision is not installed")
    return torchvision.models.mobilenet_v3_small(num_classes=5), _picture(64)


MAKERS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "vit": _vit,
    "resnet": _resnet,
    "mobilenet_v3": _mobilenet,
}


class First(torch.nn.Module):
    """The first output alone; of text all is real, and saying so is what the older exporter needs."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        found = self.inner(x) if x.is_floating_point() else self.inner(x, attention_mask=torch.ones_like(x))
        return found if isinstance(found, torch.Tensor) else found[0]


@pytest.mark.parametrize("opset", [17, 18, 20, 23])
@pytest.mark.parametrize("name", MAKERS)
def test_export(name: str, opset: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    inner, inputs = MAKERS[name]()
    net = First(inner).eval()
    for parameter in net.parameters():  # fresh biases are zero and equal, which exporters merge
        parameter.data += 0.05 * torch.randn_like(parameter)
    path = tmp_path / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, inputs, path, opset_version=opset, dynamo=opset > 17, external_data=False)
    model = load(path)
    given = {model.graph.inputs[0].name or "": inputs[0].numpy()}
    assert compared(model, given) < 1e-6
    weights = sorted(trainable(model).readers)  # without masks of the largest numbers there are
    assert len(weights) > 10
    found, wanted = slope(model, given, weights)
    assert found == pytest.approx(wanted, rel=1e-5)
