"""Write `docs/img/report.png`, the page of an embedded model in Chromium: `python docs/report_picture.py`."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import onnxgrail
from onnxgrail import models

PICTURE = Path(__file__).resolve().parent / "img" / "report.png"
WIDE, HIGH = 1160, 1900

if __name__ == "__main__":
    vit = models.load("digits_vit")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), sync_playwright() as driver:
        shutil.copy(vit.model, "vit.onnx")
        shutil.copy(vit.calibration, "calib.npz")
        onnxgrail.compress("vit.onnx", "small.onnx", ratio=0.5, data="calib.npz", latency=True, report="small.html")
        named = os.environ.get("ONNXGRAIL_BROWSER") or shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=named, args=["--no-sandbox", "--disable-gpu"])
        shown = browser.new_page(viewport={"width": WIDE, "height": HIGH}, color_scheme="light")
        shown.goto(Path("small.html").resolve().as_uri())
        shown.screenshot(path="shown.png")
        browser.close()
        Image.open("shown.png").quantize(64).save(PICTURE, optimize=True)
