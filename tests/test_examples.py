"""The examples of docs/deploy.md: a Triton repository that fits the model, a server that answers, a recipe, a table."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.recipe import storage
from onnxgrail.recipe.check import recipe_of

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
PORT = re.compile(r"name: \"(\w+)\"\s+data_type: TYPE_(\w+)\s+dims: \[ ([\d, ]+) \]")


def ports(values: Any) -> list[tuple[str, str, list[int]]]:
    """Name, type and sizes without the batch axis, as Triton writes them."""
    found = []
    for value in values:
        dims = value.type.tensor_type.shape.dim
        assert dims[0].dim_param, "max_batch_size needs an open batch axis"
        assert value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        found.append((value.name, "FP32", [d.dim_value for d in dims[1:]]))
    return found


def test_the_triton_repository_fits_the_model(tmp_path: Path) -> None:
    embedded, small = models.load("digits_resnet"), tmp_path / "model.onnx"
    onnxgrail.compress(
        embedded.model, small, data=embedded.calibration, samples=16, compensate="none", quantize="int8", ratio=0.3
    )
    folder = EXAMPLES / "triton" / "digits_resnet"
    text = re.sub(r"#.*", "", (folder / "config.pbtxt").read_text(encoding="utf-8"))
    assert text.count("{") == text.count("}")
    assert text.count("[") == text.count("]")
    said = [(name, kind, [int(d) for d in dims.split(",")]) for name, kind, dims in PORT.findall(text)]
    for path in (embedded.model, small):
        graph = onnx.load(path).graph
        assert said == ports(graph.input) + ports(graph.output)
    assert re.search(r"^name: \"(\w+)\"", text, re.MULTILINE)[1] == folder.name
    largest = int(re.search(r"max_batch_size: (\d+)", text)[1])
    preferred = re.search(r"preferred_batch_size: \[ ([\d, ]+) \]", text)[1]
    assert max(int(size) for size in preferred.split(",")) <= largest
    assert (folder / "1").is_dir()


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a running example."""
    call = [sys.executable, EXAMPLES / "ort_server" / "serve.py", models.load("digits_resnet").model, "--port", "0"]
    with subprocess.Popen(
        [*map(str, call), "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def test_the_server_answers(server: str) -> None:
    embedded = models.load("digits_resnet")
    with np.load(embedded.heldout) as file:
        feed = {"images": file["images"][:3]}
    body = io.BytesIO()
    np.savez(body, **feed)
    with urllib.request.urlopen(server, data=body.getvalue(), timeout=30) as answer:
        got = np.load(io.BytesIO(answer.read()), allow_pickle=False)["logits"]
    with open_session(embedded.model) as session:
        np.testing.assert_allclose(got, session.run(feed)["logits"], rtol=1e-4, atol=1e-4)
    with urllib.request.urlopen(server, timeout=30) as answer:
        assert answer.read().startswith(b"images tensor(float)")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(server, data=b"no arrays", timeout=30)
    assert refused.value.code == 400


def test_the_recipe_on_the_page_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "r.yaml").write_text(text)
    found = storage.read(tmp_path / "r.yaml")
    assert recipe_of(found.choices).target_params == yaml.safe_load(text)["target-params"] == "50%"
    assert found.named["data"] == "calib.npz"


def test_the_table_is_the_measured_one() -> None:
    spec = importlib.util.spec_from_file_location("shipping_bench", ROOT / "bench" / "shipping.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = json.loads((ROOT / "bench" / "results" / "shipping.json").read_text(encoding="utf-8"))
    assert script.markdown(rows) in PAGE
    assert {(row["model"], row["step"]) for row in rows} == {(m, s) for m in script.NAMES for s in script.STEPS}
