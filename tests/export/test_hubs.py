"""Models of hubs: transformers from folders made here, torchvision and timm where they are installed, no downloads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import onnxgrail
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.cli import main
from onnxgrail.errors import MissingExtraError, ModelError, UsageError

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 50}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 16, "bos_token_id": 0}
PICTURE = {"image_size": 16, "patch_size": 4}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of save_pretrained, tiny and with random weights."""
    lib, folder = pytest.importorskip("transformers"), tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    made = {
        "bert": lib.BertForSequenceClassification(lib.BertConfig(**TEXT)),
        "gpt2": lib.GPT2LMHeadModel(lib.GPT2Config(**GPT2, eos_token_id=0)),
        "llama": lib.LlamaForCausalLM(lib.LlamaConfig(**TEXT, num_key_value_heads=2)).to(torch.bfloat16),
        "vit": lib.ViTForImageClassification(lib.ViTConfig(**TEXT, **PICTURE)),
        "t5": lib.T5ForConditionalGeneration(
            lib.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=50)
        ),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
    return folder


def test_a_checkpoint_becomes_a_file_that_compress_narrows(checkpoints: Path, tmp_path: Path) -> None:
    dense, small = tmp_path / "bert.onnx", tmp_path / "small.onnx"
    done = CliRunner().invoke(main, ["export", f"transformers:{checkpoints / 'bert'}", str(dense), "--json"])
    assert done.exit_code == 0, done.stderr
    data = json.loads(done.stdout)
    assert (data["exporter"], data["attention"], data["outputs"]) == ("dynamo", "eager", ["logits"])
    assert data["inputs"] == {key: ["batch", "sequence"] for key in ("input_ids", "attention_mask", "token_type_ids")}
    words = ["compress", str(dense), "-o", str(small), "--unit-ratio", "0.5", "--samples", "8", "--compensate", "grail"]
    done = CliRunner().invoke(main, [*words, "--json"])
    assert done.exit_code == 0, done.stderr
    blocks = json.loads(done.stdout)["blocks"]
    assert (
        sorted(block["kind"] for block in blocks if block["kept"] < block["units"])[:4] == ["heads"] * 2 + ["mlp"] * 2
    )
    assert small.stat().st_size < dense.stat().st_size


@pytest.mark.parametrize(
    ("name", "exporter", "attention", "inputs"),
    [
        ("gpt2", "dynamo", "sdpa", {"input_ids": ("batch", "sequence"), "attention_mask": ("batch", "sequence")}),
        ("llama", None, None, {"input_ids": ("batch", "sequence"), "attention_mask": ("batch", "sequence")}),
        ("vit", "torchscript", "sdpa", {"pixel_values": ("batch", 3, 16, 16)}),
        (
            "t5",
            "torchscript",
            None,
            {
                "input_ids": ("batch", "sequence"),
                "attention_mask": ("batch", "sequence"),
                "decoder_input_ids": ("batch", "decoder_sequence"),
            },
        ),
    ],
)
def test_families(
    name: str, exporter: str | None, attention: str | None, inputs: dict[str, Any], checkpoints: Path, tmp_path: Path
) -> None:
    source = f"transformers:{checkpoints / name}"
    result = onnxgrail.export(source, tmp_path / "m.onnx", exporter=exporter, attention=attention)
    assert result.gates_passed, result.notes
    assert result.inputs == inputs
    assert result.outputs[0] == "logits"
    assert result.exporter == (exporter or "dynamo")


def test_tasks_and_weights_that_are_not_there(checkpoints: Path, tmp_path: Path) -> None:
    source, settings = f"transformers:{checkpoints / 'gpt2'}", {"exporter": "torchscript", "force": True}
    bare = onnxgrail.export(source, tmp_path / "m.onnx", task="feature-extraction", **settings)
    assert bare.outputs == ("last_hidden_state",)
    assert not bare.notes
    other = onnxgrail.export(source, tmp_path / "m.onnx", task="token-classification", **settings)
    assert any("are random: classifier" in note for note in other.notes)
    drawn = onnxgrail.export(source, tmp_path / "m.onnx", random_weights=True, **settings)
    assert "weights are random" in drawn.notes
    with pytest.raises(UsageError, match="feature-extraction"):
        onnxgrail.export(source, tmp_path / "n.onnx", task="poetry")


def test_shapes_of_users(checkpoints: Path, tmp_path: Path) -> None:
    source, settings = f"transformers:{checkpoints / 'vit'}", {"exporter": "torchscript", "static": True}
    result = onnxgrail.export(source, tmp_path / "m.onnx", input_shapes={"pixel_values": (4, 3, 16, 16)}, **settings)
    assert result.inputs == {"pixel_values": (4, 3, 16, 16)}
    with pytest.raises(UsageError, match="It has pixel_values"):
        onnxgrail.export(source, tmp_path / "n.onnx", input_shapes={"x": (1,)}, **settings)


def test_code_of_a_checkpoint_is_not_run(checkpoints: Path, tmp_path: Path) -> None:
    folder, mark = tmp_path / "own", tmp_path / "ran"
    folder.mkdir()
    config = json.loads((checkpoints / "vit" / "config.json").read_text())
    own = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}
    config |= {"model_type": "mine", "architectures": ["Mine"], "auto_map": own}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Config: pass\nclass Model: pass\n")
    with pytest.raises(ModelError, match="Code of checkpoints is not run"):
        onnxgrail.export(f"transformers:{folder}", tmp_path / "m.onnx")
    assert not mark.exists()


def test_pickles_of_a_checkpoint_are_not_run(checkpoints: Path, tmp_path: Path) -> None:
    folder, mark = tmp_path / "pickled", tmp_path / "ran"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoints / "vit" / "config.json").read_bytes())

    class Bomb:
        def __reduce__(self) -> Any:
            return open, (str(mark), "w")

    torch.save({"weight": Bomb()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot load"):
        onnxgrail.export(f"transformers:{folder}", tmp_path / "m.onnx")
    assert not mark.exists()


# -------------------------------------------------------------------------------------------------- torchvision, timm


@pytest.mark.parametrize("spec", ["torchvision:squeezenet1_1", "timm:resnet10t"])
def test_architectures(spec: str, tmp_path: Path) -> None:
    pytest.importorskip(spec.partition(":")[0])
    shape = {"x": (2, 3, 64, 64)}
    result = onnxgrail.export(spec, tmp_path / "m.onnx", random_weights=True, input_shapes=shape)
    assert result.gates_passed
    assert result.inputs == {"x": ("batch", 3, 64, 64)}


@pytest.mark.parametrize("package", ["torchvision", "timm", "transformers"])
def test_missing_packages_are_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"pip install '?{package}|onnxgrail\[export\]"):
        onnxgrail.export(f"{package}:name", tmp_path / "m.onnx")


class Stand(torch.nn.Module):
    """In the place of a hub's network."""

    pretrained_cfg = SimpleNamespace(input_size=(3, 20, 20))

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x: Any) -> Any:
        return self.conv(x).mean((2, 3))


def timm_of(asked: list[bool]) -> ModuleType:
    """A timm with one model, whose weights are on no network."""

    def create(name: str, *, pretrained: bool, exportable: bool) -> Stand:
        asked.append(pretrained)
        if pretrained:
            raise OSError("no route\nto anywhere")
        return Stand()

    found: Any = ModuleType("timm")
    found.is_model, found.list_models, found.create_model = "one".__eq__, lambda: ["one"], create
    return found


def test_names_and_networks_of_hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setitem(sys.modules, "timm", timm_of(asked))
    with pytest.raises(ModelError, match=r"no model 'ona'. Close are one"):
        onnxgrail.export("timm:ona", tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"no route. Fetch the weights"):
        onnxgrail.export("timm:one", tmp_path / "m.onnx")
    result = onnxgrail.export("timm:one", tmp_path / "m.onnx", random_weights=True, exporter="torchscript")
    assert asked == [True, False]
    assert result.inputs == {"x": ("batch", 3, 20, 20)}


def test_a_folder_of_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm itself is told that the name is a folder."""
    made: list[str] = []
    lib = timm_of([])
    lib.create_model = lambda name, **_: (made.append(name), Stand())[1]
    monkeypatch.setitem(sys.modules, "timm", lib)
    (tmp_path / "mine").mkdir()
    result = onnxgrail.export(f"timm:{tmp_path / 'mine'}", tmp_path / "m.onnx", exporter="torchscript")
    assert made == [f"local-dir:{tmp_path / 'mine'}"]
    assert result.gates_passed
    with pytest.raises(ModelError, match="timm has no model"):
        onnxgrail.export(f"timm:{tmp_path / 'other'}", tmp_path / "n.onnx")


def test_a_folder_that_timm_has_written(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(3)
    module = timm.create_model("resnet10t", num_classes=7)
    timm.models.save_for_hf(module, tmp_path / "mine", safe_serialization=True)
    shape = {"x": (2, 3, 64, 64)}
    assert onnxgrail.export(f"timm:{tmp_path / 'mine'}", tmp_path / "m.onnx", input_shapes=shape).gates_passed
    with open_session(tmp_path / "m.onnx") as session:
        x = torch.randn(1, 3, 64, 64)
        (found,) = session.run({"x": x.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(found), module.eval()(x).detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("random", [True, False])
def test_drawn_weights_fetch_no_part_of_the_network(
    random: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def builder(*, weights: Any = None, weights_backbone: Any = "fetched") -> Stand:
        asked.update(weights=weights, backbone=weights_backbone)
        return Stand()

    lib: Any = ModuleType("torchvision")
    lib.models = SimpleNamespace(
        list_models=lambda: ["net"],
        get_model_weights=lambda _: SimpleNamespace(DEFAULT="best"),
        get_model_builder=lambda _: builder,
        get_model=lambda _, **choices: builder(**choices),
    )
    monkeypatch.setitem(sys.modules, "torchvision", lib)
    onnxgrail.export("torchvision:net", tmp_path / "m.onnx", random_weights=random, exporter="torchscript")
    assert asked == {"weights": None, "backbone": None} if random else {"weights": "best", "backbone": "fetched"}


def test_networks_that_need_another_torch_are_no_riddle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingExtraError, match="that fits torch"):
        onnxgrail.export("torchvision:resnet18", tmp_path / "m.onnx")
