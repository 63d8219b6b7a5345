"""The bench of models of others: its stored results are complete, and it runs on an embedded model."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest

from bench import real

RESULTS = json.loads(real.RESULTS.read_text(encoding="utf-8"))["models"]


@pytest.mark.parametrize("name", RESULTS)
def test_every_way_was_measured_or_says_why_not(name: str) -> None:
    found = RESULTS[name]
    assert [row["way"] for row in found["rows"]] == list(real.WAYS)
    assert found["rounds"] == real.ROUNDS
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    for row in found["rows"]:
        if "failed" in row:
            assert row["failed"]
            continue
        low, high = row["interval"]
        assert low <= row["ratio"] <= high
        assert row["error"] >= 0


def test_models_of_others_are_there_and_no_path_of_a_machine() -> None:
    assert {"yolox_nano", "nnsplit_en", "silero_vad"} <= RESULTS.keys()
    assert not re.search(r"/(?:tmp|work|home|root|Users)/", json.dumps(RESULTS))


def test_a_model_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "ROUNDS", 9)
    subject = next(one for one in real.subjects(None) if one.name == "digits_resnet")
    found = real.measured(subject, ["best", "ORT int8", "onnxsim"])
    best, runtime, sim = found["rows"]
    known = {row["way"]: row for row in RESULTS["digits_resnet"]["rows"]}
    assert best["agreement"] == pytest.approx(known["best"]["agreement"], abs=0.03)
    assert best["macs"] == pytest.approx(known["best"]["macs"], abs=0.01)
    assert runtime["bytes"] == pytest.approx(known["ORT int8"]["bytes"], abs=0.02)
    if importlib.util.find_spec("onnxsim") is None:
        assert sim == {"way": "onnxsim", "failed": "onnxsim is not installed", "refused": False}
    else:
        assert sim["agreement"] == pytest.approx(1, abs=0.01)


def test_the_interval_is_that_of_the_groups() -> None:
    subject = next(one for one in real.subjects(None) if one.name == "digits_vit")
    wanted = [[np.eye(10, dtype=np.float32)[[n % 10]]] for n in range(64)]
    assert real.agreement(subject, wanted, wanted) == ("top-1", 1.0, 0.0)
    found = [[-one[0]] if n < 8 else one for n, one in enumerate(wanted)]
    _, value, error = real.agreement(subject, found, wanted)
    assert value == 1 - 8 / 64
    assert error == pytest.approx(1.96 * np.sqrt(value * (1 - value) / 64), rel=0.6)


def test_reasons_are_short_and_without_folders() -> None:
    error = ValueError("Load model from /tmp/somewhere/1.onnx failed:\n a | b  Hint: do that")
    assert real.reason(error) == "Load model from 1.onnx failed: a / b"
    assert len(real.reason(ValueError(100 * "words "))) <= 200
    assert Path(real.WORKER).exists()
