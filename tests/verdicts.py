"""Verdicts on outputs as a report holds them, without a model."""

from __future__ import annotations

from typing import Any


def verdict(kind: str = "embedding", value: float | None = 0.948, **changes: Any) -> dict[str, Any]:
    """The verdict on one output."""
    measures = {"classes": "top-1 agreement", "scores": "F1 of scores above 0.5", "embedding": "cosine"}
    higher = kind in ("classes", "scores", "labels", "embedding")
    near = None if value is None else (1 - value if higher else value)
    return {
        "kind": kind,
        "why": "named so",
        "part": "",
        "measure": measures.get(kind, "NMSE"),
        "value": value,
        "higher": higher,
        "interval": None if value is None else [value - 0.01, value + 0.01],
        "lowest": None if value is None else value - 0.1,
        "loss": near,
        "loss_name": "loss",
        "loss_highest": near,
        "details": {},
        **changes,
    }


def output(name: str, *verdicts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The entry of an output with its verdicts."""
    given = {"name": name, "samples": 16, "cosine": 0.948, "nmse": 0.102, "max_abs": 1.08}
    return {**given, "verdicts": list(verdicts), **changes}


def judged(on: str = "held-out", samples: int = 16, **changes: Any) -> dict[str, Any]:
    """Return the data that judged."""
    return {"on": on, "asked": "auto", "source": "calib.npz", "samples": samples, "seen": on == "calibration"} | changes


def checked(*outputs: dict[str, Any], on: str = "held-out", samples: int = 16) -> dict[str, Any]:
    """A verification of these outputs, the first of which is the worst."""
    top = {"output": outputs[0]["name"], **outputs[0]["verdicts"][0]} if outputs else None
    held = {"asked": "auto", "source": "calib.npz", "samples": samples, "outputs": list(outputs)}
    return {
        "checker": True,
        "ort_load": True,
        "outputs": list(outputs),
        "held_out": held if on == "held-out" else None,
        "judged": judged(on, samples),
        "headline": top,
    }
