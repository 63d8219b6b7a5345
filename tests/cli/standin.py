"""A stand-in for the library where only its arguments or its words count."""

from __future__ import annotations

from types import SimpleNamespace

import onnxgrail
from onnxgrail.report.report import Report
from tests.command import run

RATIOS = {
    "asked_ratio": 0.3,
    "achieved_ratio": 0.284,
    "ratio_of": "blocks",
    "ratio_total": 20_000_000,
    "model_ratio": 0.2958,
}
REFUSAL = {"value": "v", "node": "n[0]", "op": "Foo", "reason": "no rule for Foo-1"}


def data(**changes):
    sizes = {"params_before": 21_300_000, "params_after": 15_000_000, "macs_before": 2000, "macs_after": None}
    model = {"input": "m.onnx", "output": "o.onnx", "bytes_before": 900, "bytes_after": 4000, **sizes}
    return {
        "schema": 1,
        "recipe": {"min_cosine": 0.99, "blocks": ["conv", "mlp", "heads"], "round_to": 8},
        "model": {**model, **RATIOS},
        "calibration": {"source": "synthetic", "samples": 64, "synthetic": True, "notes": ["no --data: drawn"]},
        "blocks": [
            {"kind": "conv", "units": 10, "kept": 7, "outcome": {"status": "ok", "reason": ""}},
            {"kind": "conv", "units": 4, "kept": 4, "outcome": {"status": "skipped", "reason": "not selected"}},
            {"kind": "stream", "units": 8, "kept": 8, "outcome": {"status": "skipped", "reason": "not selected"}},
        ],
        "refusals": [REFUSAL],
        "verification": {
            "outputs": [{"name": "y", "cosine": 0.98, "nmse": 0.01, "max_abs": 1.0}],
            "judged": {"on": "calibration", "samples": 16, "seen": True},
        },
        "notes": ["a note"],
        **changes,
    }


def recorded(monkeypatch):
    """The arguments of every call of `onnxgrail.compress`, which reports fixed numbers instead."""
    seen = []

    def compress(model, output=None, *, progress, **options):
        progress("trace", 0, 1)
        seen.append({"model": model, "output": output, **options})
        return SimpleNamespace(report=Report(data=data()), output=output, gates_passed=True)

    monkeypatch.setattr(onnxgrail, "compress", compress, raising=False)
    return seen


def replace_compress(monkeypatch, function):
    """Replace `onnxgrail.compress`, for errors that cannot be brought about."""
    monkeypatch.setattr(onnxgrail, "compress", lambda *args, **kwargs: function(), raising=False)


def usage_error(*words):
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert "Error: " in result.stderr
    return result.stderr
