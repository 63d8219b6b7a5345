"""The page of `docs/web.md` in Chromium, with ONNX Runtime Web: the scores are those of ONNX Runtime in Python.

Skipped where there is no Chromium, and where ONNXGRAIL_ORT_WEB does not name the folder of the npm package
onnxruntime-web (`npm install onnxruntime-web` makes `node_modules/onnxruntime-web`).
"""

from __future__ import annotations

import functools
import json
import os
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import onnxgrail
from onnxgrail import models

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "web.md"
DIGITS = models.load("digits_resnet")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder with both models, an image and the runtime, and the address where it is served."""
    package = os.environ.get("ONNXGRAIL_ORT_WEB")
    if not package:
        pytest.skip("ONNXGRAIL_ORT_WEB does not name the folder of onnxruntime-web")
    folder = tmp_path_factory.mktemp("site")
    (folder / "node_modules").mkdir()
    (folder / "node_modules" / "onnxruntime-web").symlink_to(Path(package).resolve())
    for name, kind in (("half.onnx", "none"), ("half.int8.onnx", "int8")):
        onnxgrail.compress(DIGITS.model, folder / name, unit_ratio=0.5, quantize=kind, data=DIGITS.calibration)
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("name", ["half.onnx", "half.int8.onnx"])
def test_scores_are_those_of_python(browser: Any, site: tuple[Path, str], name: str) -> None:
    folder, address = site
    found = re.search(r"^```html\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None
    (folder / f"{name}.html").write_text(found[1].replace('"half.onnx"', f'"{name}"'), encoding="utf-8")
    with np.load(DIGITS.heldout) as file:
        image = file["images"][:1]
    (folder / "image.json").write_text(json.dumps(image.ravel().tolist()))
    page = browser.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{address}/{name}.html")
    page.wait_for_function("document.getElementById('scores').textContent.length > 0", timeout=60_000)
    assert wrong == []
    scores = np.array(json.loads(page.inner_text("#scores")))
    page.close()
    session = onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"])
    expected = session.run(None, {"images": image})[0][0]
    assert scores.argmax() == expected.argmax()
    spread = np.abs(expected).max()
    np.testing.assert_allclose(scores, expected, atol=spread * (1e-4 if name == "half.onnx" else 0.05))
