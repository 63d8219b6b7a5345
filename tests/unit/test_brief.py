"""Results and reports print as the table of the terminal, and as HTML in notebooks."""

from __future__ import annotations

import re

import onnxgrail
from tests.e2e import nets


def test_a_result_prints_as_the_terminal_does(tmp_path):
    result = onnxgrail.compress(nets.mlp(), tmp_path / "o.onnx", data=nets.vectors(), ratio=0.3)
    text = str(result)
    model = result.report.data["model"]
    assert repr(result) == text
    assert repr(result.report) == str(result.report)
    assert text.startswith(str(result.report))
    assert text.endswith(f"Written: {tmp_path / 'o.onnx'}")
    assert re.search(rf"^Parameters +{model['params_before']:,} +{model['params_after']:,} +-", text, re.MULTILINE)
    assert "Fidelity: " in text
    assert re.search(r"^Ratio: asked 30\.0 %, achieved [\d.]+ % of the [\d,]+ parameters", text, re.MULTILINE)
    assert "Whole model: " in text


def test_a_notebook_gets_a_table_without_names_as_markup():
    model = nets.mlp()
    result = onnxgrail.compress(model, data=nets.vectors(), dry_run=True, ratio=0.3)
    data = {**result.report.data, "model": {**result.report.data["model"], "input": "<b>m</b>.onnx"}}
    page = onnxgrail.Report(data=data)._repr_html_()
    assert page.startswith("<div><table>")
    assert "<b>" not in page
    assert "Parameters" in result._repr_html_()
    assert "No model was written" in result._repr_html_()
